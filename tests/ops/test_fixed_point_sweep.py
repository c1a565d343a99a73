"""The fused sweep against the solver's own loop over tokens: same iterates, counts, residuals and statuses."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers import EVERYTHING, LENGTHS, MIXERS, make_layer, random
from torch import Tensor
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Sequential, SolveResult, Status
from fpexp.fixed_point.iterate import token_residual
from fpexp.models.fp_mamba import FPMambaLayer
from fpexp.models.fp_mamba_layer import Dependence
from fpexp.models.fp_mamba_problem import FPMambaProblem
from fpexp.ops.fixed_point_sweep import sweep

SWITCHES = [Dependence(*on) for on in itertools.product([False, True], repeat=5)]


def solve(problem: FPMambaProblem, backend: str, **settings: object) -> SolveResult:
    solver = Sequential(**{"tolerance": 1e-6, "backend": backend, **settings})  # type: ignore[arg-type]
    return solver.solve(problem, Cap(1), training=False)


def assert_same(problem: FPMambaProblem, **settings: object) -> SolveResult:
    """Compare token by token; a map that does not contract amplifies rounding, so settings there are loose."""
    expected, found = solve(problem, "reference", **settings), solve(problem, "cpu", **settings)
    assert expected.tokens is not None
    assert found.tokens is not None
    assert torch.equal(found.tokens.iterations, expected.tokens.iterations)
    assert torch.equal(found.tokens.status, expected.tokens.status)
    assert_close(found.value, expected.value, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert_close(found.tokens.residual, expected.tokens.residual, rtol=1e-5, atol=1e-9, equal_nan=True)
    return found


def problem_of(layer: FPMambaLayer, batch: int = 3, length: int = 9, **arguments: object) -> FPMambaProblem:
    with torch.no_grad():
        return layer.problem(random(batch, length, 4), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("norm", ["layer_norm", "none"])
def test_every_mixer_gate_and_norm(mixer: str, gate: str, norm: str) -> None:
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, gate=gate, norm=norm)
    found = assert_same(problem_of(layer))
    assert (found.status == Status.CONVERGED).all()


@pytest.mark.parametrize("dependence", SWITCHES, ids=str)
@pytest.mark.parametrize("gate", ["outside", "inside"])
def test_every_dependence(dependence: Dependence, gate: str) -> None:
    assert_same(problem_of(make_layer("H2", Sequential(tolerance=0.1), dependence=dependence, gate=gate)))


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    layer = make_layer("K-spectral", Sequential(tolerance=0.1), dependence=EVERYTHING)
    assert_same(problem_of(layer, batch=2, length=length))


@pytest.mark.parametrize("mixer", MIXERS)
def test_where_the_map_does_not_contract(mixer: str) -> None:
    """Damping, patience and the cap are part of the answer there."""
    layer = make_layer(mixer, Sequential(tolerance=0.1), norm="layer_norm", contracting=False)
    found = assert_same(problem_of(layer, length=4), tolerance=1e-3, patience=3, inner_max_iterations=30)
    assert (found.tokens.iterations > 3).any()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "option",
    [
        {"tolerance": 1e-1},
        {"inner_max_iterations": 5},
        {"damping": 0.7},
        {"damping_decay": 0.5},
        {"patience": 8},
        {"divergence_limit": 1.0},
    ],
    ids=lambda value: next(iter(value)),
)
def test_every_option_changes_what_it_says(option: dict[str, float]) -> None:
    """CASES.md 3, in the kernel as in the loop."""
    layer = make_layer("H2", Sequential(tolerance=0.1), norm="layer_norm", contracting=False)
    problem, usual = problem_of(layer, length=3), {"tolerance": 1e-3, "patience": 2, "inner_max_iterations": 20}
    found, other = assert_same(problem, **usual), assert_same(problem, **usual | option)
    assert not torch.equal(found.tokens.iterations, other.tokens.iterations)  # type: ignore[union-attr]


def test_absolute_tolerance() -> None:
    layer = make_layer("H1", Sequential(tolerance=0.1))
    problem = problem_of(layer)
    relative, absolute = assert_same(problem), assert_same(problem, tolerance_kind="absolute")
    assert not torch.equal(relative.tokens.iterations, absolute.tokens.iterations)  # type: ignore[union-attr]


def test_padding_is_not_solved() -> None:
    mask = torch.arange(9) < torch.tensor([[9], [4], [1]])
    found = assert_same(problem_of(make_layer("H2", Sequential(tolerance=0.1)), mask=mask))
    assert (found.tokens.iterations[~mask] == 1).all()  # type: ignore[union-attr]
    assert (found.value[~mask] == 0).all()


def test_carried_state() -> None:
    layer = make_layer("DPLR2", Sequential(tolerance=0.1), dependence=EVERYTHING)
    problem = problem_of(layer)
    state = problem.initial_state()
    for t in range(4):
        token = problem.token_problem(t, state)
        state = problem.advance(token, solve(problem, "reference").value[:, t : t + 1])
    rest = problem._map(lambda tensor: tensor[:, 4:], state)
    assert_close(assert_same(rest).value, solve(problem, "cpu").value[:, 4:], rtol=1e-5, atol=1e-5)


def test_strided_views_are_as_contiguous_copies() -> None:
    """CASES.md 12."""
    problem = problem_of(make_layer("DPLR2", Sequential(tolerance=0.1), dependence=EVERYTHING), batch=5)
    state = problem.initial_state()
    state = dataclasses.replace(state, H=random(*state.H.shape, seed=1).mT.contiguous().mT)
    views = problem._map(lambda tensor: tensor.mT.contiguous().mT, state)
    views = dataclasses.replace(views, A=views.A.T.contiguous().T, loop_weight=views.loop_weight.T.contiguous().T)
    assert not any(t.is_contiguous() for t in (views.x, views.from_x, views.A, views.loop_weight, views.state.H))
    plain = dataclasses.replace(problem, state=dataclasses.replace(state, H=state.H.contiguous()))
    assert torch.equal(assert_same(views).value, assert_same(plain).value)


def test_nan_stays_in_its_sequence() -> None:
    problem = problem_of(make_layer("H2", Sequential(tolerance=0.1), norm="layer_norm"))
    x = problem.x.clone()
    x[1, 3] = float("nan")
    found = assert_same(dataclasses.replace(problem, x=x))
    clean = solve(problem, "cpu")
    assert found.status.tolist() == [Status.CONVERGED, Status.NON_FINITE, Status.CONVERGED]
    assert torch.equal(found.value[[0, 2]], clean.value[[0, 2]])


def test_divergence() -> None:
    problem = problem_of(make_layer("H2", Sequential(tolerance=0.1)), length=3)
    found = assert_same(problem, divergence_limit=0.05, tolerance=1e-12)
    assert (found.status == Status.DIVERGED).any()


WIDE = [
    Kronecker(128, a_max=0.5, normalise="spectral"),
    Kronecker(272, a_max=0.5, normalise="rows"),
    Householder(40, rank=17, a_max=0.5),
    DPLR(128, rank=3, a_max=0.5),
    Householder(1, rank=1, a_max=0.5),
]
"""Rows of one, of several and of broken registers; more reflections than lanes."""


@pytest.mark.parametrize("padded", [False, True], ids=["real", "padded"])
@pytest.mark.parametrize("mixer", WIDE, ids=lambda mixer: f"{type(mixer).__name__}-{mixer.width}")
def test_widths_and_groups(mixer: ChannelMixer, padded: bool) -> None:
    """Nine sequences are two full groups and one of one sequence; with a mask each ends elsewhere."""
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, gate="inside", state_size=17)
    mask = torch.arange(5) < torch.tensor([5, 1, 4, 5, 2, 3, 5, 5, 2])[:, None] if padded else None
    assert_same(problem_of(layer, batch=9, length=5, mask=mask))


@pytest.mark.parametrize("mixer", ["H2", "K-spectral"])
def test_threads_and_neighbours_change_nothing(mixer: str) -> None:
    """To the bit: each sequence is the same alone, in a batch, and on any number of threads."""
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, state_size=16).float()
    with torch.no_grad():
        u = random(1030, 40, 4, dtype=torch.float32)
        together, alone = layer.problem(u), layer.problem(u[7:8])
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(solve(together, "cpu", tolerance=1e-3).value)
    torch.set_num_threads(before)
    assert torch.equal(*found)
    single = dataclasses.replace(alone, from_x=together.from_x[7:8], x=together.x[7:8])
    assert torch.equal(solve(single, "cpu", tolerance=1e-3).value[0], found[0][7])


def test_extreme_steps() -> None:
    """Delta before the softplus from -3e4 to 3e4: decays of 1 and of 0 beside each other (CASES.md 9, 10)."""
    layer = make_layer("H2", Sequential(tolerance=0.1), dependence=EVERYTHING, norm="layer_norm")
    problem = problem_of(layer, batch=2, length=12)
    extremes = torch.tensor([0.0, 10, -10, 20, -20, 88, -88, 1e3, -1e3, 3e4, -3e4, 0], dtype=torch.float64)
    before = problem.columns.sizes[0] + 2 * problem.columns.sizes[1]
    delta = (extremes[:, None] * torch.tensor([1.0, 0, 1, 1, 0, 1])).expand(2, -1, -1)
    from_x = torch.cat([problem.from_x[..., :before], delta], dim=-1)
    weight = problem.loop_weight.clone()
    weight[-6:] = 0
    found = assert_same(dataclasses.replace(problem, from_x=from_x, loop_weight=weight), inner_max_iterations=30)
    assert found.value.isfinite().all()


def test_a_mixer_that_changes_another_is_not_taken_for_it() -> None:
    """A subclass may mean another Q: the kernel of its parent must not be used."""

    class Half(Householder):
        def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
            return 0.5 * super().apply(factors, v)

    problem = problem_of(make_layer(Half(6, rank=1, a_max=0.5), Sequential(tolerance=0.1)))
    assert problem.channel_mixer.form is None
    assert torch.equal(solve(problem, "auto").value, solve(problem, "reference").value)


def test_a_form_that_does_not_fit_is_refused() -> None:
    """Kernels do not look where they read."""
    problem = problem_of(make_layer("H1", Sequential(tolerance=0.1)))
    with pytest.raises(ValueError, match="21 coefficients"):
        solve(dataclasses.replace(problem, channel_mixer=DPLR(6, rank=3, a_max=1.0)), "cpu")
    with pytest.raises(ValueError, match="do not fit"):
        solve(dataclasses.replace(problem, from_x=problem.from_x[..., 1:]), "cpu")
    terms = dataclasses.replace(problem._fused_terms(), mask=torch.ones(problem.x.shape[:2], dtype=torch.bool))
    terms.check()
    for name in ("A", "D", "y", "H", "mask"):
        short = dataclasses.replace(terms, **{name: getattr(terms, name)[:-1]})
        with pytest.raises(ValueError, match=f"FP-Mamba: {name} is"):
            sweep(short, problem.form, Sequential(tolerance=0.1)._sweep_settings(), "cpu")


def test_under_autocast_the_residual_is_that_of_the_evaluation() -> None:
    layer = make_layer("K-spectral", Sequential(tolerance=1e-4), dependence=EVERYTHING).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        problem = layer.problem(random(3, 9, 4, dtype=torch.float32))
        found = solve(problem, "cpu", tolerance=1e-4)
        measured = token_residual(problem.evaluate(found.value), found.value)
    assert found.tokens is not None
    assert_close(found.tokens.residual, measured, rtol=0.05, atol=2e-6)


def test_float32_and_repeats() -> None:
    layer = make_layer("K-rows", Sequential(tolerance=0.1)).float()
    with torch.no_grad():
        problem = layer.problem(random(3, 9, 4, dtype=torch.float32))
    found = solve(problem, "cpu", tolerance=1e-4)
    assert_close(found.value, solve(problem, "reference", tolerance=1e-4).value, rtol=1e-3, atol=1e-4)
    assert torch.equal(found.value, solve(problem, "cpu", tolerance=1e-4).value)


def test_a_mixer_without_kernel() -> None:
    """`auto` takes the plain sweep; asking for the kernel is an error."""

    class Unknown(Householder):
        form = None

    layer = make_layer("H1", Sequential(tolerance=0.1))
    layer.channel_mixer = Unknown(6, rank=1, a_max=0.5)
    problem = problem_of(layer)
    assert torch.equal(solve(problem, "auto").value, solve(problem, "reference").value)
    with pytest.raises(UserError, match=r"solver\.backend=cpu"):
        solve(problem, "cpu")
