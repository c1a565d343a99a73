"""The diagonal scan in Triton: a program is one sequence and 32 channels, and goes through time in tiles of tokens.

A tile (tokens, channels) is scanned along its tokens from the state that the tile before left, which stays in registers
in float32 (float64 for float64 x). A program is one warp with a channel a lane, so that the scan runs inside each
thread and no lane waits for another. The backward runs the adjoint from the last tile to the first,

    g_t = grad_t + a_{t+1} g_{t+1},   dx_t = g_t,   da_t = g_t h_{t-1},   dstate = a_1 g_1

and reads h back in the type of x: keeping it costs nothing, and it is all that a recomputation would find.

Occupancy: B d / 32 warps and no parallelism over time. B 8, d 1536 are 384 warps, 3 to each of 132 SMs. Of float32 the
next two tiles are copied to shared memory meanwhile, 16 KiB a warp forward: 48 KiB an SM are under way, where 4.3 TB/s
at 0.7 us of latency ask for 23. Narrower numbers are too small for such copies: a tile loads, is scanned and stored,
with 12 KiB an SM under way at best. B d below some 6000 leaves memory idle: one would cut time into pieces, whose
products of a and last states, found first, are chained; that reads a and x twice.

Roofline for an H200 (4.3 TB/s): with s bytes a number, forward 3 s B T d bytes and 2 B T d operations, backward 5 s B T
d and 3 B T d. Operations never count. Floors in float32, half of that in bfloat16: B 8, T 2048, d 1536: forward 70 us,
backward 117 us; B 256, T 16, d 128 (cpu scale): 1.5 us and 2.4 us, below what two launches cost (some 10 us).
Predicted: 1.1 to 1.5 times the floor at the first in float32, 2 to 3 times in bfloat16, launches alone at the second.
Not measured yet.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch

_CHANNELS = 32
"""A lane each."""

_TOKENS = 32
"""In a tile at most: each is a register for each tensor, and two for its address."""


def diagonal_scan(a: Tensor, x: Tensor, state: Tensor | None = None) -> Tensor:
    """See `fpexp.ops.diagonal_scan`. What is not contiguous is copied."""
    arguments = (a, x, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(Tensor, _DiagonalScan.apply(*arguments))
    h, launch = forward(a.contiguous(), x.contiguous(), None if state is None else state.contiguous())
    launch.run()
    return h


def launches(a: Tensor, x: Tensor, state: Tensor | None = None) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    h, onwards = forward(a, x, state)
    return {"forward": onwards, "backward": backward(a, h, state, h)[1]}


def forward(a: Tensor, x: Tensor, state: Tensor | None) -> tuple[Tensor, Launch]:
    """Return h, not yet filled, and what fills it; arguments are contiguous."""
    h = torch.empty_like(x)
    return h, _launch(_forward, x, a=a, x=x, state=state, h=h)


def backward(a: Tensor, h: Tensor, state: Tensor | None, grad: Tensor) -> tuple[list[Tensor | None], Launch]:
    """Return the gradients of a, x and state, not yet filled, and what fills them; arguments are contiguous."""
    da, dx = torch.empty_like(a), torch.empty_like(h)
    dstate = None if state is None else torch.empty_like(state)
    tensors = {"a": a, "h": h, "state": state, "grad": grad, "da": da, "dx": dx, "dstate": dstate}
    return [da, dx, dstate], _launch(_backward, h, **tensors)


def _launch(kernel: Any, like: Tensor, **tensors: Tensor | None) -> Launch:
    batch, length, width = like.shape
    channels = min(_CHANNELS, triton.next_power_of_2(width))
    tokens = min(_TOKENS, triton.next_power_of_2(length))
    sizes = {"length": length, "width": width, "CHANNELS": channels, "TOKENS": tokens}
    arguments = {**tensors, **sizes, "COMPUTE": COMPUTE.get(like.dtype, tl.float32)}
    return Launch(kernel, batch * triton.cdiv(width, channels), 1, arguments)


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, state: Tensor | None) -> Tensor:
        a, state = a.contiguous(), None if state is None else state.contiguous()
        h, launch = forward(a, x.contiguous(), state)
        launch.run()
        ctx.save_for_backward(a, h, state)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, h, state = ctx.saved_tensors
        gradients, launch = backward(a, h, state, grad.contiguous())
        launch.run()
        return tuple(gradients)


# Kernels. The place of a tile is 64-bit, places inside it are 32-bit.


@triton.jit
def _after(a1, h1, a2, h2):  # h -> a1 h + h1, and after it h -> a2 h + h2
    return a1 * a2, a2 * h1 + h2


@triton.jit(do_not_specialize=["width"])
def _forward(
    a, x, state, h, length, width, CHANNELS: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    blocks = tl.cdiv(width, CHANNELS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)
    place = token[:, None] * width + channel[None, :]
    carried = tl.zeros([CHANNELS], COMPUTE)
    if state is not None:
        carried = tl.load(state + sequence * width + channel, channel < width, other=0).to(COMPUTE)
    for start in tl.range(0, length, TOKENS, num_stages=3):
        at = (sequence * length + start) * width
        inside = (start + token < length)[:, None] & (channel < width)[None, :]
        # Tokens past the end leave the state alone.
        a_tile = tl.where(inside, tl.load(a + at + place, inside, other=0).to(COMPUTE), 1)
        h_tile = tl.load(x + at + place, inside, other=0).to(COMPUTE)
        h_tile += tl.where(token[:, None] == 0, a_tile * carried[None, :], 0)
        _, h_tile = tl.associative_scan((a_tile, h_tile), 0, _after)
        tl.store(h + at + place, h_tile.to(h.dtype.element_ty), inside)
        carried = tl.sum(tl.where(token[:, None] == TOKENS - 1, h_tile, 0), 0)


@triton.jit(do_not_specialize=["width"])
def _backward(
    a, h, state, grad, da, dx, dstate, length, width,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, CHANNELS)
    sequence = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)
    place = -token[:, None] * width + channel[None, :]
    first = tl.zeros([CHANNELS], COMPUTE)
    if state is not None:
        first = tl.load(state + sequence * width + channel, channel < width, other=0).to(COMPUTE)
    g_later = tl.zeros([CHANNELS], COMPUTE)
    # Rows of a tile go back in time: Triton's own reversed scan moves every number to another lane and back.
    for last in tl.range(length - 1, -1, -TOKENS, num_stages=3):
        at = (sequence * length + last) * width
        t, within = last - token[:, None], (channel < width)[None, :]
        inside = (t >= 0) & within
        a_next = tl.load(a + at + width + place, inside & (t < length - 1), other=0).to(COMPUTE)
        g = tl.load(grad + at + place, inside, other=0).to(COMPUTE)
        g += tl.where(token[:, None] == 0, a_next * g_later[None, :], 0)
        _, g = tl.associative_scan((a_next, g), 0, _after)
        before = tl.load(h + at - width + place, inside & (t > 0), other=0).to(COMPUTE)
        before += tl.where(t == 0, first[None, :], 0)
        tl.store(dx + at + place, g.to(dx.dtype.element_ty), inside)
        tl.store(da + at + place, (g * before).to(da.dtype.element_ty), inside)
        g_later = tl.sum(tl.where(t == tl.maximum(last - TOKENS + 1, 0), g, 0), 0)
    if dstate is not None:
        a_first = tl.load(a + sequence * length * width + channel, channel < width, other=0).to(COMPUTE)
        owed = (a_first * g_later).to(dstate.dtype.element_ty)
        tl.store(dstate + sequence * width + channel, owed, channel < width)
