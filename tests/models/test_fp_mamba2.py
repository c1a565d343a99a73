"""FP-Mamba-2 against a plain loop over heads in numpy, and the variants of the paper's first version."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import EVERYTHING, MIXERS, NOTHING, dense_matrix, make_layer, random, tiny, to_numpy
from torch import Tensor, nn
from torch.testing import assert_close

from fpexp.channel_mixers import ChannelMixer, Householder
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Implicit, OneStep, Picard, Sequential, Solver, Status, Unrolled
from fpexp.models.fp_mamba2 import FPMamba2Layer
from fpexp.models.fp_mamba_layer import Dependence, FPScanLayer
from fpexp.models.fp_mamba_problem import FPMambaProblem
from fpexp.ops.selective_scan import selective_scan
from fpexp.ops.ssd import ssd

CAP = Cap(5000)
HEAD_SIZE, WIDTH, N = 2, 6, 3

gates = pytest.mark.parametrize("gate", ["outside", "inside"])


def head_layer(
    mixer: str | ChannelMixer = "H2",
    solver: Solver | None = None,
    *,
    contracting: bool = True,
    head_size: int = HEAD_SIZE,
    state_size: int = N,
    **settings: Any,
) -> FPMamba2Layer:
    """A float64 layer, d_model 4, with every parameter away from its special initial value; a named mixer has width 6.

    `contracting`: a_max 0.5, D and norm so small that the token map contracts.
    """
    if isinstance(mixer, str):
        mixer = MIXERS[mixer](WIDTH, 0.5 if contracting else 2.0)
    shared: dict[str, Any] = {"dependence": EVERYTHING, "gate": "outside", "norm": "rms_norm", "conv_width": 0}
    shared |= {"weight_norm": False, "gradient": OneStep(), "solver": solver or fused(), **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = FPMamba2Layer(
            4,
            mixer.width,
            head_size,
            (1e-3, 1e-1),
            (1.0, 16.0),
            channel_mixer=mixer,
            state_size=state_size,
            norm_epsilon=1e-6,
            **shared,
        ).double()
        with torch.no_grad():
            layer.mixer_bias.normal_()
            layer.dt_bias.normal_()
            layer.D.uniform_(-0.3, 0.3) if contracting else layer.D.uniform_(0.5, 1.5)
            if layer.norm is not None:
                scale = 0.05 if contracting else 1.0
                layer.norm.weight.uniform_(scale / 2, scale)
    return layer


def fused(tolerance: float = 1e-12) -> Sequential:
    return Sequential(tolerance=tolerance, inner_max_iterations=1000)


def plain(tolerance: float = 1e-12) -> Sequential:
    return Sequential(tolerance=tolerance, inner_max_iterations=1000, backend="reference")


def slow_evaluate(layer: FPMamba2Layer, u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f(y) (T, d) and all H (T, heads, P, N) of one sequence, head by head, from the layer's parameters."""
    x, z = np.split(u @ to_numpy(layer.in_projection.weight).T, 2, axis=-1)
    coefficients, b_x, c_x, dt = np.split(
        x @ to_numpy(layer.x_projection.weight).T, np.cumsum(layer.x_sizes)[:-1], axis=-1
    )
    W = np.split(to_numpy(layer.s_weight), np.cumsum(layer.columns.from_s))
    A, D = -np.exp(to_numpy(layer.A_log)), to_numpy(layer.D)
    heads, P = len(A), x.shape[1] // len(A)

    def with_s(x_part: np.ndarray, part: int, s: np.ndarray) -> np.ndarray:
        return x_part + W[part] @ s if len(W[part]) else x_part

    H = np.zeros((len(u), heads, P, layer.state_size))
    f_y = np.zeros_like(y)
    for t in range(len(u)):
        s = y[t - 1] if t else np.zeros_like(y[0])
        Q = dense_matrix(layer.channel_mixer, with_s(coefficients[t] + to_numpy(layer.mixer_bias), 0, s))
        b, c = oracle.l2norm(with_s(b_x[t], 1, s)), oracle.l2norm(with_s(c_x[t], 2, s))
        delta = oracle.softplus(with_s(dt[t] + to_numpy(layer.dt_bias), 3, s))
        mixed = Q @ (x[t] - y[t]) + y[t]
        for head in range(heads):
            own = slice(head * P, (head + 1) * P)
            before = H[t - 1, head] if t else 0.0
            H[t, head] = np.exp(delta[head] * A[head]) * before + delta[head] * np.outer(mixed[own], b)
            f_y[t, own] = H[t, head] @ c + D[head] * mixed[own]
        if layer.gate_inside:
            f_y[t] *= oracle.silu(with_s(z[t], 4, s))
        if layer.norm is not None:
            f_y[t] *= to_numpy(layer.norm.weight) / np.sqrt((f_y[t] ** 2).mean() + 1e-6)
    return f_y, H


SWITCHED = [Dependence(*on) for on in itertools.product([False, True], repeat=5)]


