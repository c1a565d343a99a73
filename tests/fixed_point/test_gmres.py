"""GMRES against dense solves: each system by itself, stopped where it says, with the residual that is so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import random
from torch import Tensor

from fpexp.fixed_point.gmres import LinearSolution, gmres

N = 12


def matrices(batch: int, n: int = N, spread: float = 0.3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Matrices with eigenvalues on both sides of the unit circle around 1: I - A does not contract."""
    return (torch.eye(n, dtype=torch.float64) + spread * random(batch, n, n)).to(dtype)


def product(a: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: (a @ v[..., None]).squeeze(-1)


def solve(
    a: Tensor, b: Tensor, tolerance: float = 1e-10, max_iterations: int = 200, restart: int = N
) -> LinearSolution:
    return gmres(product(a), b, tolerance=tolerance, max_iterations=max_iterations, restart=restart)


def test_it_solves_what_does_not_contract() -> None:
    a, b = matrices(5), random(5, N, seed=1)
    solution = solve(a, b)
    torch.testing.assert_close(solution.value, torch.linalg.solve(a, b), rtol=1e-9, atol=1e-9)
    assert (solution.iterations <= N).all()
    assert (solution.residual <= 1e-10).all()


@pytest.mark.parametrize("restart", [1, 4, 100])
@pytest.mark.parametrize("budget", [1, 7, 500])
def test_the_residual_is_that_of_the_value(restart: int, budget: int) -> None:
    a, b = matrices(5, spread=0.15), random(5, N, seed=1)
    solution = solve(a, b, 1e-6, budget, restart)
    measured = (b - product(a)(solution.value)).norm(dim=-1) / b.norm(dim=-1)
    torch.testing.assert_close(solution.residual, measured, rtol=1e-6, atol=1e-14)
    assert (solution.iterations <= budget).all()
    assert (solution.residual[solution.iterations < budget] <= 1e-6).all()
    if budget == 500:
        assert (solution.residual <= 1e-6).all()


def test_it_makes_the_residual_smallest() -> None:
    """After k products over the whole Krylov space: against least squares."""
    a, b = matrices(1), random(1, N, seed=1)
    for k in (1, 3, 6):
        powers = [b[0]]
        while len(powers) < k:
            powers.append(a[0] @ powers[-1])
        images = a[0] @ torch.stack(powers, dim=1)
        best = images @ torch.linalg.lstsq(images, b[0, :, None]).solution
        expected = (b[0] - best.squeeze(-1)).norm() / b.norm()
        assert solve(a, b, max_iterations=k).residual.item() == pytest.approx(expected.item(), rel=1e-6)


def test_each_system_stops_by_itself() -> None:
    a = torch.cat([torch.eye(N, dtype=torch.float64)[None], matrices(2, spread=0.03), matrices(2)])
    b = random(5, N, seed=1)
    together = solve(a, b, 1e-6, restart=5, max_iterations=30)
    assert len(together.iterations.unique()) > 2
    for i in range(5):
        alone = solve(a[i : i + 1], b[i : i + 1], 1e-6, restart=5, max_iterations=30)
        assert together.iterations[i] == alone.iterations[0]
        torch.testing.assert_close(together.value[i], alone.value[0], rtol=1e-9, atol=1e-12)


def test_low_rank_takes_as_many_products_as_the_rank_and_one() -> None:
    u = random(4, N, 2)
    a = torch.eye(N, dtype=torch.float64) - u @ u.mT
    solution = solve(a, random(4, N, seed=1))
    assert solution.iterations.tolist() == [3] * 4


def test_nothing_to_solve_takes_nothing() -> None:
    b = random(2, N)
    b[0] = 0
    solution = solve(matrices(2), b)
    assert solution.value[0].eq(0).all()
    assert solution.iterations[0] == 0
    assert solution.residual[0] == 0
    assert solve(matrices(2), torch.zeros_like(b)).residual.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e30])
def test_small_and_large_right_hand_sides_in_float32(scale: float) -> None:
    a, b = matrices(3, dtype=torch.float32), random(3, N, seed=1, dtype=torch.float32)
    plain, scaled = solve(a, b, 1e-4), solve(a, b * scale, 1e-4)
    assert torch.equal(plain.iterations, scaled.iterations)
    torch.testing.assert_close(scaled.value / scale, plain.value, rtol=1e-4, atol=1e-4)


def test_a_tolerance_out_of_reach_ends() -> None:
    a, b = matrices(3, dtype=torch.float32), random(3, N, seed=1, dtype=torch.float32)
    solution = solve(a, b, 1e-20, max_iterations=60)
    assert (solution.iterations <= 60).all()
    assert ((solution.residual > 1e-20) & (solution.residual < 1e-5)).all()


def test_a_singular_system_is_told_and_finite() -> None:
    """Its first two equations contradict each other; b of the second system lies in the range."""
    a = torch.eye(N, dtype=torch.float64).repeat(2, 1, 1)
    a[:, 1] = a[:, 0]
    b = random(2, N)
    b[1, 1] = b[1, 0]
    solution = solve(a, b)
    assert solution.value.isfinite().all()
    assert solution.residual[0] > 1e-3
    assert solution.residual[1] <= 1e-10


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["matrix", "right"])
def test_a_non_finite_system_is_told_and_alone(bad: float, where: str) -> None:
    a, b = matrices(3), random(3, N, seed=1)
    expected = solve(a[[0, 2]], b[[0, 2]])
    (a if where == "matrix" else b)[1, 0] = bad
    solution = solve(a, b)
    torch.testing.assert_close(solution.value[[0, 2]], expected.value, rtol=1e-9, atol=1e-12)
    assert torch.equal(solution.iterations[[0, 2]], expected.iterations)
    assert solution.residual[1].isnan()
    assert solution.value[1].isnan().all()
