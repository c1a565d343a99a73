"""How the gradient passes through a fixed point that was found without one: by some differentiable evaluations."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from fpexp.fixed_point.types import Problem, SolveResult, Sweepable
from fpexp.ranges import Count


class OneStep:
    """f(x, y*) with y* held fixed: the gradient leaves out what y* owes to x (paper sec. 3.5, app. B.3)."""

    takes_over = True

    def attach(self, problem: Problem, result: SolveResult) -> tuple[Tensor, SolveResult]:
        """Return f(x, y*), (B, T, d), differentiable in x and the parameters, and the result."""
        return _image(problem, result), result.used()


class Unrolled:
    """`steps` evaluations from y*, all differentiable: the first `steps` terms of the Neumann series of (I - J)^-1.

    In evaluation they are made too, so that the model is the one that was trained.
    """

    takes_over = True

    def __init__(self, *, steps: Count) -> None:
        self.steps = steps

    def attach(self, problem: Problem, result: SolveResult) -> tuple[Tensor, SolveResult]:
        """Return f(x, ... f(x, y*)), (B, T, d), differentiable in x and the parameters, and the result."""
        y = _image(problem, result)
        for _ in range(self.steps - 1):
            y = problem.evaluate(y)
        return y, result.used()


def _image(problem: Problem, result: SolveResult) -> Tensor:
    y = result.value.detach()
    return problem.evaluate(y) if result.known is None else cast(Sweepable, problem).evaluate(y, result.known)
