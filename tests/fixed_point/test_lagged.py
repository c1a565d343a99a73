"""The lagged iteration: the same fixed point as picard's, one token of travel an iteration, and when it has stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Self

import numpy as np
import oracle
import pytest
import torch
from helpers import EVERYTHING, affine, all_states, make_layer, oracle_arguments, random, to_numpy
from runs import train_tiny
from torch import Tensor

from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Lagged, Picard, Sequential, Solver, Status
from fpexp.fixed_point.iterate import token_residual
from fpexp.models.fp_mamba_problem import State

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Sum:
    """H_t = decay H_{t-1} + x_t + slope y_t, y_t = read H_t; (B, T, 1) each, `slope` and `read` (B, 1, 1)."""

    x: Tensor
    slope: Tensor
    decay: float = 1.0
    read: float = 1.0
    mask: Tensor | None = None

    def start(self) -> Tensor:
        return torch.zeros_like(self.x)

    def start_lagged(self) -> Tensor:
        return torch.zeros_like(self.x)

    def evaluate(self, y: Tensor) -> Tensor:
        raise AssertionError("the lagged iteration makes no scan")

    def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        before = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], dim=1)
        memory = self.decay * before + self.x + self.slope * y
        return self.read * memory, memory

    def select(self, rows: Tensor) -> Self:
        mask = None if self.mask is None else self.mask[rows]
        return dataclasses.replace(self, x=self.x[rows], slope=self.slope[rows], mask=mask)


def sums(slopes: list[float], length: int = 8, **settings: Any) -> Sum:
    slope = torch.tensor(slopes, dtype=torch.float64)[:, None, None]
    return Sum(torch.ones(len(slopes), length, 1, dtype=torch.float64), slope, **settings)


def solve(problem: Any, cap: int = 1000, *, stop_early: bool = True, training: bool = False, **options: Any):
    options.setdefault("tolerance", 1e-10)
    return Lagged(**options).solve(problem, Cap(cap, stop_early), training=training)


@pytest.mark.parametrize("length", [1, 2, 7, 14])
def test_a_sum_takes_as_many_iterations_as_it_has_tokens(length: int) -> None:
    result = solve(sums([0.0], length))
    assert result.iterations.tolist() == [length + 1]
    assert result.value.flatten().tolist() == list(range(1, length + 1))


def test_it_has_not_converged_while_the_memory_travels() -> None:
    """y reads a part of H that is zero until H has arrived: at the first evaluations y does not move at all."""

    class Hidden(Sum):
        def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
            _, memory = super().evaluate_lagged(y, memory)
            return (memory - 5.5).clamp_min(0.0), memory

    result = solve(Hidden(**vars(sums([0.0]))))
    assert result.iterations.tolist() == [9]
    assert result.value.flatten().tolist() == [0.0] * 5 + [0.5, 1.5, 2.5]


def test_the_state_of_a_layer_takes_about_as_many_iterations_as_tokens() -> None:
    """With decays near one; picard, whose scan carries at once, needs few."""
    layer = make_layer("H2", Lagged(tolerance=1e-6), dependence=EVERYTHING, norm="layer_norm")
    with torch.no_grad():
        layer.A_log.fill_(-12.0)
    problem = layer.problem(random(2, 24, 4))
    lagged = solve(problem, tolerance=1e-6)
    scanned = Picard(tolerance=1e-6).solve(problem, Cap(1000), training=False)
    assert (lagged.status == Status.CONVERGED).all()
    assert lagged.iterations.min() >= 24
    assert scanned.iterations.max() <= 10
    torch.testing.assert_close(lagged.value, scanned.value, rtol=0, atol=1e-5)


def lagged_loop(u: Tensor, layer: Any, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """y and H of one sequence after `iterations` of the lagged map, token by token in numpy."""
    given = oracle_arguments(layer, u)
    x, A, D = given["x"], given["A"], given["D"]
    y, H = np.zeros_like(x), np.zeros((*x.shape, A.shape[1]))
    for _ in range(iterations):
        f_y, after = np.zeros_like(y), np.zeros_like(H)
        for t in range(len(x)):
            s = y[t - 1] if t else np.zeros_like(y[0])
            before = H[t - 1] if t else np.zeros_like(H[0])
            delta = oracle.softplus(given["delta_x"][t] + given["W_ls"] @ s)
            b = oracle.l2norm(given["b_x"][t] + given["W_bs"] @ s)
            c = oracle.l2norm(given["c_x"][t] + given["W_cs"] @ s)
            mixed = given["Q"](t, s) @ (x[t] - y[t]) + y[t]
            after[t] = np.exp(delta[:, None] * A) * before + np.outer(delta * mixed, b)
            read = after[t] @ c + D * mixed
            if given["gate_inside"]:
                read = oracle.silu(given["z"][t] + given["W_zs"] @ s) * read
            f_y[t] = oracle.layer_norm(read, given["norm_weight"], given["norm_bias"])
        y, H = f_y, after
    return y, H


@pytest.mark.parametrize("mixer", ["H2", "K-rows", "DPLR2"])
@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_k_iterations_are_those_of_a_plain_loop(mixer: str, gate: str, count: int) -> None:
    """Also where nothing contracts."""
    layer = make_layer(
        mixer, Lagged(tolerance=0.1), dependence=EVERYTHING, gate=gate, norm="layer_norm", contracting=False
    )
    u = random(2, 5, 4)
    result = solve(layer.problem(u), count + 1, stop_early=False)
    for i in range(2):
        expected, _ = lagged_loop(u[i], layer, count)
        np.testing.assert_allclose(to_numpy(result.value[i]), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mixer", ["H2", "K-spectral", "K-rows", "DPLR2"])
@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("norm", ["none", "layer_norm"])
def test_it_finds_what_picard_and_the_sweep_find(mixer: str, gate: str, norm: str) -> None:
    """From a carried state, too."""
    solvers: list[Solver] = [
        Lagged(tolerance=1e-12),
        Picard(tolerance=1e-12),
        Sequential(tolerance=1e-12, inner_max_iterations=1000),
    ]
    layer = make_layer(mixer, solvers[0], dependence=EVERYTHING, gate=gate, norm=norm)
    carried = State(y=random(2, 1, 6, seed=1), H=random(2, 6, 3, seed=2))
    problem = layer.problem(random(2, 8, 4), state=carried)
    found, *others = (solver.solve(problem, Cap(2000), training=False) for solver in solvers)
    assert (found.status == Status.CONVERGED).all()
    torch.testing.assert_close(problem.evaluate(found.value), found.value, rtol=0, atol=1e-9)
    for other in others:
        torch.testing.assert_close(found.value, other.value, rtol=0, atol=1e-8)
    states = all_states(problem, found.value)
    f_y, memory = problem.evaluate_lagged(found.value, states)
    torch.testing.assert_close(memory, states, rtol=0, atol=1e-9)
    torch.testing.assert_close(f_y, found.value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cap", [1, 3, 200])
def test_what_is_reported_is_the_larger_residual_of_what_is_returned(cap: int) -> None:
    problem = sums([0.3, -0.4], decay=0.7, read=0.5)
    result = solve(problem, cap, tolerance=1e-6)
    y, memory = problem.start(), problem.start_lagged()
    for _ in range(int(result.iterations.max()) - 1):
        y, memory = problem.evaluate_lagged(y, memory)
    f_y, after = problem.evaluate_lagged(y, memory)
    last = int(result.iterations.argmax())
    both = torch.maximum(token_residual(f_y, y), token_residual(after, memory)).amax(-1)
    torch.testing.assert_close(result.value[last], y[last], rtol=1e-12, atol=0)
    torch.testing.assert_close(result.residual[last], both[last], rtol=1e-9, atol=1e-15)
    assert torch.equal(result.status == Status.CONVERGED, result.residual <= 1e-6)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["y", "memory"])
def test_non_finite_stops_there(where: str, training: bool) -> None:
    """CASES.md 1: from the third evaluation on, in y or in the memory."""
    calls: list[int] = []

    class Spoilt(Sum):
        def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(len(y))
            f_y, memory = super().evaluate_lagged(y, memory)
            bad = NAN if len(calls) >= 3 else 0.0
            return (f_y + bad, memory) if where == "y" else (f_y, memory + bad)

    result = solve(Spoilt(**vars(sums([0.5, 0.5]))), training=training)
    assert calls == [2, 2, 2]
    assert result.status.tolist() == [Status.NON_FINITE] * 2
    assert result.residual.isnan().all()


@pytest.mark.parametrize("training", [False, True])
def test_cap_reached_has_the_true_residual(training: bool) -> None:
    """CASES.md 2: at one token, y <- H and H <- 1 + 0.999 y."""
    result = solve(sums([0.999], length=1), 5, tolerance=1e-6, training=training)
    iterates = [0.0]
    for _ in range(5):
        iterates.append(0.999 * iterates[-1] + 1)
    assert result.status.tolist() == [Status.CAP_REACHED]
    assert result.iterations.tolist() == [5]
    assert result.value.item() == pytest.approx(iterates[4], rel=1e-12)
    assert result.residual.item() == pytest.approx((iterates[5] - iterates[4]) / iterates[5], rel=1e-12)


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
    """CASES.md 3."""
    problem = sums([slope] * 3 + [0.99], 1)
    counts = [solve(problem, 300, **{"tolerance": 1e-6} | options).iterations[0] for options in (one, other)]
    assert counts[0] != counts[1]


def test_unknown_options_and_other_problems_are_refused() -> None:
    with pytest.raises(UserError, match=r"solver\.window"):
        compose(["task=a4", "model=fp_mamba_h", "solver=lagged", "solver.window=3"])
    with pytest.raises(UserError, match=r"^solver=lagged needs evaluate_lagged, which Toy .*use solver=picard$"):
        solve(affine([0.5]))


@pytest.mark.parametrize("cap", [Cap(12, stop_early=False), Cap(500)])
def test_a_changed_token_changes_nothing_before_it(cap: Cap) -> None:
    """CASES.md 6: exactly at a fixed count, within the tolerance where each solve stops by itself."""
    layer = make_layer("H2", Lagged(tolerance=1e-10), dependence=EVERYTHING, norm="layer_norm").eval()
    u = random(2, 32, 4)
    changed = u.clone()
    changed[:, 20] += 1.0
    before, after = (layer.solver.solve(layer.problem(v), cap, training=False).value for v in (u, changed))
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-8 if cap.stop_early else 0.0)
    assert (before[:, 20:] - after[:, 20:]).abs().max() > 1e-3


@pytest.mark.parametrize("stop_early", [False, True])
def test_a_sequence_alone_and_beside_hard_ones(stop_early: bool) -> None:
    """CASES.md 6: slow, diverging and NaN; the memory is frozen and selected with its sequence."""
    slopes = [0.3, 0.95, 3.0, NAN, -0.2]
    cap = 1000 if stop_early else 30
    together = solve(sums(slopes, decay=0.5), cap, stop_early=stop_early)
    for i, slope in enumerate(slopes):
        alone = solve(sums([slope], decay=0.5), cap, stop_early=stop_early)
        torch.testing.assert_close(together.value[i], alone.value[0], rtol=0, atol=0, equal_nan=True)
        assert together.iterations[i] == alone.iterations[0]
        assert together.status[i] == alone.status[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padding", [0.999, 10.0, NAN])
def test_padded_tokens_do_not_count(padding: float, training: bool) -> None:
    mask = torch.tensor([[True] * 3 + [False] * 3] * 2)
    slope = torch.full((2, 6, 1), padding, dtype=torch.float64)
    slope[:, :3] = 0.4
    x = torch.ones_like(slope)
    padded, short = solve(Sum(x, slope, mask=mask), training=training), solve(Sum(x[:, :3], slope[:, :3]))
    assert padded.status.tolist() == [Status.CONVERGED] * 2
    assert torch.equal(padded.value[:, :3], short.value)
    assert torch.equal(padded.iterations, short.iterations)


def test_float32_under_autocast() -> None:
    layer = make_layer("H2", Lagged(tolerance=1e-5), dependence=EVERYTHING, norm="layer_norm", conv_width=4).float()
    u = random(2, 9, 4, dtype=torch.float32)
    exact = layer.solver.solve(layer.problem(u), Cap(500), training=False)
    assert (exact.status == Status.CONVERGED).all()
    assert exact.value.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer.solver.solve(layer.problem(u), Cap(500), training=False)
    assert rounded.value.dtype == torch.float32
    torch.testing.assert_close(rounded.value, exact.value, rtol=0, atol=0.1)


@pytest.mark.parametrize("model", ["fp_mamba_h", "fp_mamba_k"])
def test_it_trains_under_a_cap(tmp_path: Path, model: str) -> None:
    words = ["solver=lagged", "schedule=fixed", "schedule.max_iterations=6", "training.steps=3"]
    trainer, tracker = train_tiny(tmp_path, *words, model=model)
    assert trainer.progress.step == 3
    for row in tracker.of("train"):
        assert np.isfinite(row["loss"])