@gates
@pytest.mark.parametrize("dependence", SWITCHED, ids=str)
def test_one_evaluation_is_the_plain_loops(dependence: Dependence, gate: str) -> None:
    layer = head_layer(dependence=dependence, gate=gate, contracting=False)
    u, y = random(2, 5, 4), random(2, 5, WIDTH, seed=1)
    f_y = layer.problem(u).evaluate(y)
    for i in range(2):
        np.testing.assert_allclose(to_numpy(f_y[i]), slow_evaluate(layer, u[i].numpy(), y[i].numpy())[0], atol=1e-10)


@gates
@pytest.mark.parametrize("mixer", ["H2", "K-spectral", "DPLR2"])
@pytest.mark.parametrize("solver", [Picard(tolerance=1e-12), plain(), fused()], ids=["picard", "plain", "fused"])
def test_the_fixed_point_is_the_plain_loops(mixer: str, gate: str, solver: Solver) -> None:
    """f(y*) = y* for the independent f, and the state that is carried on is its last H."""
    layer = head_layer(mixer, solver, gate=gate)
    u = random(2, 6, 4)
    problem = layer.problem(u)
    y = solver.solve(problem, CAP, training=False).value
    last = Sequential.like(solver).carry(problem)[1].H
    for i in range(2):
        f_y, H = slow_evaluate(layer, u[i].numpy(), to_numpy(y[i]))
        np.testing.assert_allclose(f_y, to_numpy(y[i]), rtol=0, atol=1e-10)
        np.testing.assert_allclose(to_numpy(last[i]), H[-1].reshape(WIDTH, N), rtol=0, atol=1e-10)
    assert y.abs().max() > 1e-3


class Identity(ChannelMixer):
    """Q = I: the layer without its mixer."""

    def __init__(self, width: int) -> None:
        self.width, self.coefficient_size = width, 0

    def factors(self, coefficients: Tensor) -> tuple[Tensor, ...]:
        return ()

    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        return v


def test_without_mixer_it_is_mambas_scan() -> None:
    """Nothing depends on s and there is no norm: the scan of x itself, with b and c of unit length."""
    for layer in (
        make_layer(Identity(WIDTH), plain(), dependence=NOTHING, norm="none"),
        head_layer(Identity(WIDTH), plain(), dependence=NOTHING, norm="none"),
    ):
        u = random(2, 7, 4)
        problem = layer.problem(u)
        y, state = layer.solver.carry(problem)
        b, c, dt = problem.from_x.split([N, N, layer.dynamics.steps], dim=-1)
        b, c = (v / (v.square().sum(-1, keepdim=True) + 1e-6).sqrt() for v in (b, c))
        delta = nn.functional.softplus(dt)
        assert (y.status == Status.CONVERGED).all()
        repeats = WIDTH // layer.dynamics.steps
        A, D = -layer.A_log.exp().reshape(layer.dynamics.steps, -1).expand(-1, N), layer.D
        wide = (delta.repeat_interleave(repeats, -1), A.repeat_interleave(repeats, 0), D.repeat_interleave(repeats))
        expected, H = selective_scan(problem.x, wide[0], wide[1], b, c, wide[2])
        assert_close(y.value, expected, rtol=0, atol=1e-12)
        assert_close(state.H, H, rtol=0, atol=1e-12)
        if repeats > 1:
            by_head = problem.x.unflatten(-1, (-1, HEAD_SIZE))
            found, _ = ssd(by_head, delta, -layer.A_log.exp(), b[:, :, None], c[:, :, None], layer.D)
            assert_close(y.value, found.flatten(2), rtol=0, atol=1e-12)


def assert_same_sweep(problem: FPMambaProblem, **settings: Any) -> None:
    """Values, residuals, counts and statuses of the fused sweep are the solver's own."""
    settings = {"tolerance": 1e-6, **settings}
    expected = Sequential(backend="reference", **settings).solve(problem, CAP, training=False)
    found = Sequential(backend="cpu", **settings).solve(problem, CAP, training=False)
    assert expected.tokens is not None
    assert found.tokens is not None
    assert torch.equal(found.tokens.iterations, expected.tokens.iterations)
    assert torch.equal(found.tokens.status, expected.tokens.status)
    assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)
    assert_close(found.tokens.residual, expected.tokens.residual, rtol=1e-5, atol=1e-9)


@gates
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm", "none"])
@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
def test_the_fused_sweep_is_the_plain_one(mixer: str, norm: str, gate: str) -> None:
    with torch.no_grad():
        assert_same_sweep(head_layer(mixer, gate=gate, norm=norm).problem(random(5, 9, 4)))


@pytest.mark.parametrize(
    ("width", "head_size"),
    [(40, 1), (40, 5), (40, 8), (40, 20), (40, 40), (48, 24), (96, 48), (72, 72), (200, 100)],
)
def test_the_fused_sweep_at_other_heads(width: int, head_size: int) -> None:
    """CASES.md 11: heads of one channel, across registers, and one head; padded; where the map does not contract."""
    layer = head_layer(Householder(width, rank=2, a_max=2.0), head_size=head_size, state_size=17, contracting=False)
    mask = torch.arange(6) < torch.tensor([6, 1, 4, 5, 6])[:, None]
    with torch.no_grad():
        problem = layer.problem(random(5, 6, 4), mask)
        assert_same_sweep(problem, tolerance=1e-3, patience=3, inner_max_iterations=20)


