"""The sequential solver against Picard on the same problems, at equal tolerance, with iteration counts beside times.

Roofline, in multiply-adds a token. Of one evaluation of f:

    P = d (C + 2 N)       what s_t = y_{t-1} adds to mixer, b and c
    S = d N exponentials and about 3 d N multiply-adds: decay, write and read of the state
    M = the channel mixer: d (d1 + d2) for K, 2 d r for H, and 10 (d1^2 + d2^2) once for the power iteration of K

The sweep pays P and S once and M as often as a token is evaluated, k times: P + S + k M. Picard pays all of it at each
of its l* evaluations of the whole sequence: l* (P + S + M). As M is small beside P + S, the ratio is about l* as long
as k M is small too, and l* goes towards T on state tracking. Both read B T (C + 2 N + 2 d) numbers of the input's
contribution, the sweep once, Picard l* times. The sweep's products with s are of B rows, Picard's of B T: small batches
are dearer for the sweep.

The two fixed points need not agree: each solver stops within the tolerance, and f may have several solutions. What is
checked is that each solver reports the true residual of what it returns; how far they are apart is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from fpexp.bench.context import Context
from fpexp.bench.counts import Solve, solve_numbers
from fpexp.bench.measure import Check, Contender, Target, stopwatch
from fpexp.bench.subjects import fixed_point_subject
from fpexp.bench.truth import Posed, posed
from fpexp.fixed_point import Cap, Converge, Picard, Sequential, Solver, SolveResult, Status
from fpexp.fixed_point.iterate import EPSILON
from fpexp.randomness import generator
from fpexp.ranges import Count, Positive

TARGETS = {16: 4.0, 64: 10.0}
"""How many times longer Picard has to take, by length."""


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark; without `run` the model is not trained."""

    run: str = ""
    lengths: list[Count] = field(default_factory=lambda: [16, 64])
    batch_size: Count = 64
    tolerance: Positive = 0.1


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """Both solvers for each length, by the stopping rule of training and by that of evaluation."""
    subject, experiment = fixed_point_subject(sizes.run, context)
    caps = Converge()
    for length in sizes.lengths:
        batch = experiment.task.sample(sizes.batch_size, length, generator(0, "bench"))
        layers = posed(experiment.model, batch.inputs)
        for training in (True, False):
            cap = caps.training_cap(length, generator(0, "bench", 1)) if training else caps.evaluation_cap()
            mode = "training" if training else "evaluation"
            group = f"{subject}, batch {sizes.batch_size}, length {length}, as in {mode}"
            yield from _pair(group, layers, sizes.tolerance, cap, training, TARGETS.get(length))


def _pair(
    group: str, layers: Sequence[Posed], tolerance: float, cap: Cap, training: bool, target: float | None
) -> Iterator[Contender]:
    sequential, picard = Sequential(tolerance=tolerance), Picard(tolerance=tolerance)
    found: dict[str, Solve] = {}
    for name, solver in (("sequential", sequential), ("picard", picard)):
        solve = solves(layers, solver, cap, training)
        found[name] = cache(solve)
        yield Contender(
            name,
            group,
            stopwatch(solve),
            check=partial(solve_checks, layers, found[name], solver.tolerance_kind),
            baseline="sequential" if name == "picard" else None,
            target=Target("ratio", at_least=target) if target and name == "picard" else None,
            numbers=partial(_numbers, found[name], found["sequential"] if name == "picard" else None),
        )


def solves(layers: Sequence[Posed], solver: Solver, cap: Cap, training: bool) -> Solve:
    """Return what solves the problem of every layer once."""
    problems = [layer.problem() for layer in layers]
    return lambda: [solver.solve(problem, cap, training=training) for problem in problems]


def solve_checks(layers: Sequence[Posed], found: Solve, kind: str) -> list[Check]:
    """Hold what was found for every layer against the reference."""
    return [layer.check(result, kind) for layer, result in zip(layers, found(), strict=True)]


def _numbers(found: Solve, other: Solve | None) -> dict[str, float | None]:
    if other is None:
        return {**solve_numbers(found)}
    pairs = list(zip(found(), other(), strict=True))
    return {
        **solve_numbers(found),
        "difference_max": _difference(pairs, converged=False),
        "difference_max_converged": _difference(pairs, converged=True),
    }


def _difference(pairs: Sequence[tuple[SolveResult, SolveResult]], converged: bool) -> float | None:
    """Largest |y - y'|_inf / |y'|_inf of a token, over all sequences or those that both solvers have converged on."""
    largest = []
    for one, other in pairs:
        both = (one.status == Status.CONVERGED) & (other.status == Status.CONVERGED)
        rows = both if converged else torch.ones_like(both)
        difference = (one.value - other.value).abs().amax(-1) / other.value.abs().amax(-1).clamp_min(EPSILON)
        largest.append(difference[rows].flatten())
    differences = torch.cat(largest)
    return float(differences.max()) if differences.numel() else None
