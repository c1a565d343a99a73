"""FP-Mamba's gradients: implicit against unrolling, a dense solve and finite differences (CASES.md 4)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import pytest
import torch
from helpers import EVERYTHING, make_layer, random, tiny, to_numpy
from torch import Tensor, nn

from fpexp.fixed_point import Cap, Gradient, Implicit, OneStep, Sequential, SolveResult, Status, Unrolled
from fpexp.models.fp_mamba import FPMambaLayer
from fpexp.models.fp_mamba_problem import State

CAP = Cap(1)
EXACT = Implicit(tolerance=1e-12, max_iterations=100, restart=20)

mixers = pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-rows", "K-spectral"])
gates = pytest.mark.parametrize("gate", ["outside", "inside"])


def layer_of(
    mixer: str, gate: str = "outside", *, contracting: bool = True, gradient: Gradient = EXACT
) -> FPMambaLayer:
    return make_layer(
        mixer,
        Sequential(tolerance=1e-10, inner_max_iterations=1000),
        gradient=gradient,
        dependence=EVERYTHING,
        gate=gate,
        norm="layer_norm",
        conv_width=4,
        contracting=contracting,
    )


def gradients(layer: FPMambaLayer, gradient: Gradient, u: Tensor) -> list[Tensor]:
    layer.gradient = gradient
    return weighted(layer, u, random(*u.shape, seed=1))


def weighted(layer: FPMambaLayer, u: Tensor, weights: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """The gradients of sum(weights * output) in the parameters."""
    output, _ = layer(u, CAP, mask)
    return list(torch.autograd.grad((output * weights).sum(), list(layer.parameters())))


class Iterated:
    """Autograd through `steps` evaluations from zero, solver and all."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def attach(self, problem: object, result: SolveResult) -> tuple[Tensor, SolveResult]:
        y = problem.start()  # type: ignore[attr-defined]
        for _ in range(self.steps):
            y = problem.evaluate(y)  # type: ignore[attr-defined]
        return y, result


@mixers
@gates
def test_implicit_is_autograd_through_two_hundred_steps(mixer: str, gate: str) -> None:
    layer, u = layer_of(mixer, gate), random(2, 5, 4)
    found = gradients(layer, EXACT, u)
    for other in (Unrolled(steps=200), Iterated(200)):
        for (name, _), a, b in zip(layer.named_parameters(), found, gradients(layer, other, u), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8, msg=name)
    one = gradients(layer, OneStep(), u)
    assert any((a - b).abs().max() > 1e-3 * b.abs().max() for a, b in zip(one, found, strict=True))


@gates
@pytest.mark.parametrize("mixer", ["H2", "K-rows"])
def test_implicit_is_the_derivative_of_the_loss(mixer: str, gate: str) -> None:
    """Central differences of the whole layer, solver and all, along a random direction of each parameter."""
    layer, u = layer_of(mixer, gate), random(2, 5, 4)
    layer.solver = Sequential(tolerance=1e-14, inner_max_iterations=300)
    weights = random(2, 5, 4, seed=1)
    for (name, parameter), gradient in zip(layer.named_parameters(), gradients(layer, EXACT, u), strict=True):
        direction = random(*parameter.shape, seed=2)
        expected = central_difference(lambda: (layer(u, CAP, None)[0] * weights).sum(), parameter, direction)
        assert (gradient * direction).sum().item() == pytest.approx(expected, rel=1e-5, abs=1e-8), name


@torch.no_grad()
def central_difference(loss: Callable[[], Tensor], parameter: Tensor, direction: Tensor, step: float = 1e-6) -> float:
    parameter.add_(direction, alpha=step)
    above = loss().item()
    parameter.sub_(direction, alpha=2 * step)
    below = loss().item()
    parameter.add_(direction, alpha=step)
    return (above - below) / (2 * step)


@mixers
@gates
def test_where_nothing_contracts_it_is_the_dense_solve(mixer: str, gate: str) -> None:
    """v = (I - J)^-T g at any y at all, by the whole Jacobian of f; a_max = 2, D about 1."""
    layer = layer_of(mixer, gate, contracting=False)
    problem, y = layer.problem(random(1, 4, 4)), random(1, 4, 6, seed=3)
    jacobian = torch.autograd.functional.jacobian(problem.evaluate, y).reshape(24, 24)
    assert torch.linalg.eigvals(jacobian).abs().max() > 1.2
    g = random(1, 4, 6, seed=4)
    v = torch.from_numpy(oracle.implicit_gradient(to_numpy(jacobian), to_numpy(g)))
    inputs = [parameter for name, parameter in layer.named_parameters() if not name.startswith("out_projection")]
    expected = torch.autograd.grad(problem.evaluate(y), inputs, v, retain_graph=True, allow_unused=True)
    output, result = EXACT.attach(problem, SolveResult(y, *[torch.zeros(1)] * 3))
    found = torch.autograd.grad(output, inputs, g, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)
    assert result.backward is not None
    assert torch.cat(result.backward.residual).max() < 1e-10


