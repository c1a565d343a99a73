"""FP-Mamba against the oracle: the map, its fixed points, the output, and the gradient through one step."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal

import numpy as np
import oracle
import pytest
import torch
from helpers import (
    EVERYTHING,
    LENGTHS,
    MIXERS,
    NOTHING,
    SWITCHES,
    all_states,
    convolve,
    make_layer,
    oracle_arguments,
    oracle_evaluate,
    random,
    tiny,
    to_numpy,
)
from torch import Tensor, nn

from fpexp.channel_mixers import Kronecker
from fpexp.fixed_point import Anderson, Cap, Lagged, Picard, Sequential, Solver, SolveResult, Status
from fpexp.fixed_point.iterate import token_residual
from fpexp.models.fp_mamba import FPMambaLayer
from fpexp.models.fp_mamba_layer import Dependence
from fpexp.models.fp_mamba_problem import State
from fpexp.models.short_convolution import ShortConvolution
from fpexp.ops.selective_scan import selective_scan

CAP = Cap(5000)

mixers = pytest.mark.parametrize("mixer", MIXERS)
gates = pytest.mark.parametrize("gate", ["outside", "inside"])
norms = pytest.mark.parametrize("norm", ["none", "layer_norm"])
solvers = pytest.mark.parametrize("solver", ["picard", "anderson", "lagged", "sequential", "fused"])


WHOLE_SEQUENCE: dict[str, Any] = {"picard": Picard, "anderson": Anderson, "lagged": Lagged}


def make_solver(name: str, tolerance: float = 1e-12) -> Solver:
    """A whole-sequence solver; sequential in plain torch; or its fused kernel."""
    if name in WHOLE_SEQUENCE:
        return WHOLE_SEQUENCE[name](tolerance=tolerance)
    backend: Literal["cpu", "reference"] = "cpu" if name == "fused" else "reference"
    return Sequential(tolerance=tolerance, inner_max_iterations=1000, backend=backend)


class Given:
    """A solver that finds the value it was given."""

    whole_sequence = False

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def solve(self, problem: Any, cap: Cap, *, training: bool) -> SolveResult:
        zeros = torch.zeros(len(self.value))
        return SolveResult(self.value, zeros.long(), zeros, zeros.long())


@solvers
@mixers
def test_golden_the_fixed_point_is_the_dense_linear_recurrence(mixer: str, solver: str) -> None:
    """All dependence off, no norm: (I - diag(g)(I - Q_t)) y_t = base + g * Q_t x_t, solved directly."""
    layer = make_layer(mixer, make_solver(solver))
    u = random(3, 12, 4)
    problem = layer.problem(u)
    result = layer.solver.solve(problem, CAP, training=False)
    assert (result.status == Status.CONVERGED).all()
    states = all_states(problem, result.value)
    for i in range(len(u)):
        arguments = oracle_arguments(layer, u[i])
        names = ("x", "delta_x", "b_x", "c_x", "A", "D", "Q")
        y, H = oracle.linear_recurrence(**{name: arguments[name] for name in names})
        np.testing.assert_allclose(to_numpy(result.value[i]), y, rtol=0, atol=1e-8)
        np.testing.assert_allclose(to_numpy(states[i]), H, rtol=0, atol=1e-8)
    terms = problem.terms(problem.previous(result.value))
    mixed = problem.mix(terms, result.value)
    _, last = selective_scan(mixed, terms.delta, problem.A, terms.b, terms.c, layer.D)
    torch.testing.assert_close(last, states[:, -1], rtol=0, atol=1e-12)


@gates
@pytest.mark.parametrize("switched", list(itertools.product([False, True], repeat=5)), ids=str)
def test_evaluate_is_the_oracles_at_every_dependence(switched: tuple[bool, ...], gate: str) -> None:
    dependence = Dependence(**dict(zip(SWITCHES, switched, strict=True)))
    layer = make_layer("H2", make_solver("picard"), dependence=dependence, gate=gate, norm="layer_norm")
    u, y = random(2, 5, 4), random(2, 5, 6, seed=1)
    f_y = layer.problem(u).evaluate(y)
    np.testing.assert_allclose(to_numpy(f_y), oracle_evaluate(layer, u, y), rtol=0, atol=1e-10)


@mixers
@norms
@pytest.mark.parametrize("conv_width", [0, 4])
@pytest.mark.parametrize("weight_norm", [False, True])
@pytest.mark.parametrize("dependence", [NOTHING, EVERYTHING], ids=["nothing", "everything"])
def test_evaluate_is_the_oracles_in_every_variant(
    mixer: str, norm: str, conv_width: int, weight_norm: bool, dependence: Dependence
) -> None:
    layer = make_layer(
        mixer,
        make_solver("picard"),
        dependence=dependence,
        norm=norm,
        conv_width=conv_width,
        weight_norm=weight_norm,
        contracting=False,
    )
    u, y = random(2, 5, 4), random(2, 5, 6, seed=1)
    f_y = layer.problem(u).evaluate(y)
    np.testing.assert_allclose(to_numpy(f_y), oracle_evaluate(layer, u, y), rtol=0, atol=1e-10)


@gates
@pytest.mark.parametrize("switched", list(itertools.product([False, True], repeat=5)), ids=str)
def test_the_token_map_is_the_whole_map(switched: tuple[bool, ...], gate: str) -> None:
    """Also where nothing converges, a swept token's residual is its residual under f of the whole sequence."""
    dependence = Dependence(**dict(zip(SWITCHES, switched, strict=True)))
    settings: dict[str, Any] = {"dependence": dependence, "gate": gate, "norm": "layer_norm", "contracting": False}
    layer = make_layer("H2", make_solver("sequential"), **settings)
    problem = layer.problem(random(2, 5, 4))
    for backend in ("reference", "cpu"):
        solver = Sequential(tolerance=1e-3, inner_max_iterations=5, backend=backend)
        result = solver.solve(problem, CAP, training=False)
        assert result.tokens is not None
        measured = token_residual(problem.evaluate(result.value), result.value)
        torch.testing.assert_close(measured, result.tokens.residual, rtol=1e-8, atol=1e-10)


