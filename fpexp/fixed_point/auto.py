"""`solver=auto`: which solver a machine and a schedule call for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fpexp.fixed_point.types import Solver
from fpexp.ranges import Count, Positive


class Auto:
    """A choice that is settled by `fpexp.build` before anything is built: see `Auto.choose`.

    `tolerance` and `inner_max_iterations` are handed to the candidates by the config file.
    """

    def __init__(
        self,
        *,
        sequential: Callable[[], Solver],
        picard: Callable[[], Solver],
        tolerance: Positive,
        inner_max_iterations: Count,
    ) -> None:
        raise TypeError("solver=auto is settled by fpexp.build, not built")

    @staticmethod
    def choose(device: str, capped: bool) -> tuple[Literal["sequential", "picard"], str]:
        """Return the solver's name and the reason, which is told once and recorded."""
        if capped:
            return "picard", "the schedule caps whole-sequence iterations"
        if device == "cpu":
            return "sequential", "fewest operations, on a CPU"
        return "picard", "parallel over time, on a GPU"