def test_a_padded_sequence_is_as_one_alone() -> None:
    layer, u, weights = layer_of("H2"), random(2, 6, 4), random(2, 6, 4, seed=1)
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    together = weighted(layer, u, weights * mask[..., None], mask)
    first, second = weighted(layer, u[:1], weights[:1]), weighted(layer, u[1:, :3], weights[1:, :3])
    for (name, _), both, a, b in zip(layer.named_parameters(), together, first, second, strict=True):
        torch.testing.assert_close(both, a + b, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("mask", [False, True])
def test_the_split_tokens_are_those_of_the_whole(mask: bool) -> None:
    layer = layer_of("H2", "inside")
    problem = layer.problem(random(2, 4, 4), torch.ones(2, 4, dtype=torch.bool) if mask else None)
    state = State(y=random(2, 1, 6, seed=1), H=random(2, 6, 3, seed=2))
    y = random(2, 1, 6, seed=3)
    tokens = problem.split()
    assert len(tokens) == 4
    for t, single in enumerate(tokens):
        token, expected = single.token_problem(0, state), problem.token_problem(t, state)
        assert torch.equal(token.evaluate(y), expected.evaluate(y))
        assert torch.equal(single.advance(token, y).H, problem.advance(expected, y).H)
        assert (token.mask is not None) == mask


@pytest.mark.parametrize("model", ["fp_mamba_h", "fp_mamba_k", "fp_mamba_dplr"])
@pytest.mark.parametrize("gradient", ["implicit", "unrolled"])
@pytest.mark.parametrize("solver", ["picard", "sequential"])
def test_every_parameter_of_the_built_model_learns(model: str, gradient: str, solver: str) -> None:
    words = [f"model={model}", f"gradient={gradient}", f"solver={solver}", "model.weight_norm=true", "model.layers=2"]
    experiment = tiny(*words)
    batch = experiment.task.sample(4, 6, torch.Generator().manual_seed(0))
    output = experiment.model(batch.inputs, Cap(10), batch.mask)
    nn.functional.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten()).backward()
    for name, parameter in experiment.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    assert len(output.solves) == 2
    for solve in output.solves:
        assert (solve.backward is not None) == (gradient == "implicit")
        if solve.backward is not None:
            assert sum(map(len, solve.backward.iterations)) == 4 * 6


def test_evaluation_has_no_record_and_the_same_values() -> None:
    layer, u = layer_of("K-spectral"), random(2, 5, 4)
    with torch.no_grad():
        output, (result,) = layer(u, CAP, None)
        layer.gradient = OneStep()
        assert torch.equal(output, layer(u, CAP, None)[0])
    assert result.backward is None
    assert (result.status == Status.CONVERGED).all()


def test_under_autocast_the_equations_are_solved_in_float32() -> None:
    """The backward pass too may run inside autocast."""
    experiment = tiny("model=fp_mamba_k", "gradient=implicit", "gradient.tolerance=1e-5")
    inputs = torch.randint(12, (3, 5), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = experiment.model(inputs, Cap(10))
        output.logits.float().logsumexp(-1).sum().backward()
    (solve,) = output.solves
    assert solve.backward is not None
    residual = torch.cat(solve.backward.residual)
    assert residual.dtype == torch.float32
    assert residual.max() < 1e-4
    for name, parameter in experiment.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name


def test_the_oracle_agrees_on_one_token() -> None:
    """By the oracle's own map: the Jacobian of a token by central differences in numpy."""
    from helpers import oracle_arguments

    layer, u = layer_of("H2"), random(1, 1, 4)
    y, g = random(1, 1, 6, seed=3), random(1, 1, 6, seed=4)
    arguments = oracle_arguments(layer, u[0])

    def f(point: np.ndarray) -> np.ndarray:
        return oracle.fp_mamba_evaluate(point.reshape(1, 6), **arguments)[0].ravel()

    at, step = to_numpy(y).ravel(), 1e-6
    columns = [(f(at + step * e) - f(at - step * e)) / (2 * step) for e in np.eye(6)]
    expected = oracle.implicit_gradient(np.stack(columns, axis=1), to_numpy(g))
    bias = layer.norm.bias if layer.norm is not None else None
    assert bias is not None
    output, _ = EXACT.attach(layer.problem(u), SolveResult(y, *[torch.zeros(1)] * 3))
    (in_bias,) = torch.autograd.grad(output, bias, g)
    np.testing.assert_allclose(to_numpy(in_bias), expected.ravel(), rtol=1e-6, atol=1e-8)
