"""The fused part of an evaluation inside a token against plain torch, forward and backward."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from helpers import EVERYTHING, MIXERS, make_layer, random
from torch import Tensor
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, Householder, Kronecker
from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Cap, Gradient, Implicit, OneStep, Sequential, Unrolled
from fpexp.models.fp_mamba_layer import Dependence
from fpexp.models.fp_mamba_problem import FPMambaProblem
from fpexp.ops.mixers import KnownTokens, MixedTokens
from fpexp.ops.token_mixing import mix_tokens


@dataclasses.dataclass
class Case:
    """A float64 problem with leaves that gradients are asked for; the kernel computes in `dtype`."""

    problem: FPMambaProblem
    y: Tensor
    leaves: list[Tensor]
    dtype: torch.dtype = torch.float64

    @classmethod
    def of(cls, problem: FPMambaProblem, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Case:
        from_x, x, weight, y = (
            tensor.detach().to(dtype).double().requires_grad_()
            for tensor in (scale * problem.from_x, problem.x, problem.loop_weight, random(*problem.x.shape, seed=9))
        )
        problem = dataclasses.replace(problem, from_x=from_x, x=x, loop_weight=weight)
        return cls(problem, y, [from_x, x, y] + ([weight] if weight.numel() else []), dtype)

    def fused(self, known: KnownTokens | None = None) -> MixedTokens:
        p = self.problem
        s = p.previous(self.y)
        tensors = (tensor.to(self.dtype) for tensor in (p.from_x, s, p.loop_weight, p.x, self.y))
        found = mix_tokens(*tensors, p.columns, p.channel_mixer.form, known)
        assert found is not None
        return found

    def expected(self, dtype: torch.dtype = torch.float64) -> MixedTokens:
        p = dataclasses.replace(
            self.problem,
            from_x=self.problem.from_x.to(dtype),
            loop_weight=self.problem.loop_weight.to(dtype),
            x=self.problem.x.to(dtype),
        )
        y = self.y.to(dtype)
        terms = p.terms(self.problem.previous(self.y))
        return MixedTokens(p.mix(terms, y), terms.delta, terms.b, terms.c, terms.gate)

    def gradients(self, outputs: MixedTokens) -> tuple[Tensor, ...]:
        parts = [(o.double() * random(*o.shape, seed=i)).sum() for i, o in enumerate(outputs) if o is not None]
        return torch.autograd.grad(torch.stack(parts).sum(), self.leaves)


def assert_near(found: tuple[Tensor | None, ...], truth: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, truth, strict=True):
        assert distance(a, b) <= 1e-10


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Largest difference, relative to the largest entry."""
    if a is None or b is None:
        assert a is b
        return 0.0
    assert a.shape == b.shape
    return ((a - b).abs().max() / b.abs().max()).item() if a.numel() else 0.0


def assert_same(case: Case) -> None:
    """Against float64: 1e-10 in float64; in float32 1e-5, or twice what plain torch in float32 is off."""
    fused, truth = case.fused(), case.expected()
    found, truth = (*fused, *case.gradients(fused)), (*truth, *case.gradients(truth))
    if case.dtype == torch.float64:
        assert_near(found, truth)
        return
    rounded = case.expected(case.dtype)
    for a, b, plain in zip(found, truth, (*rounded, *case.gradients(rounded)), strict=True):
        assert distance(a, b) <= max(1e-5, 2 * distance(plain, b))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer(mixer: str, gate: str, dtype: torch.dtype) -> None:
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, gate=gate, contracting=False)
    assert_same(Case.of(layer.problem(random(3, 5, 4)), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mixer",
    [
        *(Kronecker(width, a_max=2, normalise=n) for width in (64, 128, 272, 600) for n in ("spectral", "rows")),
        *(kind(width, rank=r, a_max=2) for kind in (Householder, DPLR) for width, r in ((1, 1), (17, 3), (128, 17))),
    ],
    ids=lambda mixer: f"{type(mixer).__name__}-{mixer.width}",
)
def test_widths(mixer: ChannelMixer, dtype: torch.dtype) -> None:
    """Rows of whole registers and not, more than one register a row, more reflections than lanes."""
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, state_size=17)
    assert_same(Case.of(layer.problem(random(2, 2, 4)), scale=1.0, dtype=dtype))


@pytest.mark.parametrize("on", list(itertools.product([False, True], repeat=5)), ids=str)
def test_every_dependence(on: tuple[bool, ...]) -> None:
    layer = make_layer("K-spectral", Sequential(tolerance=0.1), dependence=Dependence(*on), gate="inside")
    assert_same(Case.of(layer.problem(random(2, 3, 4))))


