"""A short run on A5, to an accuracy or to the end of its time: lengths grow as in any run, and so does what is said."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from fpexp.bench.device import subjects
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.build import Experiment
from fpexp.evaluation.length_curve import evaluate_length
from fpexp.evaluation.metrics import Accuracy, summed_loss
from fpexp.machine import autocast
from fpexp.randomness import generator
from fpexp.training.batches import Batches
from fpexp.training.optimizer import learning_rate, make_optimizer

SECONDS = 75.0
"""Of training at most; the rest of the part's time is for starting and for the curve."""

GOAL = 0.99
"""Whole-sequence accuracy at the longest training length that ends the run."""

SAMPLES = 1024
LOOK_EVERY = 100


def items(setup: Setup) -> dict[str, Item]:
    """The run."""
    return {"a run on A5": lambda: _learn(setup)}


def _learn(setup: Setup) -> list[Finding]:
    experiment = subjects.make(subjects.LEARNING, setup.device, setup.rehearse)
    torch.manual_seed(0)
    steps, seconds, right = train(experiment, setup)
    longest = experiment.task.lengths.max
    rows: list[dict[str, Any]] = []
    experiment.model.eval()
    for factor in (1, 2, 4):
        rows.append(evaluate_length(experiment, factor * longest, 8 if setup.rehearse else SAMPLES, "test"))
    curve = ", ".join(f"{row['token_accuracy']:.3f} at {row['length']}" for row in rows)
    return [
        Finding(
            f"A5, {experiment.config.choices.model}: sequences right at length {longest}",
            f"{right:.3f} after {steps} steps in {seconds:.0f} s",
            f"{GOAL} in {SECONDS:.0f} s",
            None if setup.rehearse else right >= GOAL,
            {"steps": steps, "seconds": seconds, "sequence_accuracy": right, "curve": rows},
        ),
        Finding("A5: token accuracy", curve),
    ]


def train(experiment: Experiment, setup: Setup) -> tuple[int, float, float]:
    """Train with the run's own settings; return steps, seconds and the last validation's whole-sequence accuracy."""
    config, model = experiment.config, experiment.model
    batches = Batches(experiment.task, config.training.batch_size, config.seed)
    optimizer = make_optimizer(model, config.training)
    limit = math.inf if config.training.clip is None else config.training.clip
    began, step, right = time.monotonic(), 0, 0.0
    last = 2 if setup.rehearse else config.training.steps
    while step < last and right < GOAL and time.monotonic() - began < SECONDS:
        model.train()
        batch, _ = batches.next(step)
        batch = batch.to(setup.device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.training, step)
        optimizer.zero_grad(set_to_none=True)
        cap = experiment.schedule.training_cap(batch.inputs.shape[1], generator(config.seed, "cap", step))
        with autocast(config):
            output = model(batch.inputs, cap, batch.mask)
        (summed_loss(output.logits, batch.targets) / batch.scored).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        accuracy = Accuracy()
        accuracy.add(output.logits.detach(), batch.targets, batch.examples)
        batches.observe(accuracy.summary())
        step += 1
        if step % LOOK_EVERY == 0 or step == last:
            model.eval()
            samples = 8 if setup.rehearse else SAMPLES
            right = evaluate_length(experiment, experiment.task.lengths.max, samples, "validation")["sequence_accuracy"]
    return step, time.monotonic() - began, right
