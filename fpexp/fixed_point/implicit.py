"""The gradient of the fixed point itself, by the implicit function theorem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fpexp.fixed_point.gmres import gmres
from fpexp.fixed_point.types import BackwardRecord, Problem, SolveResult, TokenwiseProblem
from fpexp.ranges import Count, Positive


class Implicit:
    """dL/dtheta = v^T df/dtheta with (I - J)^T v = dL/dy*,  J = df/dy at y* (paper sec. 3.5, app. B.3).

    J is block lower triangular in time. So where a problem can be cut into tokens, y_t = phi_t(y_t, state), the
    backward pass goes through them from the last to the first: one system (I - dphi_t/dy_t)^T v = g a token, whose g
    holds what the later tokens owe to y_t. Otherwise there is one system over the whole sequence. They are solved by
    GMRES with products v -> J^T v alone, which needs no contraction; `tolerance` is on |g - (I - J)^T v| / |g| of
    each, `max_iterations` bounds its products, and `restart` the vectors kept.
    """

    takes_over = False

    def __init__(self, *, tolerance: Positive, max_iterations: Count, restart: Count) -> None:
        self.tolerance, self.max_iterations, self.restart = tolerance, max_iterations, restart

    def attach(self, problem: Problem, result: SolveResult) -> tuple[Tensor, SolveResult]:
        """Return f(x, y*), (B, T, d), and the result with the record that the backward pass fills in.

        Padded tokens are evaluated at 0 and give no gradient.
        """
        if not torch.is_grad_enabled():
            return problem.evaluate(result.value), result
        record = BackwardRecord()
        y = result.value.detach()
        if problem.mask is not None:
            y = y.masked_fill(~problem.mask[..., None], 0.0)
        if isinstance(problem, TokenwiseProblem):
            value = self._sweep(problem, y, record)
        else:
            value, _ = self._solved(problem, problem, y, record)
        return value, dataclasses.replace(result, backward=record)

    def _sweep(self, problem: TokenwiseProblem, y: Tensor, record: BackwardRecord) -> Tensor:
        """Attach token by token. `past` is `state` without its graph.

        A product with J^T starts autograd once, which looks at all of a graph: on `state`'s it would see all earlier
        tokens each time.
        """
        state = problem.initial_state()
        past = problem.initial_state()
        outputs = []
        for single, y_t in zip(problem.split(), y.split(1, dim=1), strict=True):
            with torch.no_grad():
                constant = single.token_problem(0, past)
                past = single.advance(constant, y_t)
            token = single.token_problem(0, state)
            f_t, y_t = self._solved(token, constant, y_t, record)
            state = single.advance(token, y_t)
            outputs.append(f_t)
        return torch.cat(outputs, dim=1)

    def _solved(self, problem: Problem, constant: Problem, y: Tensor, record: BackwardRecord) -> tuple[Tensor, Tensor]:
        """Return f(x, y) and y, both with the gradient of the fixed point; `constant` needs no gradient but in y."""
        leaf = y.detach().requires_grad_()
        equation = _Equation(self, leaf, constant.evaluate(leaf), problem.mask, record)
        f_y, y = _FixedPoint.apply(problem.evaluate(y), y, equation)
        return f_y, y


@dataclass(frozen=True)
class _Equation:
    """(I - J)^T v = g at the leaf y, whose image f_y has the graph of J."""

    settings: Implicit
    y: Tensor
    f_y: Tensor
    mask: Tensor | None
    record: BackwardRecord

    def solve(self, g: Tensor) -> Tensor:
        """Return v, of the shape of y, and record what it took."""
        if self.mask is not None:
            g = g.masked_fill(~self.mask[..., None], 0.0)
        settings = self.settings
        with torch.autocast(g.device.type, enabled=False):
            solution = gmres(
                self._apply,
                g.flatten(1),
                tolerance=settings.tolerance,
                max_iterations=settings.max_iterations,
                restart=settings.restart,
            )
        self.record.add(solution.iterations, solution.residual, self.mask)
        return solution.value.view_as(g)

    def _apply(self, v: Tensor) -> Tensor:
        """Return (I - J)^T v."""
        if not self.f_y.requires_grad:  # f does not look at y
            return v
        (product,) = torch.autograd.grad(self.f_y, self.y, v.view_as(self.y), retain_graph=True, materialize_grads=True)
        return v - product.flatten(1)


class _FixedPoint(torch.autograd.Function):
    """(f(x, y), y) unchanged; backward, the gradients of both become v.

    The node holds the equation, whose graph ends at a leaf of its own and never leads back to the node: there is no
    cycle to collect.
    """

    @staticmethod
    def forward(ctx: Any, f_y: Tensor, y: Tensor, equation: _Equation) -> tuple[Tensor, Tensor]:
        ctx.equation = equation
        return f_y.view_as(f_y), y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_f: Tensor, g_y: Tensor) -> tuple[Tensor, None, None]:
        return ctx.equation.solve(g_f + g_y), None, None
