"""Triton's scans and SSD against the float64 loops, on a GPU or in the interpreter (CASES.md 7, 9, 12, 13, 14, 17).

The interpreter takes about a millisecond for a number of a scan, hence the tiny widths.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import LENGTHS, random
from torch import Tensor
from torch.nn import functional

from fpexp.ops.diagonal_scan import diagonal_scan
from fpexp.ops.selective_scan import selective_scan
from fpexp.ops.ssd import ssd

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Inputs = dict[str, Any]
Op = Callable[..., Any]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Room for results is full of NaN, so that a number that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    assert torch.ones(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def of_diagonal_scan(length: int, dtype: torch.dtype, batch: int = 1, d: int = 3) -> Inputs:
    tensors = {
        "a": torch.tanh(2 * random(batch, length, d, seed=1)),
        "x": random(batch, length, d, seed=2),
        "state": random(batch, d, seed=3),
    }
    return {name: tensor.to(DEVICE, dtype) for name, tensor in tensors.items()}


def of_selective_scan(length: int, dtype: torch.dtype, batch: int = 1, d: int = 2, N: int = 2) -> Inputs:
    """Delta from below 1e-3 to above 1; A, D and the state are float32 beside narrower types, as under autocast."""
    wide = dtype if dtype == torch.float64 else torch.float32
    tensors = {
        "x": random(batch, length, d, seed=1).to(dtype),
        "delta": functional.softplus(2 * random(batch, length, d, seed=2) - 2).to(dtype),
        "A": -random(d, N, seed=3).exp().to(wide),
        "b": random(batch, length, N, seed=4).to(dtype),
        "c": random(batch, length, N, seed=5).to(dtype),
        "D": random(d, seed=6).to(wide),
        "state": random(batch, d, N, seed=8).to(wide),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def of_ssd(
    length: int, dtype: torch.dtype, batch: int = 1, heads: int = 2, P: int = 3, groups: int = 1, N: int = 5
) -> Inputs:
    """As `of_selective_scan`."""
    wide = dtype if dtype == torch.float64 else torch.float32
    tensors = {
        "x": random(batch, length, heads, P, seed=1).to(dtype),
        "delta": functional.softplus(2 * random(batch, length, heads, seed=2) - 2).to(dtype),
        "A": -random(heads, seed=3).exp().to(wide),
        "b": random(batch, length, groups, N, seed=4).to(dtype),
        "c": random(batch, length, groups, N, seed=5).to(dtype),
        "D": random(heads, seed=6).to(wide),
        "state": random(batch, heads, P, N, seed=8).to(wide),
    }
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


MAKERS = {diagonal_scan: of_diagonal_scan, selective_scan: of_selective_scan, ssd: of_ssd}
OPS = pytest.mark.parametrize("op", MAKERS, ids=lambda op: op.__name__)


def run(op: Op, inputs: Inputs, backend: str) -> dict[str, Tensor]:
    """What the op returns, and the gradient of every input from gradients of all of it, which any type can hold."""
    leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in inputs.items()}
    found = op(**leaves, backend=backend)
    outputs = (found,) if isinstance(found, Tensor) else found
    gradients = [random(*out.shape, seed=9).bfloat16().to(out) for out in outputs]
    given = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    results = torch.autograd.grad(outputs, list(given.values()), gradients)
    named = {f"d{name}": gradient for name, gradient in zip(given, results, strict=True)}
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | named


def check(op: Op, inputs: Inputs, tolerance: float | None = None) -> None:
    """Within `tolerance` of the largest number, of the type that the op promises."""
    found = run(op, inputs, "triton")
    exact = run(op, {name: None if t is None else t.double() for name, t in inputs.items()}, "reference")
    for name, expected in exact.items():
        given = inputs.get(name.removeprefix("d"))
        dtype = found[name].dtype if given is None else given.dtype
        assert (found[name].shape, found[name].dtype) == (expected.shape, dtype), name
        error = (found[name].double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        assert error <= (tolerance or TOLERANCE[inputs["x"].dtype]), f"{name}: {error}"


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_diagonal_scan(length: int, dtype: torch.dtype) -> None:
    check(diagonal_scan, of_diagonal_scan(length, dtype))


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_selective_scan(length: int, dtype: torch.dtype) -> None:
    check(selective_scan, of_selective_scan(length, dtype))


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_ssd(length: int, dtype: torch.dtype) -> None:
    check(ssd, of_ssd(length, dtype), 2e-2 if dtype == torch.bfloat16 else None)


@OPS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_types(dtype: torch.dtype, op: Op) -> None:
    check(op, MAKERS[op](35, dtype))


@pytest.mark.parametrize(("batch", "d"), [(1, 1), (3, 8), (2, 33), (1, 72)])
def test_widths_of_the_diagonal_scan(batch: int, d: int) -> None:
    inputs = of_diagonal_scan(3, torch.float32, batch, d)
    check(diagonal_scan, inputs)


@pytest.mark.parametrize(("batch", "d", "N"), [(1, 1, 1), (2, 33, 1), (3, 2, 5), (2, 3, 16), (1, 1, 24), (1, 1, 130)])
def test_widths_of_the_selective_scan(batch: int, d: int, N: int) -> None:
    check(selective_scan, of_selective_scan(3, torch.float32, batch, d, N))


@pytest.mark.parametrize(
    ("heads", "P", "groups", "N"),
    [(1, 1, 1, 1), (4, 8, 2, 17), (3, 24, 3, 3), (1, 48, 1, 9), (1, 72, 1, 100), (1, 100, 1, 8)],
)
def test_widths_of_ssd(heads: int, P: int, groups: int, N: int) -> None:
    check(ssd, of_ssd(19, torch.float32, 2, heads, P, groups, N))


@OPS
def test_no_state(op: Op) -> None:
    check(op, {**MAKERS[op](17, torch.float32, batch=2), "state": None})


def test_extreme_log_decays() -> None:
    """CASES.md 9: Delta A from {0, -1e-6, -50, -1e4} side by side."""
    inputs = of_selective_scan(33, torch.float32)
    choices = torch.tensor([0.0, 1e-6, 50.0, 1e4])
    picked = torch.randint(4, (1, 33, 2), generator=torch.Generator().manual_seed(0))
    check(selective_scan, {**inputs, "delta": choices[picked].to(DEVICE), "A": -torch.ones_like(inputs["A"])})
    inputs = of_ssd(33, torch.float32)
    check(ssd, {**inputs, "delta": choices[picked].to(DEVICE), "A": -torch.ones_like(inputs["A"])})


CUT = pytest.mark.parametrize("op", [diagonal_scan, selective_scan], ids=lambda op: op.__name__)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Op, int], None]:
    """Time in pieces of so many tiles, as on a GPU that few programs would leave idle."""

    def into_pieces(op: Op, tiles: int) -> None:
        module = importlib.import_module(f"fpexp.ops.{op.__name__}.triton")
        monkeypatch.setattr(module, "tiles_of_a_piece", lambda *_: tiles)
        assert "carry" in module.launches(**MAKERS[op](257, torch.float32))

    return into_pieces


@CUT
@pytest.mark.parametrize("length", LENGTHS)
def test_pieces_of_time(length: int, op: Op, cut: Callable[[Op, int], None]) -> None:
    """The last is one token where a length is one more than some pieces."""
    cut(op, 1)
    check(op, MAKERS[op](length, torch.float32))


@CUT
def test_pieces_of_two_tiles(op: Op, cut: Callable[[Op, int], None]) -> None:
    cut(op, 2)
    check(op, {**MAKERS[op](97, torch.bfloat16, 2), "state": None})
    check(op, MAKERS[op](70 if op is diagonal_scan else 34, torch.float64, 1, 33))


def test_extreme_decays_in_pieces(cut: Callable[[Op, int], None]) -> None:
    """CASES.md 9."""
    cut(selective_scan, 1)
    test_extreme_log_decays()
    cut(diagonal_scan, 1)
    choices = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-20])
    picked = torch.randint(5, (1, 130, 3), generator=torch.Generator().manual_seed(0))
    check(diagonal_scan, {**of_diagonal_scan(130, torch.float32), "a": choices[picked].to(DEVICE)})


def test_carrying_the_state_in_pieces(cut: Callable[[Op, int], None]) -> None:
    """CASES.md 17."""
    cut(diagonal_scan, 1)
    cut(selective_scan, 2)
    test_carrying_the_state([64, 66])


@pytest.mark.parametrize(
    ("tiles", "programs", "pieces"),
    [(64, 128, 4), (64, 132, 4), (64, 133, 1), (512, 32, 16), (100, 1, 8), (31, 1, 1), (32, 1, 4), (10**6, 1, 512)],
)
def test_how_many_pieces(tiles: int, programs: int, pieces: int) -> None:
    """As many as 528 programs allow, of 8 tiles or more; none where that makes less than 4."""
    module = importlib.import_module("fpexp.ops.pieces.triton")
    assert -(-tiles // module.tiles_of_a_piece(tiles, programs, 528)) == pieces


def strided(tensor: Tensor) -> Tensor:
    """The same numbers as every other column of a transposed view."""
    view = torch.stack([tensor, tensor], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
    assert not view.is_contiguous()
    return view


@OPS
def test_strided_views_are_as_contiguous_copies(op: Op) -> None:
    """CASES.md 12."""
    inputs = MAKERS[op](17, torch.float32, batch=2)
    views = {name: tensor if tensor is None or tensor.dim() < 2 else strided(tensor) for name, tensor in inputs.items()}
    plain, viewed = run(op, inputs, "triton"), run(op, views, "triton")
    for name in plain:
        assert torch.equal(plain[name], viewed[name]), name


def test_expanded_inputs_and_gradients() -> None:
    """CASES.md 12: `y.sum().backward()`, which says nothing of the last state; x is one number."""
    for op, make in MAKERS.items():
        inputs = make(17, torch.float32)
        gradients = {}
        for backend in ("triton", "reference"):
            x = torch.ones((), device=DEVICE, requires_grad=True)
            result = op(**{**inputs, "x": x.expand(inputs["x"].shape)}, backend=backend)
            (result if isinstance(result, Tensor) else result[0]).sum().backward()
            gradients[backend] = x.grad
        torch.testing.assert_close(gradients["triton"], gradients["reference"])


def test_one_argument_asks_for_a_gradient() -> None:
    for op, make in MAKERS.items():
        inputs = make(3, torch.float32)
        for wanted, tensor in inputs.items():
            gradients = []
            for backend in ("triton", "reference"):
                leaf = tensor.detach().requires_grad_()
                result = op(**{**inputs, wanted: leaf}, backend=backend)
                sum(out.square().sum() for out in ([result] if isinstance(result, Tensor) else result)).backward()
                gradients.append(leaf.grad)
            torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("parts", [[64, 66], [1, 129]], ids=str)
def test_carrying_the_state(parts: list[int]) -> None:
    """CASES.md 17."""
    inputs = of_diagonal_scan(130, torch.float32)
    whole, state, pieces = diagonal_scan(**inputs, backend="triton"), inputs["state"], []
    for a, x in zip(inputs["a"].split(parts, 1), inputs["x"].split(parts, 1), strict=True):
        pieces.append(diagonal_scan(a, x, state, backend="triton"))
        state = pieces[-1][:, -1]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-6, atol=1e-6)
    for op in (selective_scan, ssd):
        inputs = MAKERS[op](130, torch.float32)
        (whole, last), state, pieces = op(**inputs, backend="triton"), inputs["state"], []
        for timed in zip(*(inputs[name].split(parts, 1) for name in ("x", "delta", "b", "c")), strict=True):
            cut = {**inputs, **dict(zip(("x", "delta", "b", "c"), timed, strict=True)), "state": state}
            y, state = op(**cut, backend="triton")
            pieces.append(y)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


@OPS
def test_autocast_and_precision(op: Op) -> None:
    """CASES.md 14: bfloat16 comes in and y goes out, the state in between is float32, autocast changes nothing."""
    inputs = MAKERS[op](17, torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(op, inputs, "triton")
    plain = run(op, inputs, "triton")
    assert all(torch.equal(found[name], plain[name]) for name in found)
    check(op, {name: tensor.float() for name, tensor in inputs.items()}, tolerance=1e-6)
    if op is not diagonal_scan:
        assert (found["output 0"].dtype, found["output 1"].dtype) == (torch.bfloat16, torch.float32)
        exact = run(op, {name: tensor.double() for name, tensor in inputs.items()}, "reference")["output 1"]
        tolerance = 1e-5 if op is selective_scan else 1e-2  # factors of products are bfloat16
        torch.testing.assert_close(found["output 1"].double(), exact, rtol=tolerance, atol=tolerance)


def test_differentiated_twice_is_refused() -> None:
    for op, make in MAKERS.items():
        x = (inputs := make(2, torch.float32))["x"].requires_grad_()
        result = op(**inputs, backend="triton")
        total = (result if isinstance(result, Tensor) else result[0]).square().sum()
        (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no time for 2^31 numbers")
def test_offsets_above_31_bits() -> None:
    """CASES.md 13: the last of so many sequences that x passes 2^31 numbers."""
    batch, length, d = 2**14 + 1, 2, 2**16
    x = torch.zeros(batch, length, d, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = random(length, d).to(x)
    h = diagonal_scan(x, x, backend="triton")[-1:]
    torch.testing.assert_close(h, diagonal_scan(x[-1:], x[-1:], backend="reference"))
    del h
    A, D, b = -torch.ones(d, 1, device=DEVICE), torch.ones(d, device=DEVICE), x[..., :1].contiguous()
    y, _ = selective_scan(x, x.abs_(), A, b, b, D, backend="triton")
    expected, _ = selective_scan(x[-1:], x[-1:], A, b[-1:], b[-1:], D, backend="reference")
    torch.testing.assert_close(y[-1:], expected)