@mixers
@gates
@norms
def test_solvers_agree_where_the_token_map_contracts(mixer: str, gate: str, norm: str) -> None:
    layer = make_layer(mixer, make_solver("picard"), dependence=EVERYTHING, gate=gate, norm=norm)
    problem = layer.problem(random(2, 6, 4))
    results = [make_solver(name).solve(problem, CAP, training=False) for name in ("picard", "sequential", "fused")]
    for result in results:
        assert (result.status == Status.CONVERGED).all()
        torch.testing.assert_close(problem.evaluate(result.value), result.value, rtol=0, atol=1e-10)
        torch.testing.assert_close(result.value, results[0].value, rtol=0, atol=1e-8)


@gates
@pytest.mark.parametrize("solver", ["sequential", "fused"])
def test_the_sweep_is_the_oracles(solver: str, gate: str) -> None:
    layer = make_layer("K-rows", make_solver(solver), dependence=EVERYTHING, gate=gate, norm="layer_norm")
    u = random(2, 6, 4)
    problem = layer.problem(u)
    result = layer.solver.solve(problem, CAP, training=False)
    states = all_states(problem, result.value)
    for i in range(len(u)):
        y, H = oracle.fp_mamba_sweep(**oracle_arguments(layer, u[i]), inner_iterations=100)
        np.testing.assert_allclose(to_numpy(result.value[i]), y, rtol=0, atol=1e-9)
        np.testing.assert_allclose(to_numpy(states[i]), H, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cap", [1, 3])
def test_picard_at_a_fixed_count_is_the_oracles(cap: int) -> None:
    """The iterate after cap - 1 updates, to which one_step applies f once more."""
    layer = make_layer("H2", Picard(tolerance=1e-3), dependence=EVERYTHING, norm="layer_norm", contracting=False)
    u = random(1, 6, 4)
    value = layer.solver.solve(layer.problem(u), Cap(cap, stop_early=False), training=True).value
    arguments = oracle_arguments(layer, u[0])
    expected, _ = oracle.fp_mamba_picard(lambda y: oracle.fp_mamba_evaluate(y, **arguments), (6, 6), cap - 1)
    np.testing.assert_allclose(to_numpy(value[0]), expected, rtol=0, atol=1e-9)


@solvers
@gates
@pytest.mark.parametrize("switched", [False, True])
def test_output(gate: str, switched: bool, solver: str) -> None:
    """W_out (silu(z_t + W_zs s*_t) * y*_t) with the gate outside, W_out y* with it inside."""
    dependence = EVERYTHING if switched else NOTHING
    layer = make_layer("H2", make_solver(solver), dependence=dependence, gate=gate, norm="layer_norm")
    u = random(2, 6, 4)
    output, (result,) = layer(u, CAP, None)
    y = to_numpy(result.value)
    if gate == "outside":
        z = (to_numpy(u) @ to_numpy(layer.in_projection.weight).T)[..., 6:]
        s = np.concatenate([np.zeros((2, 1, 6)), y[:, :-1]], axis=1)
        if switched:
            W_zs = to_numpy(layer.s_weight)[-6:]
            z = z + s @ W_zs.T
        y = oracle.silu(z) * y
    np.testing.assert_allclose(to_numpy(output), y @ to_numpy(layer.out_projection.weight).T, rtol=0, atol=1e-8)


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-rows", "K-spectral"])
@gates
@pytest.mark.parametrize("weight_norm", [False, True])
def test_one_step_gradient(mixer: str, gate: str, weight_norm: bool) -> None:
    """The gradient is that of f at a fixed y* (CASES.md 4): against central differences along random directions.

    Spectral K has the eigenvector as a constant, which is exact where the power iteration has converged.
    """
    settings: dict[str, Any] = {"gate": gate, "norm": "layer_norm", "conv_width": 4, "weight_norm": weight_norm}
    layer = make_layer(mixer, make_solver("sequential"), dependence=EVERYTHING, **settings)
    if isinstance(layer.channel_mixer, Kronecker):
        layer.channel_mixer.power_iterations = 2000
    u, weights = random(2, 4, 4), random(2, 4, 4, seed=1)
    output, (result,) = layer(u, CAP, None)
    solved = torch.autograd.grad((output * weights).sum(), list(layer.parameters()))

    layer.solver = Given(result.value)

    def loss() -> Tensor:
        return (layer(u, CAP, None)[0] * weights).sum()

    given = torch.autograd.grad(loss(), list(layer.parameters()))
    for (name, parameter), gradient, same in zip(layer.named_parameters(), solved, given, strict=True):
        torch.testing.assert_close(gradient, same, rtol=1e-11, atol=1e-13, msg=name)
        assert gradient.isfinite().all(), name
        assert gradient.abs().max() > 0, name
        direction = random(*parameter.shape, seed=2)
        expected = central_difference(loss, parameter, direction)
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-8), name


