"""How the gradient passes through a fixed point that was found without one."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fpexp.fixed_point.types import Problem, SolveResult, Sweepable


def one_step(problem: Problem, result: SolveResult) -> Tensor:
    """Return f(x, y*), (B, T, d), differentiable in x and the parameters with y* held fixed (paper sec. 3.5)."""
    y = result.value.detach()
    return problem.evaluate(y) if result.known is None else cast(Sweepable, problem).evaluate(y, result.known)
