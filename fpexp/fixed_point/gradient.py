"""How the gradient passes through a fixed point that was found without one."""

from __future__ import annotations

from torch import Tensor

from fpexp.fixed_point.types import Problem, SolveResult


def one_step(problem: Problem, result: SolveResult) -> Tensor:
    """Return f(x, y*), (B, T, d), differentiable in x and the parameters with y* held fixed (paper sec. 3.5)."""
    return problem.evaluate(result.value.detach())