@torch.no_grad()
def central_difference(loss: Any, parameter: Tensor, direction: Tensor, step: float = 1e-6) -> float:
    parameter.add_(direction, alpha=step)
    above = loss().item()
    parameter.sub_(direction, alpha=2 * step)
    below = loss().item()
    parameter.add_(direction, alpha=step)
    return (above - below) / (2 * step)


def test_no_gradient_passes_through_the_solve() -> None:
    layer = make_layer("H2", make_solver("picard"), dependence=EVERYTHING, norm="layer_norm")
    value = random(2, 4, 6).requires_grad_()
    layer.solver = Given(value)
    layer(random(2, 4, 4), CAP, None)[0].sum().backward()
    assert value.grad is None


@pytest.mark.parametrize("model", ["fp_mamba_h", "fp_mamba_k", "fp_mamba_dplr"])
@pytest.mark.parametrize("solver", ["picard", "anderson", "lagged", "sequential"])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_every_parameter_of_the_built_model_learns(model: str, solver: str, weight_norm: bool) -> None:
    experiment = tiny(f"model={model}", f"solver={solver}", f"model.weight_norm={weight_norm}", "model.layers=2")
    batch = experiment.task.sample(4, 6, torch.Generator().manual_seed(0))
    logits = experiment.model(batch.inputs, Cap(10), batch.mask).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
    for name, parameter in experiment.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@gates
