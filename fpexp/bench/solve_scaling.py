"""Time of the sequential solver as the length doubles, the batch fixed: the ratio of each length to the one before.

Roofline: a token costs P + S + k M (see `sequential_solve`) whatever its position, as the past is summed up in y of one
token and in the state, 4 B d N bytes; so the time is T times a constant, and a doubling costs 2. Above that lies what
grows with T: the input's contribution and the result, 4 B T (C + 2 N + 4 d) bytes, leave the caches one after another
and are then read at the speed of main memory, once; and hard sequences may take more evaluations the longer they are,
which the counts show. Below 2 lies what a call costs once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise

from fpexp.bench.context import Context
from fpexp.bench.counts import solve_numbers
from fpexp.bench.measure import Contender, Target, stopwatch
from fpexp.bench.sequential_solve import solve_checks, solves
from fpexp.bench.subjects import fixed_point_subject
from fpexp.bench.truth import posed
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Sequential
from fpexp.randomness import generator
from fpexp.ranges import Count, Positive

AT_MOST = 2.2
"""Times that a doubling of the length may cost."""


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark; without `run` the model is not trained."""

    run: str = ""
    lengths: list[Count] = field(default_factory=lambda: [16, 32, 64, 128, 256, 512, 1024])
    batch_size: Count = 16
    tolerance: Positive = 0.1


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """One contender a length, on the first tokens of the same sequences; each is the next one's baseline."""
    for shorter, longer in pairwise(sizes.lengths):
        if longer != 2 * shorter:
            raise UserError(f"lengths={sizes.lengths} must double: {longer} is not twice {shorter}")
    subject, experiment = fixed_point_subject(sizes.run, context)
    tokens = experiment.task.sample(sizes.batch_size, max(sizes.lengths, default=1), generator(0, "bench")).inputs
    solver = Sequential(tolerance=sizes.tolerance)
    for i, length in enumerate(sizes.lengths):
        layers = posed(experiment.model, tokens[:, : experiment.task.input_length(length)])
        solve = solves(layers, solver, Cap(1), training=False)
        found = cache(solve)
        yield Contender(
            f"length {length}",
            f"{subject}, batch {sizes.batch_size}",
            stopwatch(solve),
            check=partial(solve_checks, layers, found, solver.tolerance_kind),
            baseline=f"length {sizes.lengths[i - 1]}" if i else None,
            target=Target("ratio", at_most=AT_MOST) if i else None,
            numbers=partial(solve_numbers, found),
        )
