"""Triton's sweep against the solver's own loop over tokens: same iterates, counts, residuals, statuses and states.

Without a GPU Triton's interpreter runs it, on the CPU, some 30 ms a token: hence few tokens and tiny widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, LENGTHS, MIXERS, make_layer, random, tiny
from torch import Tensor
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Sequential, SolveResult, Status
from fpexp.models.fp_mamba import FPMambaLayer
from fpexp.models.fp_mamba_layer import Dependence
from fpexp.models.fp_mamba_problem import FPMambaProblem
from fpexp.ops.backend import only_reference

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Room for results is full of NaN, so that a number that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def solve(problem: FPMambaProblem, backend: str = "triton", **settings: Any) -> tuple[SolveResult, Tensor]:
    """The result and the last H."""
    solver = Sequential(**{"tolerance": 1e-6, "backend": backend, **settings})
    result, state = solver._sweep(problem)
    return result, state.H


def assert_same(problem: FPMambaProblem, **settings: Any) -> SolveResult:
    """Compare token by token; a map that does not contract amplifies rounding, so settings there are loose."""
    (expected, right), (found, H) = solve(problem, "reference", **settings), solve(problem, **settings)
    assert expected.tokens is not None
    assert found.tokens is not None
    assert torch.equal(found.tokens.iterations, expected.tokens.iterations)
    assert torch.equal(found.tokens.status, expected.tokens.status)
    assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9)
    assert_close(found.tokens.residual, expected.tokens.residual, rtol=1e-5, atol=1e-9, equal_nan=True)
    if problem.mask is None:
        assert_close(H, right, rtol=1e-9, atol=1e-9, equal_nan=True)
    return found


def problem_of(layer: FPMambaLayer, batch: int = 3, length: int = 4, **arguments: Any) -> FPMambaProblem:
    u = random(batch, length, 4, dtype=layer.D.dtype).to(DEVICE)
    with torch.no_grad():
        return layer.to(DEVICE).problem(u, **arguments)


def layer_of(mixer: str | ChannelMixer, **arguments: Any) -> FPMambaLayer:
    return make_layer(mixer, Sequential(tolerance=0.1), **{"dependence": EVERYTHING, **arguments})


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize(("gate", "norm"), [("outside", "none"), ("inside", "layer_norm")])
def test_every_mixer_gate_and_norm(mixer: str, gate: str, norm: str) -> None:
    found = assert_same(problem_of(layer_of(mixer, gate=gate, norm=norm)))
    assert (found.status == Status.CONVERGED).all()


@pytest.mark.parametrize("off", ["lambda_", "Q", "b", "c", "gate", None])
def test_dependences_that_are_off(off: str | None) -> None:
    dependence = dataclasses.replace(EVERYTHING, **{off: False}) if off else Dependence(*[False] * 5)
    assert_same(problem_of(layer_of("H1", dependence=dependence, gate="inside"), batch=1, length=3))


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    layer = layer_of(Householder(2, rank=1, a_max=0.5), state_size=1)
    assert_same(problem_of(layer, batch=1, length=length), tolerance=1e-2)


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-spectral"])
def test_where_the_map_does_not_contract(mixer: str) -> None:
    """Damping, patience and the cap are part of the answer there."""
    problem = problem_of(layer_of(mixer, norm="layer_norm", contracting=False), length=3)
    found = assert_same(problem, tolerance=1e-3, patience=2, damping=0.9, inner_max_iterations=9)
    assert (found.status == Status.CAP_REACHED).any()


def test_absolute_tolerance() -> None:
    problem = problem_of(layer_of("H1"))
    relative, absolute = assert_same(problem), assert_same(problem, tolerance_kind="absolute")
    assert not torch.equal(relative.tokens.iterations, absolute.tokens.iterations)  # type: ignore[union-attr]


def test_padding_is_not_solved() -> None:
    mask = (torch.arange(4) < torch.tensor([[4], [2], [1]])).to(DEVICE)
    layer = layer_of("H2")
    problem = problem_of(layer, mask=mask)
    found = assert_same(problem)
    assert (found.tokens.iterations[~mask] == 1).all()  # type: ignore[union-attr]
    assert (found.value[~mask] == 0).all()
    alone = dataclasses.replace(problem._map(lambda tensor: tensor[1:2, :2], problem.state), mask=None)
    alone = dataclasses.replace(alone, state=problem.select(torch.tensor([1], device=DEVICE)).state)
    assert_close(solve(problem)[1][1:2], solve(alone)[1], rtol=1e-12, atol=1e-12)  # the state after the last real token


def test_carried_state_and_strides() -> None:
    """The second part of a sequence, from views that are not contiguous."""
    problem = problem_of(layer_of("DPLR2"))
    state = problem.initial_state()
    whole, H = solve(problem)
    for t in range(2):
        token = problem.token_problem(t, state)
        state = problem.advance(token, whole.value[:, t : t + 1])
    rest = problem._map(lambda tensor: tensor[:, 2:].mT.contiguous().mT, state)
    rest = dataclasses.replace(rest, A=rest.A.T.contiguous().T, loop_weight=rest.loop_weight.T.contiguous().T)
    assert not rest.x.is_contiguous()
    assert_close(assert_same(rest).value, whole.value[:, 2:], rtol=1e-5, atol=1e-5)
    assert_close(solve(rest)[1], H, rtol=1e-5, atol=1e-5)


def test_what_is_padding_is_not_looked_at() -> None:
    mask = (torch.arange(3) < torch.tensor([[3], [1]])).to(DEVICE)
    problem = problem_of(layer_of("DPLR2", norm="layer_norm"), batch=2, length=3, mask=mask)
    bad = {name: getattr(problem, name).masked_fill(~mask[..., None], float("nan")) for name in ("x", "from_x")}
    (clean, H), (found, H_found) = solve(problem), solve(dataclasses.replace(problem, **bad))
    assert torch.equal(found.value, clean.value)
    assert torch.equal(H_found, H)


def test_one_channel_that_is_not_finite() -> None:
    """Delta of one channel is NaN, without a norm that would spread it."""
    problem = problem_of(layer_of("H1"))
    from_x = problem.from_x.clone()
    from_x[2, 1, -1] = float("nan")
    found = assert_same(dataclasses.replace(problem, from_x=from_x))
    assert found.status.tolist() == [Status.CONVERGED, Status.CONVERGED, Status.NON_FINITE]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sequence(bad: float) -> None:
    problem = problem_of(layer_of("H2", norm="layer_norm"))
    x = problem.x.clone()
    x[1, 2] = bad
    found = assert_same(dataclasses.replace(problem, x=x))
    assert found.status.tolist() == [Status.CONVERGED, Status.NON_FINITE, Status.CONVERGED]
    clean = solve(problem)[0]
    assert torch.equal(found.value[[0, 2]], clean.value[[0, 2]])


def test_divergence() -> None:
    problem = problem_of(layer_of("H2"), length=3)
    found = assert_same(problem, divergence_limit=0.05, tolerance=1e-12)
    assert (found.status == Status.DIVERGED).any()


@pytest.mark.parametrize("mixer", ["H1", "K-rows"])
def test_an_easy_sequence_beside_a_hard_one(mixer: str) -> None:
    """To the bit the same as alone, whatever its place in a program (CASES.md 6)."""
    problem = problem_of(layer_of(mixer, norm="layer_norm", contracting=False).float(), batch=6, length=3)
    settings = {"tolerance": 1e-2, "inner_max_iterations": 12}
    together, H = solve(problem, **settings)
    for i in (0, 5):
        alone, H_alone = solve(problem.select(torch.tensor([i], device=DEVICE)), **settings)
        assert torch.equal(alone.value[0], together.value[i])
        assert torch.equal(H_alone[0], H[i])


WIDE = [
    Kronecker(128, a_max=0.5, normalise="spectral", power_iterations=3),
    Kronecker(272, a_max=0.5, normalise="rows"),
    Householder(40, rank=17, a_max=0.5),
    DPLR(300, rank=3, a_max=0.5),
    Householder(1, rank=1, a_max=0.5),
]
"""States in registers and in memory, an odd number of power iterations, lanes that are not there."""


@pytest.mark.parametrize("padded", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize("mixer", WIDE, ids=lambda mixer: f"{type(mixer).__name__}-{mixer.width}")
def test_widths_and_programs(mixer: ChannelMixer, padded: bool) -> None:
    """Five sequences are a full program and one of one sequence; with a mask each ends elsewhere."""
    layer = layer_of(mixer, gate="inside", state_size=17)
    mask = (torch.arange(2) < torch.tensor([2, 1, 2, 2, 1])[:, None]).to(DEVICE) if padded else None
    assert_same(problem_of(layer, batch=5, length=2, mask=mask), tolerance=1e-4)


def test_extreme_steps() -> None:
    """Delta before the softplus from -3e4 to 3e4: decays of 1 and of 0 beside each other (CASES.md 9, 10)."""
    problem = problem_of(layer_of("H2", norm="layer_norm"), batch=1, length=6)
    extremes = torch.tensor([0.0, 20, -88, 1e3, -3e4, 3e4], dtype=torch.float64, device=DEVICE)
    before = problem.columns.sizes[0] + 2 * problem.columns.sizes[1]
    delta = extremes[None, :, None] * torch.tensor([1.0, 0, 1, 1, 0, 1], device=DEVICE)
    from_x = torch.cat([problem.from_x[..., :before], delta.double()], dim=-1)
    weight = problem.loop_weight.clone()
    weight[-6:] = 0
    found = assert_same(dataclasses.replace(problem, from_x=from_x, loop_weight=weight), inner_max_iterations=20)
    assert found.value.isfinite().all()


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-spectral", "K-rows"])
def test_float32(mixer: str) -> None:
    problem = problem_of(layer_of(mixer, norm="layer_norm"))
    exact = solve(problem, "reference", tolerance=1e-4)
    single = problem_of(layer_of(mixer, norm="layer_norm").float())
    found = solve(single, tolerance=1e-4)
    assert found[0].value.dtype == found[1].dtype == torch.float32
    assert_close(found[0].value.double(), exact[0].value, rtol=1e-4, atol=1e-4)
    assert_close(found[1].double(), exact[1], rtol=1e-4, atol=1e-5)


def test_narrow_projections() -> None:
    """As under autocast on a GPU: what x contributes and the weights in bfloat16, x and the states in float32."""
    problem = problem_of(layer_of("K-rows", norm="layer_norm").float())
    narrow = {"from_x": problem.from_x.bfloat16(), "loop_weight": problem.loop_weight.bfloat16()}
    found, H = solve(dataclasses.replace(problem, **narrow), tolerance=1e-3)
    expected, right = solve(problem, "reference", tolerance=1e-3)
    assert found.value.dtype == H.dtype == torch.float32
    assert_close(found.value, expected.value, rtol=2e-2, atol=2e-2)
    assert_close(H, right, rtol=2e-2, atol=2e-2)


MODELS = ["fp_mamba_k", "fp_mamba_h", "fp_mamba_dplr", "fp_mamba2_h"]


@pytest.mark.parametrize("model", MODELS)
def test_a_whole_model(model: str) -> None:
    """Outputs and one-step gradients; FP-Mamba-2 has a Delta and a decay for each head, and an RMSNorm."""
    results = []
    for backend in ("reference", "triton"):
        built = tiny(f"model={model}", "solver=sequential", f"solver.backend={backend}", "solver.tolerance=1e-4")
        built.model.to(DEVICE)
        tokens = torch.arange(2 * 4, device=DEVICE).view(2, 4) * 5 % 12
        with only_reference():
            logits = built.model(tokens, cap=Cap(1)).logits
        logits.square().sum().backward()
        gradients = {name: p.grad for name, p in built.model.named_parameters() if p.grad is not None}
        results.append({"logits": logits.detach(), **gradients})
    expected, found = results
    assert expected.keys() == found.keys()
    for name, right in expected.items():
        assert (found[name] - right).abs().max() <= 1e-4 * right.abs().max(), name


def test_what_no_kernel_knows() -> None:
    """Asked for, it is one line; a factor of 257 rows is more than a program can hold."""

    class Unknown(Householder):
        form = None

    for mixer in (Unknown(6, rank=1, a_max=0.5), Kronecker(514, a_max=0.5, normalise="rows")):
        with pytest.raises(UserError, match=r"solver\.backend=triton: no fused sweep"):
            solve(problem_of(layer_of(mixer), batch=1, length=1))
    of_vectors = tiny("model=fp_rnn_h", "solver=sequential", "solver.backend=triton").model.to(DEVICE)
    with pytest.raises(UserError, match="vector_sweep has no such backend"):
        of_vectors(torch.zeros(1, 2, dtype=torch.long, device=DEVICE), cap=Cap(1))