def test_selecting_rows_changes_nothing_else(gate: str) -> None:
    layer = make_layer("K-spectral", make_solver("picard"), dependence=EVERYTHING, gate=gate, norm="layer_norm")
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    state = State(y=random(4, 1, 6, seed=1), H=random(4, 6, 3, seed=2))
    whole = layer.problem(random(4, 5, 4), mask, state)
    rows, y = torch.tensor([3, 1]), random(4, 5, 6, seed=3)
    token = whole.token_problem(2, state)
    for problem, at in ((whole, y), (token, y[:, 2:3])):
        selected = problem.select(rows)
        torch.testing.assert_close(selected.evaluate(at[rows]), problem.evaluate(at)[rows], rtol=0, atol=1e-14)
        assert problem.mask is not None
        assert torch.equal(selected.mask, problem.mask[rows])
    torch.testing.assert_close(
        whole.advance(token.select(rows), y[rows, 2:3]).H, whole.advance(token, y[:, 2:3]).H[rows], rtol=0, atol=1e-14
    )


@solvers
@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
def test_a_bad_sequence_leaves_the_others_untouched(mixer: str, solver: str) -> None:
    """In evaluation, with a NaN in one sequence from its third token on."""
    layer = make_layer(mixer, make_solver(solver, 1e-6), dependence=EVERYTHING, norm="layer_norm").eval()
    u = random(4, 6, 4)
    expected, _ = layer(u, CAP, None)
    u[2, 3] = float("nan")
    output, (result,) = layer(u, CAP, None)
    others = [0, 1, 3]
    torch.testing.assert_close(output[others], expected[others], rtol=0, atol=1e-12)
    assert (result.status == Status.NON_FINITE).tolist() == [False, False, True, False]
    assert result.residual.isnan().tolist() == [False, False, True, False]
    if solver not in WHOLE_SEQUENCE:
        assert result.tokens is not None
        assert result.tokens.status[2, :3].tolist() == [Status.CONVERGED] * 3


@solvers
@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
def test_a_weight_that_is_nan_is_never_converged(mixer: str, solver: str) -> None:
    """Whichever parameter of the loop holds it, in its last entry."""
    words: dict[str, Any] = {"gate": "inside", "norm": "layer_norm", "conv_width": 4, "dependence": EVERYTHING}
    layer = make_layer(mixer, make_solver(solver, 1e-6), **words).eval()
    for name, parameter in layer.named_parameters():
        if name == "out_projection.weight":
            continue
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.flatten()[-1] = float("nan")
            _, (result,) = layer(random(2, 5, 4), CAP, None)
            parameter.copy_(kept)
        assert (result.status == Status.NON_FINITE).all(), name
        assert result.residual.isnan().all(), name


