"""The loop that every solver shares: caps, statuses, masks, freezing, and what is reported of each sequence."""

from __future__ import annotations

import itertools
import math

import oracle
import pytest
import torch
from helpers import Toy, affine, random
from torch import Tensor

from fpexp.fixed_point import Cap, Picard, Status
from fpexp.fixed_point.iterate import token_residual

NAN, INF = float("nan"), float("inf")


def solve(problem: Toy, cap: int = 100, *, stop_early: bool = True, training: bool = False, **options: float):
    options.setdefault("tolerance", 1e-6)
    return Picard(**options).solve(problem, Cap(cap, stop_early), training=training)


@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_residual_is_the_papers(kind: str) -> None:
    f_y, y = random(3, 5, 4, seed=1), random(3, 5, 4, seed=2)
    f_y[0, 0] = 0.0
    residual = token_residual(f_y, y, kind).amax(-1)
    if kind == "relative":
        expected = [oracle.sequence_residual(f.numpy(), v.numpy()) for f, v in zip(f_y, y, strict=True)]
    else:
        expected = (f_y - y).abs().amax((1, 2)).tolist()
    assert residual.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stop_early", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_non_finite_from_the_third_evaluation_stops_there(bad: float, stop_early: bool, training: bool) -> None:
    """CASES.md 1."""
    calls = itertools.count(1)
    problem = Toy(lambda y, _: 0.5 * y + (bad if next(calls) >= 3 else 1.0), torch.zeros(2), length=2)
    result = solve(problem, stop_early=stop_early, training=training)
    assert problem.batches == [2, 2, 2]
    assert result.iterations.tolist() == [3, 3]
    assert result.status.tolist() == [Status.NON_FINITE] * 2
    assert not result.residual.isfinite().any()


@pytest.mark.parametrize("training", [False, True])
def test_cap_reached_has_the_true_residual(training: bool) -> None:
    """CASES.md 2: z <- 0.999 z + 1, from zero, cap 5."""
    result = solve(affine([0.999]), 5, training=training)
    iterates = [0.0]
    for _ in range(5):
        iterates.append(0.999 * iterates[-1] + 1)
    assert result.status.tolist() == [Status.CAP_REACHED]
    assert result.iterations.tolist() == [5]
    assert result.value.item() == pytest.approx(iterates[4], rel=1e-12)
    assert result.residual.item() == pytest.approx((iterates[5] - iterates[4]) / iterates[5], rel=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stop_early", [False, True])
@pytest.mark.parametrize("cap", [1, 2, 7, 2000])
def test_value_is_the_iterate_that_the_residual_belongs_to(cap: int, stop_early: bool, training: bool) -> None:
    """For every way to end, with damping under way where a slope of -1.02 calls for it."""
    problem = affine([0.1, 0.5, -1.02, 0.9, 0.99], [1.0, -2.0, 1.0, 3.0, 1.0], length=2)
    result = solve(problem, cap, stop_early=stop_early, training=training)
    measured = token_residual(problem.evaluate(result.value), result.value).amax(-1)
    torch.testing.assert_close(measured, result.residual, rtol=1e-12, atol=0)
    converged = result.status == Status.CONVERGED
    assert torch.equal(converged, result.residual <= 1e-6)
    if cap == 2000 and not training:
        assert converged.all()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("n", [1, 2, 16])
def test_without_early_stop_exactly_the_cap_is_evaluated(n: int, training: bool) -> None:
    problem = affine([0.0, 0.0, 0.1])
    result = solve(problem, n, stop_early=False, training=training)
    assert problem.batches == [3] * n
    assert result.iterations.tolist() == [n] * 3


@pytest.mark.parametrize("count", [4, 5, 8])
@pytest.mark.parametrize("quantile", [0.0, 0.25, 0.5])
def test_training_stops_when_all_but_the_quantile_has_converged(quantile: float, count: int) -> None:
    slopes = torch.linspace(0.2, 0.9, count).tolist()
    alone = [int(solve(affine([slope]), 1000).iterations) for slope in slopes]
    needed = math.ceil((1 - quantile) * count)
    problem = affine(slopes)
    result = solve(problem, 1000, training=True, outlier_quantile=quantile)
    assert result.iterations.tolist() == [alone[needed - 1]] * count
    assert len(set(problem.batches)) == 1
    assert (result.status == Status.CONVERGED).tolist() == [i < needed for i in range(count)]


def test_evaluation_freezes_each_sequence_by_itself() -> None:
    slopes = [0.9, 0.1, -1.02, 0.5, 0.999, 0.0]
    together = affine(slopes, [1.0, 2.0, 1.0, 3.0, 1.0, 5.0], length=3)
    result = solve(together, 200, outlier_quantile=0.5)
    for i, slope in enumerate(slopes):
        alone = solve(affine([slope], [[1.0, 2.0, 1.0, 3.0, 1.0, 5.0][i]], length=3), 200)
        assert torch.equal(result.value[i], alone.value[0])
        assert result.iterations[i] == alone.iterations[0]
        assert result.residual[i] == alone.residual[0]
        assert result.status[i] == alone.status[0]
    assert together.batches == sorted(together.batches, reverse=True)
    assert together.batches[-1] == 1


@pytest.mark.parametrize("stop_early", [False, True])
def test_a_bad_sequence_leaves_the_others_untouched_in_evaluation(stop_early: bool) -> None:
    slopes, offsets = [0.3, 0.5, 3.0, 0.9], [1.0, NAN, 1.0, 1.0]
    result = solve(affine(slopes, offsets), 60, stop_early=stop_early)
    good = [0, 3]
    alone = solve(affine([slopes[i] for i in good], [offsets[i] for i in good]), 60, stop_early=stop_early)
    assert torch.equal(result.value[good], alone.value)
    assert torch.equal(result.iterations[good], alone.iterations)
    assert torch.equal(result.status[good], alone.status)
    assert result.status[1] == Status.NON_FINITE
    assert result.iterations[1] == 1
    assert result.status[2] == Status.DIVERGED


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("limit", [1e2, 1e8])
def test_divergence_is_told(limit: float, training: bool) -> None:
    """z <- 10 z + 1 passes 10^k at its evaluation k + 1."""
    result = solve(affine([10.0]), 50, divergence_limit=limit, training=training)
    assert result.status.tolist() == [Status.DIVERGED]
    assert result.iterations.tolist() == [round(math.log10(limit)) + 1]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [0.999, 10.0, NAN])
def test_padded_tokens_do_not_count(padding: float, training: bool) -> None:
    """The second half of each sequence is padding, where the map is slow, diverges or gives NaN."""
    slopes = torch.full((2, 4, 1), padding, dtype=torch.float64)
    slopes[:, :2] = 0.5
    mask = torch.tensor([[True, True, False, False]] * 2)

    def f(y: Tensor, slope: Tensor) -> Tensor:
        return slope * y + 1

    padded = solve(Toy(f, slopes, length=4, mask=mask), training=training)
    short = solve(Toy(f, slopes[:, :2], length=2), training=training)
    assert padded.status.tolist() == [Status.CONVERGED] * 2
    assert torch.equal(padded.value[:, :2], short.value)
    assert torch.equal(padded.iterations, short.iterations)
    assert torch.equal(padded.residual, short.residual)


def test_the_solve_is_outside_the_graph() -> None:
    slope = torch.full((1, 1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    result = solve(Toy(lambda y, a: a * y + 1, slope))
    assert not result.value.requires_grad
    assert not result.residual.requires_grad
