"""Sequential, parallel and Picard's solves of the same problems, with counts, over lengths; and where they cross.

The layer is fresh, at the larger scale, and read in evaluation mode: every sequence is solved to the tolerance.
`sequential` and `parallel` are the fused kernels, `picard` launches everything once an iteration and has the scan's
kernel alone, `picard in plain torch` none; its scan is a loop over tokens, so that it is tried at short lengths only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from fpexp.bench.counts import Solve, solve_numbers
from fpexp.bench.device import subjects
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.truth import posed
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Picard, Sequential, Solver
from fpexp.ops.backend import only_reference
from fpexp.randomness import generator

TOLERANCE = 0.1
LENGTHS = (16, 64, 256, 1024, 2048)
BATCH = 32

LONG = 1000.0
"""Milliseconds from which on a solve is timed once, compiling and all."""


class Way(NamedTuple):
    """A solver, what it runs under, and the longest length that it is tried at."""

    solver: Solver
    under: Callable[[], AbstractContextManager[None]] = nullcontext
    longest: int = LENGTHS[-1]


FUSED: Mapping[str, Solver] = {
    "sequential": Sequential(tolerance=TOLERANCE, backend="triton"),
    "parallel": Picard(tolerance=TOLERANCE, backend="triton"),
}
"""A launch for all tokens, and one for each iteration."""

WAYS: Mapping[str, Way] = {
    **{name: Way(solver) for name, solver in FUSED.items()},
    "picard": Way(Picard(tolerance=TOLERANCE, backend="reference")),
    "picard in plain torch": Way(Picard(tolerance=TOLERANCE, backend="reference"), only_reference, 256),
}


def items(setup: Setup) -> dict[str, Item]:
    """One for each channel mixer, with all lengths, so that it can say where the ways cross."""
    return {name: partial(_solve, name, setup) for name in subjects.FIXED_POINTS}


@torch.no_grad()
def _solve(name: str, setup: Setup) -> list[Finding]:
    experiment = subjects.make(name, setup.device, setup.rehearse)
    lengths = (3,) if setup.rehearse else LENGTHS
    size = 2 if setup.rehearse else BATCH
    tokens = experiment.task.sample(size, lengths[-1], generator(0, "bench")).inputs.to(setup.device)
    model = experiment.model.eval()
    rows: list[Finding] = []
    times: dict[tuple[str, int], float] = {}
    iterations: dict[int, float] = {}
    for length in lengths:
        layers = posed(model, tokens[:, :length])
        for way, (solver, under, longest) in WAYS.items():
            if length > longest:
                continue
            what = f"{name}, length {length}, batch {size}, {way}"
            solve = partial(_all, solver, [layer.problem() for layer in layers])
            try:
                with under():
                    ms, numbers = _time(solve, setup)
            except UserError as error:  # a kernel that is not there leaves the other ways
                rows.append(Finding(what, str(error), good=False))
                continue
            times[way, length] = ms
            said = f"{numbers['iterations_mean']:.1f} iterations, {numbers['converged']:.0%} converged"
            rows.append(Finding(what, f"{ms:.3g} ms", said, numbers={"ms": ms, **numbers}))
            if way == "parallel":
                iterations[length] = numbers["iterations_max"]
    return [*rows, *crossover(name, times, iterations)]


def _time(solve: Solve, setup: Setup) -> tuple[float, dict[str, float]]:
    """Return milliseconds and counts of a solve."""
    began = time.perf_counter()
    numbers = solve_numbers(solve)
    ms = 1e3 * (time.perf_counter() - began)
    return (ms if ms > LONG or setup.rehearse else setup.milliseconds(solve)), numbers


def _all(solver: Solver, problems: list[Any]) -> list[Any]:
    return [solver.solve(problem, Cap(1000), training=False) for problem in problems]


def crossover(name: str, times: Mapping[tuple[str, int], float], iterations: Mapping[int, float]) -> list[Finding]:
    """Say which way is fastest at each length, and how many tokens a sweep solves while one iteration is made.

    `times` are milliseconds by way and length; `iterations` are those of `parallel`, by length. The latter number is
    what `fpexp.fixed_point.auto.CROSSOVER` asks for.
    """
    lengths = sorted({length for _, length in times})
    fastest = {n: min((ms, way) for (way, length), ms in times.items() if length == n)[1] for n in lengths}
    said = ", ".join(f"{way} at {length}" for length, way in fastest.items())
    rows = [Finding(f"{name}: fastest", said, numbers={"fastest": {str(n): way for n, way in fastest.items()}})]
    tokens = {
        n: times["parallel", n] / count / (times["sequential", n] / n)
        for n, count in iterations.items()
        if ("sequential", n) in times
    }
    if tokens:
        said = ", ".join(f"{number:.3g} at {length}" for length, number in tokens.items())
        numbers = {"tokens": {str(length): number for length, number in tokens.items()}}
        rows.append(Finding(f"{name}: tokens of a sweep in an iteration's time", said, numbers=numbers))
    return rows
