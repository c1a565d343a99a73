"""Training steps a second on A5 at scale=gpu: the fixed points with each channel mixer, and every baseline."""

from __future__ import annotations

import time
from functools import partial

import torch

from fpexp.bench.device import subjects
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.step import training_step
from fpexp.evaluation.metrics import LayerStatistics
from fpexp.randomness import generator

SECONDS = 2.0
"""That are timed of each model."""


def items(setup: Setup) -> dict[str, Item]:
    """One for each model, what is compared with first."""
    return {name: partial(_time, name, setup) for name in (*subjects.BASELINES, *subjects.FIXED_POINTS)}


def _time(name: str, setup: Setup) -> list[Finding]:
    experiment = subjects.make(name, setup.device, setup.rehearse)
    length, size = experiment.task.lengths.max, experiment.config.training.batch_size
    batch = experiment.task.sample(size, length, generator(0, "bench")).to(setup.device)
    cap = experiment.schedule.training_cap(length, generator(0, "bench", 1))
    step = training_step(experiment, batch, cap)
    for _ in range(1 if setup.rehearse else 5):
        step()
    setup.synchronize()
    count, began = 0, time.perf_counter()
    while count < 1 or (not setup.rehearse and time.perf_counter() - began < SECONDS):
        for _ in range(1 if setup.rehearse else 10):
            step()
        setup.synchronize()
        count += 1 if setup.rehearse else 10
    rate = count / (time.perf_counter() - began)
    statistics = LayerStatistics()
    with torch.no_grad():
        statistics.add(experiment.model(batch.inputs, cap, batch.mask).solves)
    solver = experiment.config.solver.target.rpartition(".")[2].lower()
    iterations = statistics.summary().get("iterations_mean")
    against = "" if iterations is None else f"{solver}, {iterations:.1f} iterations"
    numbers = {"steps_per_second": rate, "batch_size": size, "length": length, "iterations_mean": iterations}
    what = f"{name}, batch {size}, length {length}, {experiment.config.precision}"
    return [Finding(what, f"{rate:.3g} steps/s", against, numbers=numbers)]
