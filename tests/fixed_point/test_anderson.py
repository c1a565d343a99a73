"""Anderson acceleration: where it helps, where it must not harm, and what the safeguard does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, Toy, affine, make_layer, random
from runs import train_tiny
from torch import Tensor

from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.fixed_point import Anderson, Cap, Picard, Sequential, Solver, SolveResult, Status
from fpexp.fixed_point.anderson import Accelerated
from fpexp.fixed_point.iterate import token_residual
from fpexp.fixed_point.picard import Damped

NAN = float("nan")


def solve(problem: Any, cap: int = 1000, *, stop_early: bool = True, training: bool = False, **options: Any):
    options.setdefault("tolerance", 1e-8)
    return Anderson(**options).solve(problem, Cap(cap, stop_early), training=training)


def picard(problem: Any, cap: int = 1000, tolerance: float = 1e-8) -> SolveResult:
    return Picard(tolerance=tolerance).solve(problem, Cap(cap), training=False)


def linear(eigenvalues: list[float], batch: int = 4, dtype: torch.dtype = torch.float64) -> tuple[Toy, Tensor]:
    """z -> W z + x with symmetric W, one for each sequence; and its fixed point."""
    size = len(eigenvalues)
    basis = torch.linalg.qr(random(batch, size, size)).Q
    W = basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.mT
    x = random(batch, 1, size, seed=1)
    expected = torch.linalg.solve(torch.eye(size) - W, x.mT).mT
    problem = Toy(lambda y, W, x: y.to(dtype) @ W + x, W.to(dtype), x.to(dtype), width=size)
    return problem, expected


def chain(local: float, length: int = 16, bend: bool = False) -> Toy:
    """f(y)_t = R_t y_{t-1} + local y_t + x_t with rotations R_t: state that is carried without loss."""
    R = torch.linalg.qr(random(4, length, 6, 6)).Q

    def f(y: Tensor, R: Tensor, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], dim=1)
        z = (R @ before[..., None]).squeeze(-1) + local * y + x
        return torch.tanh(2 * z) if bend else z

    return Toy(f, R, random(4, length, 6, seed=3), length=length, width=6)


def test_where_picard_diverges_a_linear_problem_is_solved() -> None:
    """In at most one iteration for each eigenvalue and a few more: then the window spans the space."""
    problem, expected = linear([-1.5, -0.7, 0.0, 0.5])
    result = solve(problem)
    assert (result.status == Status.CONVERGED).all()
    assert result.iterations.max() <= 10
    torch.testing.assert_close(result.value, expected, rtol=1e-6, atol=1e-7)
    undamped = Picard(tolerance=1e-8, damping_decay=1.0).solve(problem, Cap(1000), training=False)
    assert (undamped.status == Status.DIVERGED).all()


@pytest.mark.parametrize("size", [8, 32])
def test_far_fewer_iterations_at_spectral_radius_0_95(size: int) -> None:
    problem, expected = linear(torch.linspace(-0.95, 0.95, size).tolist())
    result = solve(problem)
    assert (result.status == Status.CONVERGED).all()
    assert 3 * result.iterations.max() < picard(problem).iterations.min()
    torch.testing.assert_close(result.value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [12, 24])
@pytest.mark.parametrize("bend", [False, True])
@pytest.mark.parametrize("local", [0.0, 0.3, -0.8])
@pytest.mark.parametrize("tolerance", [0.1, 1e-6])
def test_it_is_never_much_slower_than_picard(tolerance: float, local: float, bend: bool, length: int) -> None:
    """Carried state is its worst case: picard gets one token after the other exactly right."""
    problem = chain(local, length, bend)
    result, plain = solve(problem, tolerance=tolerance), picard(problem, tolerance=tolerance)
    assert (result.status == Status.CONVERGED).all()
    assert result.iterations.sum() <= 2.5 * plain.iterations.sum()
    if local == -0.8:
        assert result.iterations.sum() <= 0.6 * plain.iterations.sum()


@pytest.mark.parametrize("mixer", ["H2", "K-spectral", "K-rows", "DPLR2"])
@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("norm", ["none", "layer_norm"])
def test_it_finds_what_picard_and_the_sweep_find(mixer: str, gate: str, norm: str) -> None:
    solvers: list[Solver] = [
        Anderson(tolerance=1e-12),
        Picard(tolerance=1e-12),
        Sequential(tolerance=1e-12, inner_max_iterations=1000),
    ]
    layer = make_layer(mixer, solvers[0], dependence=EVERYTHING, gate=gate, norm=norm)
    problem = layer.problem(random(3, 8, 4))
    found, *others = (solver.solve(problem, Cap(2000), training=False) for solver in solvers)
    assert (found.status == Status.CONVERGED).all()
    torch.testing.assert_close(problem.evaluate(found.value), found.value, rtol=0, atol=1e-10)
    for other in others:
        torch.testing.assert_close(found.value, other.value, rtol=0, atol=1e-8)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("stop_early", [False, True])
def test_non_finite_from_the_third_evaluation_stops_there(stop_early: bool, training: bool) -> None:
    """CASES.md 1."""
    calls = itertools.count(1)
    problem = Toy(lambda y, _: 0.5 * y.sin() + (NAN if next(calls) >= 3 else 1.0), torch.zeros(2), length=2)
    result = solve(problem, stop_early=stop_early, training=training)
    assert problem.batches == [2, 2, 2]
    assert result.status.tolist() == [Status.NON_FINITE] * 2
    assert result.residual.isnan().all()


@pytest.mark.parametrize("training", [False, True])
def test_cap_reached_has_the_true_residual(training: bool) -> None:
    """CASES.md 2, with eigenvalues that five iterations cannot span: an affine map of one number takes three."""
    problem, _ = linear([0.999, 0.99, 0.9, 0.5, -0.5, -0.9, -0.99])
    result = solve(problem, 5, tolerance=1e-6, training=training)
    assert result.status.tolist() == [Status.CAP_REACHED] * 4
    assert result.iterations.tolist() == [5] * 4
    measured = token_residual(problem.evaluate(result.value), result.value).amax(-1)
    torch.testing.assert_close(measured, result.residual, rtol=1e-12, atol=0)
    assert solve(affine([0.999]), 5).status.tolist() == [Status.CONVERGED]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"tolerance": 1e-2}, {"tolerance": 1e-6}),
        ({"tolerance_kind": "relative"}, {"tolerance_kind": "absolute"}),
        ({"outlier_quantile": 0.0, "training": True}, {"outlier_quantile": 0.7, "training": True}),
        ({"window": 1}, {"window": 5}),
        ({"regularisation": 1e-8}, {"regularisation": 1.0}),
        ({"safeguard": 1.0}, {"safeguard": 0.1}),
        ({"mixing": 1.0}, {"mixing": 0.3}),
        ({"patience": 4}, {"patience": 15}),
        ({"patience": 4, "mixing_decay": 0.9}, {"patience": 4, "mixing_decay": 0.5}),
        ({"divergence_limit": 1e8}, {"divergence_limit": 1e-1}),
    ],
    ids=lambda value: next(iter(value)),
)
def test_every_option_changes_what_it_says(one: dict[str, Any], other: dict[str, Any]) -> None:
    """CASES.md 3."""
    problem = chain(0.3, bend=True)
    first, second = solve(problem, **{"tolerance": 1e-4} | one), solve(problem, **{"tolerance": 1e-4} | other)
    assert first.iterations.tolist() != second.iterations.tolist()


def test_relative_and_absolute_tolerance_stop_at_different_counts() -> None:
    """CASES.md 3, z <- 0.5 z + 1e4: the first difference gives the whole answer, up to the regularisation."""
    problem = affine([0.5], 1e4)
    relative, absolute = (solve(problem, tolerance=1e-6, tolerance_kind=kind) for kind in ("relative", "absolute"))
    assert relative.iterations < absolute.iterations


def test_unknown_and_senseless_options_are_refused() -> None:
    run = ["task=a4", "model=fp_mamba_h", "solver=anderson"]
    with pytest.raises(UserError, match=r"solver\.windw.*did you mean 'solver\.window'"):
        compose([*run, "solver.windw=3"])
    for setting in ("window=0", "regularisation=0", "safeguard=1.1", "safeguard=0", "mixing=0", "patience=0"):
        with pytest.raises(UserError, match=r"solver\."):
            compose([*run, f"solver.{setting}"])


def test_a_changed_token_changes_nothing_before_it() -> None:
    """CASES.md 6: token 20 of 32, within the tolerance."""
    layer = make_layer("H2", Anderson(tolerance=1e-10), dependence=EVERYTHING, norm="layer_norm").eval()
    u = random(2, 32, 4)
    changed = u.clone()
    changed[:, 20] += 1.0
    before, after = (layer(v, Cap(500), None)[0] for v in (u, changed))
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-8)
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("stop_early", [False, True])
def test_a_sequence_alone_and_beside_hard_ones(stop_early: bool) -> None:
    """CASES.md 6: others that are slow, that diverge, and that give NaN."""
    f, slopes = chain(0.3, bend=True).f, torch.tensor([1.0, 40.0, NAN, -3.0], dtype=torch.float64)
    R, x = chain(0.3).parameters
    together = Toy(lambda y, R, x, a: a[:, None, None] * f(y, R, x), R, x, slopes, length=16, width=6)
    alone = together.select(torch.tensor([0]))
    cap = 1000 if stop_early else 40
    options = {"stop_early": stop_early, "tolerance": 1e-4}
    beside, by_itself = solve(together, cap, **options), solve(alone, cap, **options)
    torch.testing.assert_close(beside.value[:1], by_itself.value, rtol=0, atol=1e-12)
    assert beside.iterations[0] == by_itself.iterations[0]
    assert beside.status[0] == by_itself.status[0]
    assert beside.status[2] == Status.NON_FINITE


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [0.999, 10.0, NAN])
def test_padded_tokens_do_not_count(padding: float, training: bool) -> None:
    slopes = torch.full((2, 4, 1), padding, dtype=torch.float64)
    slopes[:, :2] = torch.tensor([[[0.9], [-0.8]]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False]] * 2)

    def f(y: Tensor, slope: Tensor) -> Tensor:
        return slope * y.sin() + 1

    padded = solve(Toy(f, slopes, length=4, mask=mask), training=training)
    short = solve(Toy(f, slopes[:, :2], length=2), training=training)
    assert padded.status.tolist() == [Status.CONVERGED] * 2
    torch.testing.assert_close(padded.value[:, :2], short.value, rtol=0, atol=1e-12)
    assert torch.equal(padded.iterations, short.iterations)


def test_float32_reaches_what_float32_can() -> None:
    problem, expected = linear(torch.linspace(-1.2, 0.9, 5).tolist(), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):  # the coefficients are computed outside it
        method = Accelerated(Damped(1.0, 0.9, 15), 5, 1e-8, 0.8, 1e8, None)
        y = problem.start().float()
        for _ in range(20):
            with torch.autocast("cpu", enabled=False):
                f_y = problem.evaluate(y)
            y = method.advance(y, f_y, token_residual(f_y, y).amax(-1))
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_window_larger_than_the_cap(cap: int) -> None:
    problem = chain(0.3, bend=True)
    wide, narrow = (solve(problem, cap, stop_early=False, window=window) for window in (2**31 - 1, 5))
    assert torch.equal(wide.value, narrow.value)
    assert wide.iterations.tolist() == [cap] * 4


def test_a_map_without_a_fixed_point_ends_as_with_picard() -> None:
    """y <- y + 1: the residual's differences are zero, so nothing is extrapolated, and the mixing decays."""
    problem, options = affine([1.0]), {"tolerance": 1e-6, "tolerance_kind": "absolute"}
    result, plain = (s(**options).solve(problem, Cap(50), training=False) for s in (Anderson, Picard))
    assert result.status.tolist() == plain.status.tolist() == [Status.CAP_REACHED]
    torch.testing.assert_close(result.value, plain.value, rtol=1e-12, atol=0)


