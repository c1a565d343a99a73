"""The diagonal scan in numba: LANES channels at a time, forward and backward by hand.

A task is one sequence and one block of LANES channels, whose h stays in a register through all tokens. The backward
runs the adjoint g_t = grad_t + a_{t+1} * g_{t+1} from the last token to the first:

    dx_t = g_t,   da_t = g_t * h_{t-1},   dstate = a_1 * g_1

There is one multiply-add to two loads and a store, so memory sets the pace. No result depends on the number of threads.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.simd.cpu import LANES, load, store, zeros


def diagonal_scan(a: Tensor, x: Tensor, state: Tensor | None = None) -> Tensor:
    """See `fpexp.ops.diagonal_scan`. Channels are padded with zeros to whole blocks."""
    output_dtype, width = x.dtype, x.shape[2]
    dtype = compute_type(output_dtype)
    state = x.new_zeros(x.shape[0], width, dtype=dtype) if state is None else state
    arguments = [tensor.to(dtype) for tensor in (a, x, state)]
    padding = -width % LANES
    if padding:
        arguments = [functional.pad(tensor, (0, padding)) for tensor in arguments]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments):
        h = cast(Tensor, _DiagonalScan.apply(*arguments))
    else:
        h = _scan(*arguments)
    if padding:
        h = h[..., :width].contiguous()
    return h.to(output_dtype)


def _scan(a: Tensor, x: Tensor, state: Tensor) -> Tensor:
    h = torch.empty(x.shape, dtype=x.dtype)
    _forward.run(*_work(h), *_sizes(h), *map(flat, (a, x, state, h)))
    return h


def _work(h: Tensor) -> tuple[int, int]:
    batch, _, width = h.shape
    return batch * (width // LANES), h.numel()


def _sizes(h: Tensor) -> tuple[int, int]:
    _, length, width = h.shape
    return length, width


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, state: Tensor) -> Tensor:
        h = _scan(a, x, state)
        ctx.save_for_backward(a, state, h)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, state, h = ctx.saved_tensors
        da, dx = torch.empty(h.shape, dtype=h.dtype), torch.empty(h.shape, dtype=h.dtype)
        dstate = torch.empty(state.shape, dtype=h.dtype)
        _backward.run(*_work(h), *_sizes(h), *map(flat, (a, state, h, grad_h, da, dx, dstate)))
        return da, dx, dstate


# Kernels. Arrays have one dimension, offsets are 64-bit.


def _forward_loop(first: int, last: int, length: int, width: int, a: Any, x: Any, state: Any, h: Any) -> None:
    blocks = width // LANES
    for task in range(first, last):
        sequence, start = task // blocks, task % blocks * LANES
        carried = load(state, sequence * width + start)
        for t in range(length):
            at = (sequence * length + t) * width + start
            carried = load(a, at) * carried + load(x, at)
            store(h, at, carried)


def _backward_loop(
    first: int, last: int, length: int, width: int, a: Any, state: Any, h: Any, grad_h: Any, da: Any, dx: Any,
    dstate: Any,
) -> None:  # fmt: skip
    blocks = width // LANES
    for task in range(first, last):
        sequence, start = task // blocks, task % blocks * LANES
        owed = zeros(load(state, sequence * width + start))  # a_{t+1} g_{t+1}
        for t in range(length - 1, -1, -1):
            at = (sequence * length + t) * width + start
            g = load(grad_h, at) + owed
            before = load(h, at - width) if t > 0 else load(state, sequence * width + start)
            store(dx, at, g)
            store(da, at, g * before)
            owed = load(a, at) * g
        store(dstate, sequence * width + start, owed)


_forward = Kernel(njit, _forward_loop, nogil=True, error_model="numpy")
_backward = Kernel(njit, _backward_loop, nogil=True, error_model="numpy")