@solvers
def test_views_and_expanded_gradients_are_as_copies(solver: str) -> None:
    """CASES.md 12, for the layer: a transposed input, and the gradient of a sum."""
    layer = make_layer("K-spectral", make_solver(solver), dependence=EVERYTHING, norm="layer_norm", conv_width=4)
    plain = random(5, 2, 4).transpose(0, 1).contiguous().requires_grad_()
    view = plain.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    outputs = [layer(u, CAP, None)[0] for u in (plain, view)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
    outputs[0].backward(torch.ones_like(outputs[0]))
    outputs[1].sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(view.grad, plain.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("solver", "parts"),
    [
        ("sequential", [64, 66]),
        ("fused", [64, 66]),
        ("fused", [1, 129]),
        ("picard", [3, 5]),
        ("picard", [1] * 8),
        ("anderson", [3, 5]),
        ("lagged", [3, 5]),
    ],
)
def test_carrying_the_state(solver: str, parts: list[int]) -> None:
    """CASES.md 17, at a tight tolerance."""
    layer = make_layer("H2", make_solver(solver, 1e-8), dependence=EVERYTHING)
    u = random(1, sum(parts), 4)
    whole = layer.solver.solve(layer.problem(u), CAP, training=False).value
    values, state = [], None
    for part in u.split(parts, dim=1):
        problem = layer.problem(part, state=state)
        value = layer.solver.solve(problem, CAP, training=False).value
        state = State(y=value[:, -1:], H=all_states(problem, value)[:, -1])
        values.append(value)
    torch.testing.assert_close(torch.cat(values, dim=1), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_length(length: int, precision: str) -> None:
    """CASES.md 7, with a short convolution: f at the found value, and finite gradients."""
    solver = Sequential(tolerance=0.1, inner_max_iterations=10)
    layer = make_layer("H1", solver, dependence=EVERYTHING, norm="layer_norm", conv_width=4).float()
    u = random(1, length, 4, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        output, (result,) = layer(u, CAP, None)
        f_y = layer.problem(u).evaluate(result.value)
    output.square().sum().backward()
    expected = oracle_evaluate(layer, u, result.value)
    tolerance = 1e-4 if precision == "float32" else 2e-2
    np.testing.assert_allclose(to_numpy(f_y), expected, rtol=0, atol=tolerance * np.abs(expected).max())
    assert output.isfinite().all()
    for tensor in (u, *layer.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_softplus_at_its_extremes(dtype: torch.dtype) -> None:
    """CASES.md 10: Delta is about x or about 0, its gradient about sigmoid, and the scan takes it."""
    values = torch.tensor([0.0, *(sign * v for v in (10.0, 20.0, 88.0, 1e3, 3e4) for sign in (-1, 1))])
    before = values.repeat(2).reshape(1, -1, 1).expand(1, -1, 6).to(dtype).clone().requires_grad_()
    layer = make_layer("H1", make_solver("picard")).float()
    problem = layer.problem(random(1, before.shape[1], 4, dtype=torch.float32))
    others = problem.from_x[..., : -before.shape[-1]].to(dtype)
    problem = dataclasses.replace(problem, from_x=torch.cat([others, before], dim=-1))
    terms = problem.terms(torch.zeros_like(problem.x))
    assert terms.delta.dtype == torch.float32
    np.testing.assert_allclose(to_numpy(terms.delta), oracle.softplus(to_numpy(before)), rtol=1e-5, atol=1e-12)
    (gradient,) = torch.autograd.grad(terms.delta.sum(), before)
    expected = oracle.sigmoid(to_numpy(before))
    np.testing.assert_allclose(to_numpy(gradient), expected, rtol=2**-8, atol=1e-6)
    f_y = problem.evaluate(torch.zeros_like(problem.x))
    f_y.sum().backward()
    assert f_y.isfinite().all()
    assert before.grad is not None
    assert before.grad.isfinite().all()


def test_under_bfloat16_autocast_state_and_weights_stay_float32() -> None:
    """CASES.md 14."""
    layer = make_layer("H2", make_solver("sequential", 1e-3), dependence=EVERYTHING, norm="layer_norm").float()
    with torch.autocast("cpu", torch.bfloat16):
        output, (result,) = layer(random(2, 9, 4, dtype=torch.float32), CAP, None)
        problem = layer.problem(random(2, 9, 4, dtype=torch.float32))
        state = problem.initial_state()
        terms = problem.terms(torch.zeros_like(problem.x))
        for t in range(3):
            state = problem.advance(problem.token_problem(t, state), result.value[:, t : t + 1])
            assert state.H.dtype == torch.float32
    output.float().sum().backward()
    assert result.value.dtype == terms.delta.dtype == terms.b.dtype == problem.A.dtype == torch.float32
    for name, parameter in layer.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("mixer", ["H2", "DPLR2"])
def test_under_bfloat16_autocast_the_token_map_is_the_whole_map(mixer: str) -> None:
    """The projections are rounded alike; what follows them, the read-out H_t c_t too, is float32 in both."""
    layer = make_layer(mixer, make_solver("sequential"), dependence=EVERYTHING).float()
    state = State(y=random(2, 1, 6, seed=1, dtype=torch.float32), H=random(2, 6, 3, seed=2, dtype=torch.float32))
    y = random(2, 1, 6, seed=3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        problem = layer.problem(random(2, 1, 4, dtype=torch.float32), state=state)
        whole, token = problem.evaluate(y), problem.token_problem(0, state).evaluate(y)
    torch.testing.assert_close(token, whole, rtol=1e-5, atol=1e-5)


def test_weight_norm_is_the_same_function_class() -> None:
    """It starts at the same function, and a row's weight depends on its direction and magnitude only."""
    plain, normed = (
        make_layer("H2", make_solver("sequential"), dependence=EVERYTHING, norm="layer_norm", weight_norm=switch)
        for switch in (False, True)
    )
    u = random(2, 5, 4)
    expected = plain(u, CAP, None)[0]
    torch.testing.assert_close(normed(u, CAP, None)[0], expected)
    directions = (normed.x_projection.parametrizations.weight, normed.parametrizations.s_weight)
    with torch.no_grad():
        for direction in directions:
            direction.original1.mul_(3.0)
    torch.testing.assert_close(normed(u, CAP, None)[0], expected)
    with torch.no_grad():
        for direction, weight in zip(directions, (plain.x_projection.weight, plain.s_weight), strict=True):
            direction.original0.mul_(1.5)
            weight.mul_(1.5)
    changed = plain(u, CAP, None)[0]
    assert not torch.allclose(changed, expected)
    torch.testing.assert_close(normed(u, CAP, None)[0], changed)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("width", [1, 4])
def test_short_convolution(length: int, width: int) -> None:
    convolution = ShortConvolution(3, width).double()
    x = random(2, length, 3)
    kernel, bias = to_numpy(convolution.weight)[:, 0], to_numpy(convolution.bias)
    expected = np.stack([convolve(to_numpy(sequence), kernel, bias) for sequence in x])
    np.testing.assert_allclose(to_numpy(convolution(x)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("switch", [*SWITCHES, None])
@gates
def test_each_switch_has_its_own_weights(switch: str | None, gate: str) -> None:
    """W on s has rows for what depends on s, and no others."""
    overrides = [f"model.dependence.{name.rstrip('_')}={name == switch}" for name in SWITCHES]
    layer = tiny("model=fp_mamba_h", f"model.gate={gate}", *overrides).model.layers[0].layer
    rows = {"lambda_": 16, "Q": 2 * 16 + 2, "b": 4, "c": 4, "gate": 16, None: 0}
    assert layer.s_weight.shape[0] == rows[switch]
    assert sum(layer.columns.from_s) == (0 if switch == "gate" and gate == "outside" else rows[switch])


def test_initial_scale_of_the_projections() -> None:
    """W_x and W_s start as one linear layer over [x, s]: uniform within 1 / sqrt(2 width); biases at zero."""
    layer: FPMambaLayer = tiny("model=fp_mamba_h", "model.d_model=32").model.layers[0].layer
    bound = (2 * 64) ** -0.5
    for weight in (layer.x_projection.weight, layer.s_weight):
        assert weight.abs().max().item() <= bound
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not layer.mixer_bias.any()
    np.testing.assert_allclose(to_numpy(layer.A_log), np.log(np.arange(1, 5))[None].repeat(64, 0), atol=1e-6)
    assert (layer.D == 1).all()