def test_a_refused_step_is_undone_and_the_window_refilled_by_plain_steps() -> None:
    method = Accelerated(Damped(1.0, 0.9, 15), 2, 1e-8, 0.8, 1e8, None)
    f = [torch.full((1, 1, 1), value) for value in (1.0, 1.5, 7.0)]
    y = method.advance(torch.zeros(1, 1, 1), f[0], torch.tensor([1.0]))
    assert y.item() == 1.0
    accelerated = method.advance(y, f[1], torch.tensor([0.5]))
    assert accelerated.item() == pytest.approx(2.0, rel=1e-4)  # r fell from 1 to 0.5 over a step of 1
    undone = method.advance(accelerated, f[2], torch.tensor([0.45]))
    assert undone.item() == 1.5
    plain = method.advance(torch.full((1, 1, 1), 1.5), torch.full((1, 1, 1), 1.9), torch.tensor([0.4]))
    assert plain.item() == pytest.approx(1.9)
    assert not method.accelerated.any()
    assert method.dR.flatten().tolist() == pytest.approx([0.0, -0.1])
    method.advance(plain, plain + 0.3, torch.tensor([0.3]))
    assert method.accelerated.all()


def test_it_trains_under_a_cap(tmp_path: Path) -> None:
    words = ["solver=anderson", "schedule=fixed", "schedule.max_iterations=6", "training.steps=3"]
    trainer, tracker = train_tiny(tmp_path, *words, model="fp_mamba_h")
    assert trainer.progress.step == 3
    for row in tracker.of("train"):
        assert row["loss"] == row["loss"]
