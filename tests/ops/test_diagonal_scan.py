"""The diagonal scan: the plain loop against numpy, the fused one against the plain one (CASES.md 7, 12, 17)."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from helpers import LENGTHS, random
from torch import Tensor

from fpexp.errors import UserError
from fpexp.ops.diagonal_scan import diagonal_scan

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
BACKENDS = pytest.mark.parametrize("backend", ["reference", "cpu"])


@pytest.fixture(autouse=True)
def _needs_numba() -> None:
    pytest.importorskip("numba")


def inputs(length: int, dtype: torch.dtype = torch.float64, batch: int = 2, d: int = 24) -> list[Tensor]:
    """a in (-1, 1), x and a carried state, all asking for gradients."""
    tensors = [torch.tanh(random(batch, length, d, seed=1)), random(batch, length, d, seed=2), random(batch, d, seed=3)]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def results(arguments: list[Tensor], backend: str, grad: Tensor | None = None) -> list[Tensor]:
    """h and the gradients of a, x and the state."""
    h = diagonal_scan(*arguments, backend=backend)
    grad = random(*h.shape, seed=4, dtype=h.dtype) if grad is None else grad
    return [h.detach(), *torch.autograd.grad(h, arguments, grad)]


def expect_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("h", "da", "dx", "dstate"), found, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30), name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    arguments = inputs(length, dtype)
    expect_close(results(arguments, "cpu"), results(arguments, "reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("d", [1, 3, 16, 72, 100])
@pytest.mark.parametrize("batch", [1, 5])
def test_widths_and_batches(d: int, batch: int) -> None:
    arguments = inputs(9, d=d, batch=batch)
    expect_close(results(arguments, "cpu"), results(arguments, "reference"), 1e-12)


@BACKENDS
def test_the_recurrence_in_numpy(backend: str) -> None:
    a, x, state = (tensor.detach() for tensor in inputs(7))
    h, expected = state.numpy(), []
    for t in range(7):
        h = a[:, t].numpy() * h + x[:, t].numpy()
        expected.append(h)
    found = diagonal_scan(a, x, state, backend=backend)
    np.testing.assert_allclose(found.numpy(), np.stack(expected, axis=1), rtol=0, atol=1e-13)
    from_zeros = diagonal_scan(a, x, backend=backend)
    torch.testing.assert_close(from_zeros, diagonal_scan(a, x, torch.zeros_like(state), backend=backend))


@BACKENDS
def test_finite_differences(backend: str) -> None:
    assert torch.autograd.gradcheck(functools.partial(diagonal_scan, backend=backend), inputs(4, d=3), nondet_tol=0.0)


@BACKENDS
def test_cuts_carry_the_state(backend: str) -> None:
    """CASES.md 17: 130 in one pass, 64 + 66, one by one."""
    a, x, state = (tensor.detach() for tensor in inputs(130, torch.float32))
    whole = diagonal_scan(a, x, state, backend=backend)
    for parts in ([64, 66], [1] * 130):
        carried, found = state, []
        for a_part, x_part in zip(a.split(parts, 1), x.split(parts, 1), strict=True):
            found.append(diagonal_scan(a_part, x_part, carried, backend=backend))
            carried = found[-1][:, -1]
        torch.testing.assert_close(torch.cat(found, dim=1), whole, rtol=0, atol=0)


def test_bfloat16() -> None:
    """Half precision comes in and goes out; in between is float32, so that the result is the rounded one."""
    arguments = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in inputs(65)]
    exact = [tensor.detach().float().requires_grad_() for tensor in arguments]
    grad = random(2, 65, 24, seed=4, dtype=torch.bfloat16)
    found = results(arguments, "cpu", grad)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    for a, b in zip(found, results(exact, "reference", grad.float()), strict=True):
        assert (a.float() - b).abs().max() <= 2**-8 * b.abs().max()


def test_strides() -> None:
    """CASES.md 12: transposed, sliced out of a fused projection, an expanded incoming gradient."""
    a, x, state = (tensor.detach() for tensor in inputs(17))
    fused = torch.cat([a, x], dim=-1)
    sliced = [part.requires_grad_() for part in fused.split(24, dim=-1)]
    transposed = state.T.contiguous().T.requires_grad_()
    grad = torch.ones(1, 1, 1, dtype=torch.float64).expand(2, 17, 24)
    strided = results([*sliced, transposed], "cpu", grad)
    plain = [tensor.contiguous().requires_grad_() for tensor in (a, x, state)]
    expect_close(strided, results(plain, "cpu", grad.contiguous()), 0.0)
    expect_close(strided, results(plain, "reference", grad.contiguous()), 1e-12)


def test_one_argument_asks_for_a_gradient() -> None:
    for wanted in range(3):
        arguments = [tensor.detach() for tensor in inputs(5)]
        arguments[wanted].requires_grad_()
        found, expected = (
            torch.autograd.grad(diagonal_scan(*arguments, backend=backend).square().sum(), arguments[wanted])[0]
            for backend in ("cpu", "reference")
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_mistakes() -> None:
    a, x, state = inputs(3)
    with pytest.raises(ValueError, match="a and x"):
        diagonal_scan(a[:, :2], x)
    with pytest.raises(ValueError, match="state is"):
        diagonal_scan(a, x, state[:1])
    with pytest.raises(UserError, match="has no such backend"):
        diagonal_scan(a, x, backend="gpu")
    (gradient,) = torch.autograd.grad(diagonal_scan(a, x, backend="cpu").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