@gates
@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
@pytest.mark.parametrize("solver", [fused(), plain()], ids=["taken over", "computed anew"])
def test_the_gradient_with_kernels_is_that_without(
    mixer: str, gate: str, solver: Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one differentiable evaluation: token mixing as a kernel, from what the sweep has left or anew."""
    layer = head_layer(mixer, solver, gate=gate, weight_norm=True)
    u, weights = random(2, 5, 4), random(2, 5, 4, seed=1)
    found = gradients(layer, u, weights)
    monkeypatch.setattr(type(layer.channel_mixer), "form", None)
    layer.solver = plain()
    for (name, _), one, other in zip(layer.named_parameters(), found, gradients(layer, u, weights), strict=True):
        assert_close(one, other, rtol=1e-7, atol=1e-10, msg=name)
        assert one.isfinite().all(), name
        assert one.abs().max() > 0, name


def gradients(layer: FPScanLayer, u: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
    output, _ = layer(u, CAP, None)
    return torch.autograd.grad((output * weights).sum(), list(layer.parameters()))


def test_the_implicit_gradient_is_that_of_many_steps() -> None:
    u, weights = random(2, 5, 4), random(2, 5, 4, seed=1)
    ways = (Implicit(tolerance=1e-12, max_iterations=200, restart=30), Unrolled(steps=60), OneStep())
    implicit, unrolled, one_step = (gradients(head_layer(gradient=way), u, weights) for way in ways)
    for found, expected in zip(implicit, unrolled, strict=True):
        assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert not all(torch.allclose(one, other, rtol=1e-3) for one, other in zip(one_step, implicit, strict=True))


@gates
@pytest.mark.parametrize("decay", ["exponential", "floor"])
@pytest.mark.parametrize("parts", [[3, 6], [1] * 9], ids=str)
def test_decoding_is_one_pass(gate: str, decay: str, parts: list[int]) -> None:
    words = ["model=fp_mamba2_h", f"model.gate={gate}", f"model.decay={decay}", "model.conv_width=4", "model.layers=2"]
    words += ["precision=float64", "solver.tolerance=1e-10", "model.channel_mixer.a_max=0.5"]
    model = tiny(*words).model.eval()
    with torch.no_grad():
        for block in model.layers:
            block.layer.D.fill_(0.3)
            block.layer.norm.weight.mul_(0.05)
    tokens = torch.randint(12, (2, 9), generator=torch.Generator().manual_seed(0))
    state, logits = None, []
    for part in tokens.split(parts, dim=1):
        output, state = model.decode(part, state)
        logits.append(output.logits)
    assert_close(torch.cat(logits, dim=1), model(tokens).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("words", [[], ["model.weight_norm=true"], ["model.decay=floor"], ["solver=picard"]], ids=str)
@pytest.mark.parametrize("model", ["fp_mamba2_h", "fp_mamba2_k"])
def test_every_parameter_of_the_built_model_learns(model: str, words: list[str]) -> None:
    experiment = tiny(f"model={model}", "precision=float64", *words)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learn(experiment).parameters())


def learn(experiment: Any) -> nn.Module:
    """One backward; every gradient is finite."""
    batch = experiment.task.sample(4, 6, torch.Generator().manual_seed(0))
    logits = experiment.model(batch.inputs, Cap(10), batch.mask).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    for name, parameter in experiment.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    model: nn.Module = experiment.model
    return model


def test_dynamics_start_as_in_mamba2() -> None:
    """-A uniform in [1, 16], Delta log-uniform in [1e-3, 1e-1], D one; a head is head_size channels."""
    layer = tiny("model=fp_mamba2_h", "model.d_model=256", "model.head_size=1").model.layers[0].layer
    A, delta = layer.A_log.exp(), nn.functional.softplus(layer.dt_bias)
    assert A.shape == delta.shape == layer.D.shape == (512,)
    assert 1 <= A.min() < 1.5
    assert 15.5 < A.max() <= 16
    assert A.mean().item() == pytest.approx(8.5, abs=0.7)
    assert 0.9e-3 < delta.min() < 1.2e-3
    assert 0.08 < delta.max() < 0.1001
    assert (layer.D == 1).all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model=fp_mamba2_h", "model.head_size=5"],
            r"model\.head_size=5 does not divide .*model\.expand \* model\.d_model",
        ),
        (["model=fp_mamba2_h", "model.a_range=[16,1]"], r"model\.a_range"),
        (["model=fp_mamba2_h", "model.delta_range=[0.1,0.01]"], r"model\.delta_range"),
        (["model=fp_mamba2_h", "model.expand=0.01"], r"model\.expand"),
        (["model=fp_mamba_h", "model.decay=floor", "model.delta_range=[0.1,1]"], r"must end below 1"),
        (["model=fp_mamba_h", "model.channel_mixer.orthogonal=true", "model.channel_mixer.rank=17"], r"orthogonal"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny(*words)
