"""A training step of FP-Mamba against torch's LSTM: forward, loss, backward, clip, AdamW.

Same task (A5, vocabulary V), batch B, length T, embedding and head (d_model m), and the same inner width d = 2 m, which
is the LSTM's hidden size. Data generation is left out, the learning rate is zero: AdamW then does all of its work and
the weights, and with them the iteration counts, stay as they are from round to round.

Roofline, in multiply-adds a token of one forward pass, C the mixer's coefficients (K: d1 + d1 (d1 + 1) / 2 and the same
of d2; H: r d + r), R the rank of Delta:

    LSTM       4 d (m + d) + d V
    FP-Mamba   m 2d + d (C + 2 N + R) + R d        projections of the input and of x
               + d (C + 2 N) + d d                 projections of s_t = y_{t-1}: the loop's and the gate's
               + d m + m V

The backward of a product costs two forwards, but s in the loop is held fixed and asks for no gradient: its projection
is made once, in the sweep, whose result the evaluation takes over, and once for the gradient of its weights. So a step
of the LSTM has 3 times its line, one of FP-Mamba 3 times its own less d (C + 2 N). At m 64, d 128, N 16, R 4, V 60 that
is 317,952 a token for the LSTM and, for K (C 196), H r=1, 2 and 4 (C 129, 258, 516), 283,392, 240,512, 323,072 and
488,192: 0.9, 0.8, 1.0 and 1.5 times the LSTM's. Divide by cores * lanes of a register * multiply-adds a cycle * clock
for the floor in seconds a token.

What the LSTM does not have: d N exponentials a token in the sweep, in the one-step scan and again in its backward,
each with a few multiply-adds; the mixer, d (d1 + d2) multiply-adds for K and 2 d r for H for each evaluation
that a token takes; for K the power iteration, 10 (d1^2 + d2^2); norms, gates and softplus over d. All of a token stays
in a core's own cache; what main memory sees are the activations kept for the backward, of 4 (C + 2 N + 8 d) bytes a
token, small beside the products. The targets leave a factor of two to three for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fpexp.bench.context import Context
from fpexp.bench.measure import Contender, Target, stopwatch
from fpexp.bench.step import training_step
from fpexp.bench.subjects import check_same_task, fresh, trained
from fpexp.bench.truth import step_checks
from fpexp.build import Experiment
from fpexp.evaluation.metrics import LayerStatistics
from fpexp.fixed_point import Cap
from fpexp.randomness import generator
from fpexp.ranges import Count
from fpexp.tasks import Batch

LSTM = "LSTM"
FRESH = {
    "FP-Mamba-K": (["fp_mamba_k"], 3.0),
    "FP-Mamba-H r=1": (["fp_mamba_h", "model.channel_mixer.rank=1"], 3.0),
    "FP-Mamba-H r=2": (["fp_mamba_h", "model.channel_mixer.rank=2"], 3.0),
    "FP-Mamba-H r=4": (["fp_mamba_h", "model.channel_mixer.rank=4"], 4.0),
}
"""Models, with the most that their step may take in steps of the LSTM."""

CHECKED = 16
"""Sequences that gradients are compared on: the reference keeps B * T * d * N numbers in float64."""


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark; `run` adds a row with trained weights."""

    batch_size: Count = 256
    length: Count = 16
    run: str = ""


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """The LSTM, FP-Mamba at its initialisation, and a trained run if one is named."""
    baseline = fresh("lstm")
    yield _contender(LSTM, baseline, sizes, None)
    for name, (words, target) in FRESH.items():
        yield _contender(name, fresh(*words), sizes, target)
    if sizes.run:
        name, experiment = trained(sizes.run, context)
        check_same_task(sizes.run, experiment.model, baseline.model)
        yield _contender(f"trained {name}", experiment, sizes, _target_of(experiment))


def _contender(name: str, experiment: Experiment, sizes: Sizes, target: float | None) -> Contender:
    batch = experiment.task.sample(sizes.batch_size, sizes.length, generator(0, "bench"))
    cap = experiment.schedule.training_cap(sizes.length, generator(0, "bench", 1))
    few = Batch(batch.inputs[:CHECKED], batch.targets[:CHECKED])
    return Contender(
        name,
        f"batch {sizes.batch_size}, length {sizes.length}",
        stopwatch(training_step(experiment, batch, cap)),
        check=lambda: step_checks(experiment.model, few, cap),
        baseline=None if name == LSTM else LSTM,
        target=None if target is None else Target("ratio", at_most=target),
        numbers=lambda: _iterations(experiment, batch, cap),
    )


@torch.no_grad()
def _iterations(experiment: Experiment, batch: Batch, cap: Cap) -> dict[str, float]:
    """Return the evaluations of f that the step's solve takes, if there is one."""
    statistics = LayerStatistics()
    statistics.add(experiment.model(batch.inputs, cap, batch.mask).solves)
    summary = statistics.summary()
    return {key: summary[key] for key in ("iterations_mean", "iterations_max") if key in summary}


def _target_of(experiment: Experiment) -> float | None:
    """Return the target of a trained model: that of the fresh one with the same channel mixer."""
    mixer = experiment.config.model.settings.get("channel_mixer")
    for words, target in FRESH.values():
        if mixer is not None and mixer == fresh(*words).config.model.settings["channel_mixer"]:
            return target
    return None