@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-spectral", "K-rows"])
def test_zeros_and_extremes(mixer: str) -> None:
    """silu(0) = 0 gives no NaN; softplus and silu far out are x and 0 (CASES.md 10)."""
    layer = make_layer(mixer, Sequential(tolerance=0.1), dependence=EVERYTHING, gate="inside")
    problem = layer.problem(random(1, 12, 4))
    values = torch.tensor([0.0, 10, -10, 20, -20, 30, 88, -88, 1e3, -1e3, 3e4, -3e4], dtype=torch.float64)
    values = values[None, :, None].expand_as(problem.from_x)
    case = Case.of(dataclasses.replace(problem, from_x=values, loop_weight=0 * problem.loop_weight), 1.0, torch.float32)
    assert_same(case)
    assert all(gradient.isfinite().all() for gradient in case.gradients(case.fused()))


def test_a_nan_stays_in_its_token() -> None:
    problem = make_layer("K-spectral", Sequential(tolerance=0.1)).problem(random(1, 4, 4))
    case = Case.of(problem)
    with torch.no_grad():
        case.problem.from_x[0, 1, 0] = float("nan")
    fused = case.fused()
    assert fused.mixed[0, 1].isnan().any()
    for tensor in (*fused[:4], *case.gradients(fused)[:3]):
        assert tensor[0, [0, 2, 3]].isfinite().all()


def test_expanded_gradients_and_views() -> None:
    """As with contiguous copies (CASES.md 12)."""
    case = Case.of(make_layer("H2", Sequential(tolerance=0.1)).problem(random(2, 3, 4)))
    p = case.problem
    wide = torch.stack([p.from_x, p.from_x], dim=-1).detach()[..., 0].requires_grad_()
    s = p.previous(case.y)
    strided = mix_tokens(wide, s, p.loop_weight, p.x, case.y, p.columns, p.channel_mixer.form)
    assert strided is not None
    (found,) = torch.autograd.grad(strided.mixed.sum(), wide)
    (expected,) = torch.autograd.grad(case.expected().mixed.sum(), p.from_x)
    assert_close(found, expected)


@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_what_a_sweep_leaves_is_what_the_evaluation_would_compute(mixer: str, gate: str) -> None:
    layer = make_layer(mixer, Sequential(tolerance=1e-6), dependence=EVERYTHING, gate=gate)
    case = Case.of(layer.problem(random(5, 7, 4)), scale=1.0)
    solved = Sequential(tolerance=1e-6).solve(case.problem, Cap(1), training=True)
    case.y = solved.value.requires_grad_()
    case.leaves[2] = case.y
    assert solved.known is not None
    known = case.fused(solved.known)
    assert known.mixed.data_ptr() == solved.known.tokens.mixed.data_ptr(), "computed again"
    with pytest.raises(ValueError, match="another y"):
        case.problem.evaluate(case.y + 1, solved.known)
    assert_near(known, case.expected())
    assert_near(case.gradients(known), case.gradients(case.expected()))


def test_when_a_sweep_leaves_something() -> None:
    """Where a gradient is wanted that begins with f at the solution, and no token is padded."""

    def known(gradient: Gradient, mask: Tensor | None = None) -> object:
        layer = make_layer("H2", Sequential(tolerance=0.1))
        layer.gradient = gradient
        return Sequential(tolerance=0.1).solve(layer.problem(random(2, 3, 4), mask), Cap(1), training=True).known

    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert known(OneStep()) is not None
    assert known(Unrolled(steps=2)) is not None
    assert known(OneStep(), mask) is None
    assert known(Implicit(tolerance=1e-3, max_iterations=10, restart=10)) is None
    with torch.no_grad():
        assert known(OneStep()) is None


@pytest.mark.parametrize("gradient", [OneStep(), Unrolled(steps=3)], ids=["one_step", "unrolled"])
@pytest.mark.parametrize("weight_norm", [False, True])
def test_layer_gradients_with_and_without_what_the_sweep_left(
    gradient: Gradient, weight_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer("K-spectral", Sequential(tolerance=0.1), dependence=EVERYTHING, weight_norm=weight_norm)
    layer.gradient = gradient
    found = []
    for takes_over in (True, False):
        monkeypatch.setattr(type(gradient), "takes_over", takes_over)
        output, (result,) = layer(random(3, 4, 4), Cap(1), None)
        assert result.known is None, "kept after use"
        found.append([output, *torch.autograd.grad(output.square().sum(), list(layer.parameters()))])
    for a, b in zip(*found, strict=True):
        assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_threads_change_nothing() -> None:
    layer = make_layer(Kronecker(64, a_max=2, normalise="spectral"), Sequential(tolerance=0.1))
    case = Case.of(layer.problem(random(64, 64, 4)), scale=1.0, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        outputs = case.fused()
        found.append((*outputs[:4], *case.gradients(outputs)[:3]))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
