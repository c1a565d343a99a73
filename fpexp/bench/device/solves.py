"""Sequential, parallel and Picard's solves of the same problems, with counts, over lengths; and where they cross.

The layer is fresh, at the larger scale, and read in evaluation mode: every sequence is solved to the tolerance.
`sequential` and `picard` use what `auto` finds on the device; `in plain torch` is without a kernel of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from fpexp.bench.counts import solve_numbers
from fpexp.bench.device import subjects
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.truth import posed
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


WAYS: Mapping[str, Way] = {
    "sequential": Way(Sequential(tolerance=TOLERANCE)),
    "picard": Way(Picard(tolerance=TOLERANCE)),
    "picard in plain torch": Way(Picard(tolerance=TOLERANCE), only_reference, 256),
}


def items(setup: Setup) -> dict[str, Item]:
    """One for each channel mixer, with all lengths, so that it can say where the ways cross."""
    return {name: partial(_solve, name, setup) for name in subjects.FIXED_POINTS}


@torch.no_grad()
def _solve(name: str, setup: Setup) -> list[Finding]:
    experiment = subjects.make(name, setup.device, setup.rehearse)
    lengths = (2, 4) if setup.rehearse else LENGTHS
    size = 2 if setup.rehearse else BATCH
    tokens = experiment.task.sample(size, lengths[-1], generator(0, "bench")).inputs.to(setup.device)
    model, rows, times = experiment.model.eval(), [], {}
    for length in lengths:
        layers = posed(model, tokens[:, :length])
        for way, (solver, under, longest) in WAYS.items():
            if length > longest:
                continue
            problems = [layer.problem() for layer in layers]
            solve = partial(_all, solver, problems)
            with under():
                began = time.perf_counter()
                numbers = solve_numbers(solve)
                ms = 1e3 * (time.perf_counter() - began)
                if ms < LONG:
                    ms = setup.milliseconds(solve)
            times[way, length] = ms
            rows.append(
                Finding(
                    f"{name}, length {length}, batch {size}, {way}",
                    f"{ms:.3g} ms",
                    f"{numbers['iterations_mean']:.1f} iterations, {numbers['converged']:.0%} converged",
                    numbers={"ms": ms, **numbers},
                )
            )
    return [*rows, crossover(name, times)]


def _all(solver: Solver, problems: list[Any]) -> list[Any]:
    return [solver.solve(problem, Cap(1000), training=False) for problem in problems]


def crossover(name: str, times: Mapping[tuple[str, int], float]) -> Finding:
    """Say which way is fastest at each length."""
    lengths = sorted({length for _, length in times})
    fastest = {n: min((ms, way) for (way, length), ms in times.items() if length == n)[1] for n in lengths}
    said = ", ".join(f"{way} at {length}" for length, way in fastest.items())
    return Finding(f"{name}: fastest", said, numbers={"fastest": {str(n): way for n, way in fastest.items()}})
