"""Decoding: a model that carries its state from token to token computes what one pass computes (CASES.md 8, 17)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import random, tiny
from torch import Tensor, nn

from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Sequential, SolveResult, Status
from fpexp.models import DecodingState, LanguageModel, ModelOutput
from fpexp.models.lm import SequenceLayer
from fpexp.models.short_convolution import ShortConvolution

PARTS = {"64+66": [64, 66], "1+129": [1, 129], "one by one": [1] * 130}
VARIANTS = {
    "h": ["model=fp_mamba_h"],
    "k": ["model=fp_mamba_k"],
    "dplr": ["model=fp_mamba_dplr"],
    "h gate inside": ["model=fp_mamba_h", "model.gate=inside"],
    "k conv": ["model=fp_mamba_k", "model.conv_width=4"],
    "dplr gate inside, conv": ["model=fp_mamba_dplr", "model.gate=inside", "model.conv_width=4"],
    "k no norm, lambda, weight norm": [
        "model=fp_mamba_k", "model.norm=none", "model.dependence.lambda=true", "model.weight_norm=true"
    ],
    "mamba2 k gate inside, conv": ["model=fp_mamba2_k", "model.gate=inside", "model.conv_width=4"],
    "lstm": ["model=lstm"],
}  # fmt: skip
EXACT = "precision=float64"

variants = pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(seed))


def built(words: list[str], *more: str, tolerance: float = 1e-10) -> LanguageModel:
    """Two layers in evaluation mode; of an FP-Mamba, every token map contracts."""
    if words != VARIANTS["lstm"]:
        more = (*more, "model.channel_mixer.a_max=0.5", f"solver.tolerance={tolerance}")
    model = tiny(*words, "model.layers=2", *more).model.eval()
    with torch.no_grad():
        for block in model.layers:
            if hasattr(block, "layer"):
                block.layer.D.fill_(0.3)
                if block.layer.norm is not None:
                    block.layer.norm.weight.mul_(0.05)
                    if isinstance(block.layer.norm, nn.LayerNorm):
                        block.layer.norm.bias.copy_(random(block.layer.width, dtype=block.layer.D.dtype))
    return model


def decode(model: LanguageModel, inputs: Tensor, parts: list[int]) -> tuple[Tensor, DecodingState]:
    """The logits of all parts, read one after the other."""
    state, logits = None, []
    for part in inputs.split(parts, dim=1):
        output, state = model.decode(part, state)
        logits.append(output.logits)
    assert state is not None
    return torch.cat(logits, dim=1), state


def tensors(state: Any) -> Iterator[Tensor]:
    """All that a state holds."""
    if isinstance(state, Tensor):
        yield state
    elif dataclasses.is_dataclass(state):
        yield from tensors(tuple(getattr(state, field.name) for field in dataclasses.fields(state)))
    elif isinstance(state, tuple):
        for part in state:
            yield from tensors(part)


@variants
@pytest.mark.parametrize(
    ("precision", "backend", "atol"),
    [("float32", "cpu", 1e-4), ("float64", "cpu", 1e-8), ("float64", "reference", 1e-8)],
)
def test_any_cut_gives_the_logits_of_one_pass(words: list[str], precision: str, backend: str, atol: float) -> None:
    """CASES.md 17, a batch of 3."""
    lstm = words == VARIANTS["lstm"]
    solver = [] if lstm else ["solver=sequential", f"solver.backend={backend}"]
    tolerance = 1e-6 if precision == "float32" else 1e-10
    model = built(words, *solver, f"precision={precision}", tolerance=tolerance)
    inputs = tokens(3, 130)
    with torch.no_grad():
        whole = model(inputs)
    assert len(whole.solves) == (0 if lstm else 2)
    if precision == "float64":
        assert all((solve.status == Status.CONVERGED).all() for solve in whole.solves)
    for parts in PARTS.values():
        logits, _ = decode(model, inputs, parts)
        torch.testing.assert_close(logits, whole.logits, rtol=0, atol=atol)


@pytest.mark.parametrize("gradient", ["one_step", "implicit"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_loose_tolerance_costs_no_agreement(backend: str, gradient: str) -> None:
    """The gate outside sees f(y*) and the loop y*; mixed up they would differ by what the tolerance leaves."""
    words = [EXACT, "solver=sequential", f"solver.backend={backend}", f"gradient={gradient}"]
    model = built(VARIANTS["k conv"], *words, tolerance=0.1)
    inputs = tokens(2, 20)
    with torch.no_grad():
        whole = model(inputs)
    assert max(float(solve.residual.max()) for solve in whole.solves) > 1e-3
    logits, _ = decode(model, inputs, [7, 1, 1, 11])
    torch.testing.assert_close(logits, whole.logits, rtol=0, atol=1e-10)


def test_unrolled_agrees_within_the_tolerance() -> None:
    words = [EXACT, "solver=sequential", "gradient=unrolled", "gradient.steps=3"]
    model = built(VARIANTS["h"], *words, tolerance=1e-10)
    with torch.no_grad():
        whole = model(tokens(2, 20)).logits
    torch.testing.assert_close(decode(model, tokens(2, 20), [1] * 20)[0], whole, rtol=0, atol=1e-8)


@pytest.mark.parametrize("solver", ["picard", "anderson", "lagged"])
def test_other_solvers_lend_the_sweep_their_tolerance(solver: str) -> None:
    model = built(VARIANTS["h"], EXACT, f"solver={solver}", "solver.tolerance_kind=absolute", tolerance=1e-9)
    layer = model.layers[0].layer
    sweep = Sequential.like(layer.solver)
    assert (sweep.tolerance, sweep.tolerance_kind) == (1e-9, "absolute")
    with torch.no_grad():
        whole = model(tokens(2, 20), Cap(1000)).logits
    output, state = model.decode(tokens(2, 20)[:, :12])
    assert all(solve.tokens is not None for solve in output.solves), "token by token"
    rest, _ = model.decode(tokens(2, 20)[:, 12:], state)
    torch.testing.assert_close(torch.cat([output.logits, rest.logits], dim=1), whole, rtol=0, atol=1e-6)


def test_a_sequential_solver_decodes_itself() -> None:
    solver = Sequential(tolerance=0.1, inner_max_iterations=3, backend="reference")
    assert Sequential.like(solver) is solver


def test_a_solver_without_tolerance_cannot_be_followed() -> None:
    class Mine:
        whole_sequence = True

        def solve(self, problem: Any, cap: Cap, *, training: bool) -> SolveResult:
            raise AssertionError

    with pytest.raises(UserError, match="Mine has no tolerance"):
        Sequential.like(Mine())


@variants
def test_the_state_does_not_grow(words: list[str]) -> None:
    """Neither its tensors nor the memory behind them, after 1, 10 and 100 tokens at once or one at a time."""
    model = built(words)
    sizes, states = set(), []
    for length in (1, 10, 100):
        states.append(model.decode(tokens(3, length))[1])
        states.append(decode(model, tokens(3, length), [1] * length)[1])
    for state in states:
        parts = list(tensors(state))
        assert not any(part.requires_grad for part in parts)
        storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
        sizes.add((sum(part.numel() for part in parts), sum(storages.values())))
    ((elements, held),) = sizes
    assert held == 4 * elements


@variants
def test_a_state_can_be_read_on_from_twice(words: list[str]) -> None:
    model = built(words)
    _, state = model.decode(tokens(2, 5))
    before = [part.clone() for part in tensors(state)]
    first, second = (model.decode(tokens(2, 3, seed=1), state)[0].logits for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(state), strict=True))


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_the_convolution_with_a_state(length: int, width: int) -> None:
    """CASES.md 8: shorter than the kernel, batch 1, from the start and in the middle."""
    convolution, x = ShortConvolution(5, width).double(), random(1, 3 * length, 5)
    before, parts = None, []
    for part in x.split(length, dim=1):
        y, before = convolution.decode(part, before)
        parts.append(y)
        assert before.shape == (1, width - 1, 5)
    torch.testing.assert_close(torch.cat(parts, dim=1), convolution(x), rtol=0, atol=1e-12)


def test_bfloat16_keeps_the_scan_state_in_float32() -> None:
    model = built(VARIANTS["k conv"], tolerance=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = decode(model, tokens(2, 6), [3, 1, 2])
        whole = model(tokens(2, 6)).logits
    assert logits.dtype == torch.bfloat16
    assert (logits - whole).abs().max() < 4e-2 * whole.abs().max()
    assert {layer.loop.H.dtype for layer in state.layers} == {torch.float32}


def test_mistakes() -> None:
    model = built(VARIANTS["k conv"])
    _, state = model.decode(tokens(3, 2))
    with pytest.raises(ValueError, match="the state is of batch size 3, the tokens are of 2"):
        model.decode(tokens(2, 1), state)
    for shape in ((3,), (3, 0), (3, 1, 1)):
        with pytest.raises(ValueError, match=r"tokens must be indices \(B, T\) with T >= 1"):
            model.decode(torch.zeros(shape, dtype=torch.long), state)
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        model.train().decode(tokens(3, 1), state)


def test_padding_has_no_state() -> None:
    layer = built(VARIANTS["h"]).layers[0].layer
    problem = layer.problem(random(2, 3, 8, dtype=torch.float32), mask=torch.tensor([[True] * 3, [True] * 2 + [False]]))
    with pytest.raises(ValueError, match="leave the padding out"):
        Sequential(tolerance=0.1).carry(problem)


def test_a_layer_that_carries_nothing_says_so() -> None:
    class Mean(SequenceLayer):
        output_size = 4

        def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
            return u, ()

    model = LanguageModel(5, 4, [Mean()], 0.0).eval()
    assert isinstance(model(torch.zeros(1, 2, dtype=torch.long)), ModelOutput)
    with pytest.raises(NotImplementedError, match="Mean does not decode"):
        model.decode(torch.zeros(1, 2, dtype=torch.long))


def test_it_needs_no_gradient() -> None:
    output, _ = built(VARIANTS["h"]).decode(tokens(1, 2))
    assert not output.logits.requires_grad
    assert isinstance(output.logits, Tensor)
    assert nn.functional.softmax(output.logits, -1).isfinite().all()
