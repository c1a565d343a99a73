"""Table 2: time and peak memory of one layer by length, forward and backward, of Mamba and of FP-Mamba.

The models are those of `experiment=table2_complexity`: Mamba, and FP-Mamba with a cap of l_max whole-sequence
iterations, all of which are made. At their initialisation, in training mode, with the one-step gradient.

Roofline, in the terms of the paper: a forward pass of Mamba is one scan and its projections, O(T); FP-Mamba makes them
and the mixer l_max times, and once more with a gradient, O((T + C_Q) l_max), where C_Q, the mixer of all tokens, is
O(T) too; the backward of both goes through one evaluation, O(T) and O(T + C_Q). So every doubling of the length costs
2, the forward grows with l_max, and neither the backward nor the memory does. Where rows differ from that, short
sequences do not fill the machine yet, or long ones leave its caches.

Memory is that of forward and backward together, at the shortest and the longest length, each in a child process,
above inputs and weights (see `memory`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch

from fpexp.bench.context import Context
from fpexp.bench.measure import Contender, Target, stopwatch
from fpexp.bench.memory import OutOfTime, peak_extra
from fpexp.bench.truth import step_checks
from fpexp.build import Experiment, build, uses_solver
from fpexp.config.compose import compose, expand
from fpexp.config.run import RunConfig
from fpexp.errors import UserError
from fpexp.evaluation.metrics import summed_loss
from fpexp.machine import set_threads
from fpexp.randomness import generator
from fpexp.ranges import Count
from fpexp.tasks import Batch

EXPERIMENT = "table2_complexity"
DOUBLED = Target("ratio", at_most=2.4)
"""Twice, and a fifth for what leaves the caches."""

CHECKED = 2
"""Sequences of the shortest length that gradients are compared on."""

SMALL = 16
"""Tokens of the pass before memory is measured, which loads and compiles everything."""

PASSES = ("forward", "backward")
PEAK = "peak_MB"


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark; `scale` decides the widths."""

    scale: Literal["cpu", "gpu", "paper"] = "cpu"
    lengths: list[Count] = field(default_factory=lambda: [32, 64, 128, 256, 512])
    batch_size: Count = 8
    memory: bool = True


def needed() -> Iterator[tuple[str, str, str | None]]:
    """What table 2 needs: how a row's group begins, the row, and what it must have besides its time."""
    lengths = Sizes().lengths
    for words in expand([f"experiment={EXPERIMENT}"]):
        name = _name(compose(words))
        for which in PASSES:
            for length in lengths:
                yield f"{name}, {which}", f"length {length}", _number(which, length, lengths)


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """Every model at every length, the shorter one being the baseline of the longer."""
    for shorter, longer in pairwise(sizes.lengths):
        if longer != 2 * shorter:
            raise UserError(f"lengths={sizes.lengths} must double: {longer} is not twice {shorter}")
    for words in expand([f"experiment={EXPERIMENT}", f"scale={sizes.scale}", "device=cpu"]):
        experiment = build(compose(words))
        experiment.model.train()
        for which in PASSES:
            for index, length in enumerate(sizes.lengths):
                baseline = f"length {sizes.lengths[index - 1]}" if index else None
                batch = _batch(experiment, sizes.batch_size, length)
                memory = partial(_memory, words, sizes.batch_size, length, context.threads)
                yield Contender(
                    f"length {length}",
                    f"{_name(experiment.config)}, {which}, batch {sizes.batch_size}",
                    _seconds(which, experiment, batch),
                    check=tuple if index else partial(_check, experiment, sizes.batch_size, length),
                    baseline=baseline,
                    target=DOUBLED if index else None,
                    numbers=memory if sizes.memory and _number(which, length, sizes.lengths) else dict,
                )


def _number(which: str, length: int, lengths: Sequence[int]) -> str | None:
    """Return what is measured beside the time: memory at both ends, since a process each takes its time."""
    return PEAK if which == "backward" and length in (lengths[0], lengths[-1]) else None


def _name(config: RunConfig) -> str:
    if not uses_solver(config.model):
        return config.choices.model
    return f"{config.choices.model}, l_max {config.schedule.settings['max_iterations']}"


def _batch(experiment: Experiment, size: int, length: int) -> Batch:
    return experiment.task.sample(size, length, generator(0, "bench"))


def _check(experiment: Experiment, size: int, length: int) -> Sequence[Any]:
    few = _batch(experiment, size, length).rows(slice(CHECKED))
    found = step_checks(experiment.model, few, _cap(experiment, length))
    experiment.model.train()
    return found


def _cap(experiment: Experiment, length: int) -> Any:
    return experiment.schedule.training_cap(length, generator(0, "bench", 1))


def _forward(experiment: Experiment, batch: Batch) -> torch.Tensor:
    output = experiment.model(batch.inputs, _cap(experiment, batch.inputs.shape[1]), batch.mask)
    return summed_loss(output.logits, batch.targets)


def _seconds(which: str, experiment: Experiment, batch: Batch) -> Callable[[], float]:
    if which == "forward":
        return stopwatch(lambda: _forward(experiment, batch))

    def seconds() -> float:
        loss = _forward(experiment, batch)
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    return seconds


def _memory(words: list[str], size: int, length: int, threads: int) -> dict[str, float | str]:
    """Return the peak of forward and backward together in MB, or why there is none."""
    try:
        extra = peak_extra(prepare, words=words, size=size, length=length, threads=threads)
    except OutOfTime as error:
        return {PEAK: str(error)}
    return {PEAK: "not told by this system" if extra is None else extra / 1e6}


def prepare(words: list[str], size: int, length: int, threads: int) -> Callable[[], object]:
    """Return the pass whose memory is measured, in a process of its own."""
    set_threads(threads)
    experiment = build(compose(words))
    experiment.model.train()
    _forward(experiment, _batch(experiment, size, SMALL)).backward()
    batch = _batch(experiment, size, length)

    def work() -> object:
        loss = _forward(experiment, batch)
        loss.backward()
        return loss

    return work
