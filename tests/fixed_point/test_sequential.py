"""The token sweep on a toy recurrence: y_t = slope_t y_t + y_{t-1} + 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Recurrence, random
from torch import Tensor

from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Picard, Sequential, Status
from fpexp.fixed_point.iterate import token_residual


def slopes(batch: int = 4, length: int = 6) -> Tensor:
    return random(batch, length, 1).clamp(-2, 2) * 0.45


def sweep(problem: Recurrence, cap: Cap | None = None, *, training: bool = False, **options: Any):
    options.setdefault("tolerance", 1e-12)
    return Sequential(**options).solve(problem, cap or Cap(1), training=training)


def test_it_finds_the_fixed_point_that_picard_finds() -> None:
    problem = Recurrence(slopes())
    swept = sweep(problem, inner_max_iterations=1000)
    whole = Picard(tolerance=1e-12).solve(problem, Cap(2000), training=False)
    torch.testing.assert_close(swept.value, whole.value, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(problem.evaluate(swept.value), swept.value, rtol=1e-9, atol=1e-9)
    assert (swept.status == Status.CONVERGED).all()


def test_each_token_of_each_sequence_stops_on_its_own() -> None:
    problem = Recurrence(slopes())
    together = sweep(problem, tolerance=1e-3)
    assert together.tokens is not None
    for i in range(4):
        alone = sweep(Recurrence(problem.slope[i : i + 1]), tolerance=1e-3)
        assert alone.tokens is not None
        assert torch.equal(together.value[i], alone.value[0])
        assert torch.equal(together.tokens.iterations[i], alone.tokens.iterations[0])
    assert len(together.tokens.iterations.unique()) > 2


@pytest.mark.parametrize("inner", [1, 3, 100])
def test_what_is_reported_is_the_residual_of_what_is_returned(inner: int) -> None:
    problem = Recurrence(slopes())
    result = sweep(problem, tolerance=1e-3, inner_max_iterations=inner)
    measured = token_residual(problem.evaluate(result.value), result.value)
    assert result.tokens is not None
    torch.testing.assert_close(result.tokens.residual, measured, rtol=1e-12, atol=0)
    assert torch.equal(result.residual, measured.amax(-1))
    assert torch.equal(result.iterations, result.tokens.iterations.amax(-1))
    assert int(result.iterations.max()) <= inner
    assert torch.equal(result.tokens.status == Status.CONVERGED, measured <= 1e-3)


def test_caps_and_training_change_nothing() -> None:
    problem = Recurrence(slopes())
    plain = sweep(problem)
    other = sweep(problem, Cap(1, stop_early=False), training=True)
    assert torch.equal(plain.value, other.value)
    assert torch.equal(plain.iterations, other.iterations)


def test_cap_reached_has_the_true_residual() -> None:
    """CASES.md 2: z <- 0.999 z + 1, from zero, cap 5."""
    result = sweep(
        Recurrence(torch.full((1, 1, 1), 0.999, dtype=torch.float64)), tolerance=1e-6, inner_max_iterations=5
    )
    iterates = [0.0]
    for _ in range(5):
        iterates.append(0.999 * iterates[-1] + 1)
    assert result.status.tolist() == [Status.CAP_REACHED]
    assert result.iterations.tolist() == [5]
    assert result.value.item() == pytest.approx(iterates[4], rel=1e-12)
    assert result.residual.item() == pytest.approx((iterates[5] - iterates[4]) / iterates[5], rel=1e-12)


def test_relative_and_absolute_tolerance_stop_at_different_counts() -> None:
    """CASES.md 3, z <- 0.5 z + 1e4: iterate k is 2e4 (1 - 2^-k), and the steps are 1e4 2^-k."""
    half, before = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (0.5, 9999.0))
    problem = Recurrence(half, before)
    counts = [int(sweep(problem, tolerance=1e-3, tolerance_kind=kind).iterations) for kind in ("relative", "absolute")]
    steps = [2.0**-k for k in range(99)]
    assert counts[0] == next(k for k, step in enumerate(steps) if step / (2 - step) <= 1e-3) + 1
    assert counts[1] == next(k for k, step in enumerate(steps) if 1e4 * step <= 1e-3) + 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tolerance": 1e-2}, {"tolerance": 1e-4}),
        ({"tolerance_kind": "relative"}, {"tolerance_kind": "absolute"}),
        ({"inner_max_iterations": 5}, {"inner_max_iterations": 100}),
        ({"damping": 1.0}, {"damping": 0.5}),
        ({"damping_decay": 0.9}, {"damping_decay": 0.7}),
        ({"patience": 15}, {"patience": 5}),
        ({"divergence_limit": 1e8}, {"divergence_limit": 1e1}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_every_option_changes_what_it_says(one: dict[str, Any], other: dict[str, Any]) -> None:
    problem = Recurrence(torch.tensor([[0.5, -1.02, 0.9]], dtype=torch.float64).unsqueeze(-1))
    first, second = sweep(problem, **{"tolerance": 1e-5} | one), sweep(problem, **{"tolerance": 1e-5} | other)
    assert first.tokens is not None
    assert second.tokens is not None
    assert not torch.equal(first.tokens.iterations, second.tokens.iterations)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="outlier_quantile"):
        Sequential(tolerance=0.1, outlier_quantile=0.1)  # type: ignore[call-arg]
    with pytest.raises(UserError, match=r"solver\.max_iterations.*solver\.inner_max_iterations"):
        compose(["task=a4", "model=fp_mamba_h", "solver=sequential", "solver.max_iterations=3"])


@pytest.mark.parametrize("slope", [float("nan"), 5.0], ids=["nan", "diverging"])
def test_a_bad_token_ends_its_own_sequence_only(slope: float) -> None:
    good = slopes()
    bad = good.clone()
    bad[1, 3] = slope
    result, reference = sweep(Recurrence(bad), tolerance=1e-6), sweep(Recurrence(good), tolerance=1e-6)
    others = [0, 2, 3]
    assert torch.equal(result.value[others], reference.value[others])
    assert torch.equal(result.status[others], reference.status[others])
    assert torch.equal(result.value[1, :3], reference.value[1, :3])
    assert result.status[1] == (Status.NON_FINITE if slope != slope else Status.DIVERGED)
    if slope != slope:
        assert result.residual[1].isnan()


def test_padded_tokens_do_not_count() -> None:
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    padded = slopes(2)
    padded[1, 3:] = 0.9999
    result = sweep(Recurrence(padded, mask=mask), tolerance=1e-6)
    alone = sweep(Recurrence(padded[1:, :3]), tolerance=1e-6)
    assert result.status[1] == Status.CONVERGED
    assert result.iterations[1] == alone.iterations[0]
    assert result.residual[1] == alone.residual[0]
    assert torch.equal(result.value[1, :3], alone.value[0])


@pytest.mark.parametrize("length", [1, 4, 6])
def test_a_prefix_is_what_the_prefix_alone_gives(length: int) -> None:
    problem = Recurrence(slopes())
    prefix = sweep(problem, tolerance=1e-3).prefix(length)
    alone = sweep(Recurrence(problem.slope[:, :length]), tolerance=1e-3)
    assert torch.equal(prefix.value, alone.value)
    assert torch.equal(prefix.iterations, alone.iterations)
    assert torch.equal(prefix.residual, alone.residual)
    assert torch.equal(prefix.status, alone.status)


def test_a_whole_sequence_solve_has_no_prefix() -> None:
    result = Picard(tolerance=0.1).solve(Recurrence(slopes()), Cap(9), training=False)
    with pytest.raises(ValueError, match="prefix"):
        result.prefix(2)
