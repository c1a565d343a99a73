"""The selective scan against the float64 loop and its adjoint (CASES.md 7, 9, 12, 17)."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from helpers import LENGTHS, random, to_numpy
from torch import Tensor
from torch.nn import functional

from fpexp.ops import backends
from fpexp.ops.selective_scan import selective_scan

NAMES = ("x", "delta", "A", "b", "c", "D")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}


def inputs(
    length: int, dtype: torch.dtype = torch.float64, batch: int = 2, d: int = 3, N: int = 2
) -> dict[str, Tensor]:
    """Random arguments; Delta from below 1e-3 to above 1. A and D are parameters: float32 beside bfloat16."""
    weights = torch.float32 if dtype == torch.bfloat16 else dtype
    return {
        "x": random(batch, length, d, seed=1, dtype=dtype),
        "delta": functional.softplus(2 * random(batch, length, d, seed=2) - 2).to(dtype),
        "A": -random(d, N, seed=3).exp().to(weights),
        "b": random(batch, length, N, seed=4, dtype=dtype),
        "c": random(batch, length, N, seed=5, dtype=dtype),
        "D": random(d, seed=6, dtype=weights),
    }


def expect_close(found: Tensor, expected: np.ndarray, tolerance: float) -> None:
    """Within `tolerance` of the largest entry."""
    assert found.isfinite().all()
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-30))


def check_against_oracle(arguments: dict[str, Tensor], grad_y: Tensor, state: Tensor | None = None) -> None:
    """Forward and every gradient of sum(grad_y * y)."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
    h0 = None if state is None else state.detach().requires_grad_()
    y, last = selective_scan(**leaves, state=h0)
    y.backward(grad_y)
    tolerance = TOLERANCE[arguments["x"].dtype]
    exact = {name: to_numpy(tensor) for name, tensor in arguments.items()}
    exact["h0"] = None if state is None else to_numpy(state)
    expected_y, expected_last = oracle.selective_scan(**exact)
    expect_close(y, expected_y, tolerance)
    expect_close(last, expected_last, tolerance)
    gradients = oracle.selective_scan_gradients(**exact, grad_y=to_numpy(grad_y))
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        expect_close(leaf.grad, gradients[name], tolerance)
    if h0 is not None:
        assert h0.grad is not None
        expect_close(h0.grad, gradients["h0"], tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_gradients(length: int, dtype: torch.dtype) -> None:
    arguments = inputs(length, dtype)
    state_dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    grad_y = random(*arguments["x"].shape, seed=7, dtype=dtype)
    check_against_oracle(arguments, grad_y, random(2, 3, 2, seed=8, dtype=state_dtype))


@pytest.mark.parametrize(("batch", "d", "N"), [(1, 1, 1), (1, 5, 4), (3, 2, 7)])
def test_other_shapes_and_no_state(batch: int, d: int, N: int) -> None:
    check_against_oracle(inputs(9, batch=batch, d=d, N=N), random(batch, 9, d, seed=7))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_log_decays(dtype: torch.dtype) -> None:
    """CASES.md 9: Delta A from {0, -1e-6, -50, -1e4} side by side."""
    arguments = inputs(16, dtype)
    choices = torch.tensor([0.0, 1e-6, 50.0, 1e4], dtype=dtype)
    picked = torch.randint(4, arguments["delta"].shape, generator=torch.Generator().manual_seed(0))
    arguments["delta"] = choices[picked]
    arguments["A"] = -torch.ones_like(arguments["A"])
    check_against_oracle(arguments, random(2, 16, 3, seed=7, dtype=dtype))


@pytest.mark.parametrize("parts", [[64, 66], [1, 129], [129, 1], [1] * 130], ids=["64+66", "1+129", "129+1", "1 each"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_carrying_the_state(parts: list[int], dtype: torch.dtype) -> None:
    """CASES.md 17."""
    arguments = inputs(130, dtype)
    whole, whole_last = selective_scan(**arguments)
    outputs, state = [], None
    for timed in zip(*(arguments[name].split(parts, dim=1) for name in ("x", "delta", "b", "c")), strict=True):
        x, delta, b, c = timed
        y, state = selective_scan(x, delta, arguments["A"], b, c, arguments["D"], state)
        outputs.append(y)
    assert state is not None
    expect_close(torch.cat(outputs, dim=1), to_numpy(whole), TOLERANCE[dtype])
    expect_close(state, to_numpy(whole_last), TOLERANCE[dtype])


def test_the_state_gradient_reaches_through_a_carried_state() -> None:
    arguments = inputs(7)
    x = arguments.pop("x").requires_grad_()
    whole, _ = selective_scan(x, **arguments)
    (expected,) = torch.autograd.grad(whole.square().sum(), x)
    first = {name: t[:, :3] if t.ndim == 3 else t for name, t in arguments.items()}
    second = {name: t[:, 3:] if t.ndim == 3 else t for name, t in arguments.items()}
    y1, state = selective_scan(x[:, :3], **first)
    y2, _ = selective_scan(x[:, 3:], **second, state=state)
    (found,) = torch.autograd.grad(torch.cat([y1, y2], dim=1).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_input_keeps_a_float32_state(autocast: bool) -> None:
    arguments = inputs(64, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, last = selective_scan(**arguments)
    assert y.dtype == torch.bfloat16
    assert last.dtype == torch.float32
    exact, exact_last = oracle.selective_scan(**{name: to_numpy(tensor) for name, tensor in arguments.items()})
    expect_close(last, exact_last, 1e-5)
    expect_close(y, exact, 2**-8)


def test_autocast_changes_no_float32_result() -> None:
    arguments = inputs(17, torch.float32)
    plain, plain_last = selective_scan(**arguments)
    with torch.autocast("cpu", torch.bfloat16):
        y, last = selective_scan(**arguments)
    assert torch.equal(y, plain)
    assert torch.equal(last, plain_last)


def test_strided_views_are_as_contiguous_copies() -> None:
    """CASES.md 12: transposed views and slices of a fused projection."""
    plain = inputs(17)
    fused = torch.cat([plain["b"], plain["x"], plain["delta"], plain["c"]], dim=-1)
    b, x, _, c = fused.split([2, 3, 3, 2], dim=-1)
    views = {
        "x": x,
        "delta": plain["delta"].transpose(1, 2).contiguous().transpose(1, 2),
        "A": plain["A"].T.contiguous().T,
        "b": b.transpose(0, 1).contiguous().transpose(0, 1),
        "c": c,
        "D": torch.stack([plain["D"], plain["D"]], dim=-1)[:, 0],
    }
    assert not any(view.is_contiguous() for view in views.values())
    check_against_oracle(views, random(2, 17, 3, seed=7))
    assert torch.equal(selective_scan(**views)[0], selective_scan(**plain)[0])


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (1, 17, 1)])
def test_expanded_incoming_gradients_are_as_full_ones(shape: tuple[int, ...]) -> None:
    """CASES.md 12: `y.sum().backward()` hands back a gradient without strides."""
    check_against_oracle(inputs(17), random(*shape, seed=7).expand(2, 17, 3))


def test_every_op_names_its_backend() -> None:
    assert "selective_scan" in backends()
