"""Restarted GMRES for a batch of linear systems that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LinearSolution:
    """`value` (B, n), the `iterations` (B,) it took, and its true `residual` (B,), |b - A v| / |b|.

    Both are NaN where A or b is not finite.
    """

    value: Tensor
    iterations: Tensor
    residual: Tensor


def gmres(
    apply: Callable[[Tensor], Tensor], b: Tensor, *, tolerance: float, max_iterations: int, restart: int
) -> LinearSolution:
    """Solve A v = b, (B, n), where `apply` multiplies each row by its own A (Saad and Schultz 1986).

    Each system stops by itself, at |b - A v| <= tolerance |b| or after `max_iterations` products, so that its solution
    does not depend on the others. The residual that is reported is measured, which costs a product every `restart`.
    """
    largest = b.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1.0)  # squares of a small gradient would vanish in float32
    right = b / scale
    size = right.norm(dim=-1)
    value, remainder, left = torch.zeros_like(right), right, size
    iterations = torch.zeros_like(size, dtype=torch.long)
    active = size > 0
    while active.any():
        budget = max_iterations - iterations
        change, steps = _cycle(apply, remainder, active, tolerance * size, budget, min(restart, b.shape[-1]))
        value = torch.where(active[:, None], value + change, value)
        iterations = iterations + steps
        remainder = right - apply(value)
        left = remainder.norm(dim=-1)
        active = active & (steps > 0) & (left > tolerance * size) & (iterations < max_iterations)
    residual = torch.where(size == 0, 0.0, left / size)
    value = torch.where(residual.isfinite()[:, None], value * scale, torch.nan)
    return LinearSolution(value, iterations, residual)


def _cycle(
    apply: Callable[[Tensor], Tensor], r: Tensor, active: Tensor, target: Tensor, budget: Tensor, restart: int
) -> tuple[Tensor, Tensor]:
    """Return the d (B, n) of a Krylov space that makes |r - A d| smallest, and the dimensions (B,) of that space.

    A V_k = V_{k+1} H_k by Arnoldi; `rotation` is the product of the Givens rotations that make H_k the upper
    triangular `triangle`, and its first column times |r| is what the rotations make of the right-hand side. A row that
    has ended goes on with unit columns, which change nothing.
    """
    batch, n = r.shape
    length = r.norm(dim=-1)
    basis = r.new_zeros(batch, restart + 1, n)
    basis[:, 0] = r / length[:, None]
    triangle = torch.eye(restart, dtype=r.dtype, device=r.device).repeat(batch, 1, 1)
    rotation = torch.eye(restart + 1, dtype=r.dtype, device=r.device).repeat(batch, 1, 1)
    steps = torch.zeros_like(budget)
    for j in range(restart):
        if not active.any():
            break
        column, direction = _orthogonalise(basis[:, : j + 1], apply(basis[:, j]))
        column = (rotation[:, : j + 2, : j + 2] @ column[..., None]).squeeze(-1)
        a, b = column[:, j], column[:, j + 1]
        radius = torch.hypot(a, b)
        # where A maps the new direction into what is spanned already, A is singular there: nothing more to gain
        active = active & (radius > torch.finfo(r.dtype).eps * column.norm(dim=-1))
        triangle[:, :j, j] = torch.where(active[:, None], column[:, :j], 0.0)
        triangle[:, j, j] = torch.where(active, radius, 1.0)
        _rotate(rotation, j, torch.where(active, a / radius, 1.0), torch.where(active, b / radius, 0.0))
        basis[:, j + 1] = torch.where(active[:, None], direction, 0.0)
        steps = steps + active
        active = active & (length * rotation[:, j + 1, 0].abs() > target) & (steps < budget)
    taken = torch.arange(restart, device=r.device) < steps[:, None]
    turned = torch.where(taken, length[:, None] * rotation[:, :-1, 0], 0.0)
    weights = torch.linalg.solve_triangular(triangle, turned[..., None], upper=True)
    return (weights.mT @ basis[:, :-1]).squeeze(1), steps


def _orthogonalise(basis: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the column of H that w adds, (B, k + 1), and the unit vector (B, n) of what is new in w, or 0.

    Gram-Schmidt twice is as good as the modified one and has no loop over the basis.
    """
    w = w[..., None]
    parts = basis @ w
    w = w - basis.mT @ parts
    again = basis @ w
    w = (w - basis.mT @ again).squeeze(-1)
    length = w.norm(dim=-1, keepdim=True)
    return torch.cat([(parts + again).squeeze(-1), length], dim=-1), torch.where(length > 0, w / length, 0.0)


def _rotate(rotation: Tensor, j: int, cosine: Tensor, sine: Tensor) -> None:
    upper, lower = rotation[:, j].clone(), rotation[:, j + 1].clone()
    cosine, sine = cosine[:, None], sine[:, None]
    rotation[:, j] = cosine * upper + sine * lower
    rotation[:, j + 1] = cosine * lower - sine * upper
