"""`solver=auto`: which solver a machine and a schedule call for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fpexp.fixed_point.types import Solver
from fpexp.ranges import Count, Positive

CROSSOVER: float | None = None
"""How many tokens the fused sweep solves while fused Picard makes one iteration, on a GPU: what scripts/gpu_check says.

None: not measured yet, and a GPU takes picard.
"""


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
    def choose(
        device: str, capped: bool, size: Callable[[], tuple[int, int]]
    ) -> tuple[Literal["sequential", "picard"], str]:
        """Return the solver's name and the reason, which is told once and recorded.

        `size` gives the longest T of training and the cap of its iterations. Picard is taken to need as many as there
        are tokens, up to the cap, as it does on state tracking: where fewer do, solver=picard says so.
        """
        if capped:
            return "picard", "the schedule caps whole-sequence iterations"
        if device == "cpu":
            return "sequential", "fewest operations, on a CPU"
        if CROSSOVER is not None:
            length, cap = size()
            if length < CROSSOVER * min(length, cap):
                return "sequential", f"faster than as many iterations, at T = {length} on a GPU"
        return "picard", "parallel over time, on a GPU"
