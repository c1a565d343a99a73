"""Picard iteration and its damping; every option changes what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import affine

from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Picard, Status
from fpexp.fixed_point.picard import Damped


def outcome(slope: float, *, offset: float = 1.0, cap: int = 300, training: bool = False, **options: Any):
    options.setdefault("tolerance", 1e-6)
    result = Picard(**options).solve(affine([slope] * 3 + [0.999], offset), Cap(cap), training=training)
    return result.iterations[0].item(), Status(result.status[0].item())


def test_relative_and_absolute_tolerance_stop_at_different_counts() -> None:
    """CASES.md 3, z <- 0.5 z + 1e4: iterate k is 2e4 (1 - 2^-k), and the steps are 1e4 2^-k."""
    relative, _ = outcome(0.5, offset=1e4, tolerance=1e-3)
    absolute, _ = outcome(0.5, offset=1e4, tolerance=1e-3, tolerance_kind="absolute")
    assert relative == next(k for k in range(99) if 2.0**-k / (2 - 2.0**-k) <= 1e-3) + 1
    assert absolute == next(k for k in range(99) if 1e4 * 2.0**-k <= 1e-3) + 1


@pytest.mark.parametrize(
    ("slope", "one", "other"),
    [
        (0.5, {"tolerance": 1e-2}, {"tolerance": 1e-4}),
        (0.5, {"tolerance_kind": "relative"}, {"tolerance_kind": "absolute"}),
        (0.5, {"outlier_quantile": 0.25, "training": True}, {"outlier_quantile": 0.0, "training": True}),
        (0.5, {"damping": 1.0}, {"damping": 0.5}),
        (-1.02, {"damping_decay": 0.9}, {"damping_decay": 0.7}),
        (-1.02, {"patience": 15}, {"patience": 5}),
        (1.5, {"divergence_limit": 1e2}, {"divergence_limit": 1e8}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else str(value),
)
def test_every_option_changes_what_it_says(slope: float, one: dict[str, Any], other: dict[str, Any]) -> None:
    assert outcome(slope, offset=1e4, **one) != outcome(slope, offset=1e4, **other)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="toleranze"):
        Picard(tolerance=0.1, toleranze=0.1)  # type: ignore[call-arg]
    run = ["task=a4", "model=fp_mamba_h"]
    with pytest.raises(UserError, match=r"solver\.toleranze.*did you mean 'solver\.tolerance'"):
        compose([*run, "solver=picard", "solver.toleranze=0.1"])
    with pytest.raises(UserError, match=r"'pickard'; did you mean 'picard'"):
        compose([*run, "solver=pickard"])
    with pytest.raises(UserError, match=r"solver\.tolerance_kind.*relative, absolute"):
        compose([*run, "solver=picard", "solver.tolerance_kind=relativ"])


@pytest.mark.parametrize(
    "setting",
    ["tolerance=0", "outlier_quantile=1", "damping=0", "damping=1.1", "damping_decay=2", "patience=0"],
)
def test_senseless_values_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=r"solver\."):
        compose(["task=a4", "model=fp_mamba_h", "solver=picard", f"solver.{setting}"])


def test_damping_makes_an_oscillating_map_converge() -> None:
    """y <- -1.02 y + 1 swings out for ever; at delta 0.9 its slope is 0.1 - 0.918."""
    iterations, status = outcome(-1.02)
    assert status == Status.CONVERGED
    assert iterations > 15
    assert outcome(-1.02, damping_decay=1.0) == (300, Status.CAP_REACHED)
    assert outcome(-1.02, patience=400) == (300, Status.CAP_REACHED)


def test_damping_converges_to_the_fixed_point_of_the_undamped_map() -> None:
    result = Picard(tolerance=1e-12, damping=0.3).solve(affine([-0.5]), Cap(500), training=False)
    assert result.value.item() == pytest.approx(1 / 1.5, rel=1e-11)


@pytest.mark.parametrize("patience", [1, 15])
def test_delta_decays_after_patience_and_only_where_the_residual_stalls(patience: int) -> None:
    method = Damped(damping=0.8, decay=0.5, patience=patience)
    zeros, ones = torch.zeros(2, 1, 1), torch.ones(2, 1, 1)
    deltas = [
        method.advance(zeros, ones, torch.tensor([1.0, 1.0 / step])).flatten().tolist()
        for step in range(1, 2 * patience + 2)
    ]
    stalling, improving = zip(*deltas, strict=True)
    assert stalling == pytest.approx([0.8] * patience + [0.4] * patience + [0.2])
    assert improving == pytest.approx([0.8] * (2 * patience + 1))


def test_select_keeps_the_memory_of_the_rows() -> None:
    """Each of four sequences stalls from another iteration on, so each has its own delta at the end."""
    residuals = torch.tensor([[1.0 / max(1, min(step, 3 * row)) for row in range(4)] for step in range(1, 13)])
    rows = torch.tensor([3, 1])

    def run(selected_at: int | None) -> list[float]:
        method, y, f_y = Damped(1.0, 0.5, 3), torch.zeros(4, 1, 1), torch.ones(4, 1, 1)
        for step, residual in enumerate(residuals):
            if step == selected_at:
                method.select(rows)
                y, f_y = y[rows], f_y[rows]
            kept = residual[rows] if len(y) == 2 else residual
            delta = method.advance(y, f_y, kept).flatten()
        return (delta if len(y) == 2 else delta[rows]).tolist()

    assert len(set(run(None))) == 2
    for step in (0, 1, 5, 11):
        assert run(step) == run(None)
