"""The diagonal scan in Triton: a program is one sequence and 32 channels, and goes through time in tiles of tokens.

A tile (tokens, channels) is scanned along its tokens from the state that the tile before left, which stays in registers
in float32 (float64 for float64 x). A program is one warp with a channel a lane, so that the scan runs inside each
thread and no lane waits for another. The backward runs the adjoint from the last tile to the first,

    g_t = grad_t + a_{t+1} g_{t+1},   dx_t = g_t,   da_t = g_t h_{t-1},   dstate = a_1 g_1

and reads h back in the type of x: keeping it costs nothing, and it is all that a recomputation would find.

Occupancy: B d / 32 warps. B 8, d 1536 are 384 warps, 3 to each of 132 SMs. Of float32 the next two tiles are copied to
shared memory meanwhile, 16 KiB a warp forward and 12 backward: 36 KiB an SM are under way or more, where 4.3 TB/s at
0.7 us of latency ask for 23. Narrower numbers are too small for such copies: a tile loads, is scanned and stored, with
12 KiB an SM under way forward at best; the backward computes addresses again for each, which would fill the registers.
Where B d / 32 is 132 or less and T is long, time is cut into 4 pieces or more (`fpexp.ops.pieces`), until there are up
to 528 warps: a launch finds the product of a and the last state from zero of each piece, `carry` chains these, and a
third launch runs each piece from its own state; the backward does the same the other way round.

Roofline for an H200 (4.3 TB/s): with s bytes a number, forward 3 s B T d bytes and 2 B T d operations, backward 5 s B T
d and 3 B T d. Operations never count. Floors in float32, half of that in bfloat16: B 8, T 2048, d 1536: forward 70 us,
backward 117 us; B 256, T 16, d 128 (cpu scale): 1.5 us and 2.4 us, below what two launches cost (some 10 us).
Predicted: 1.1 to 1.5 times the floor at the first in float32, 2 to 3 times in bfloat16, launches alone at the second.
In pieces a and x, or a and the gradient, are read twice: forward 5 s B T d bytes, backward 7 s B T d. In bfloat16, B 2,
T 2048, d 2048 (128 warps, 4 pieces): floors 20 us and 27 us, predicted 40 us and 55 us, where one piece would have 128
times 4 KiB under way, 0.75 TB/s, and take 67 us and 112 us; B 1, T 16384, d 1024 (32 warps, 16 pieces): floors 39 us
and 55 us, predicted 80 us and 110 us instead of 0.5 ms and 0.9 ms. In float32 the first gains nothing (39 us of memory
forward against 34 us at 3 TB/s in one piece), the second a factor of 3. Not measured yet.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch, run_all
from fpexp.ops.pieces.triton import MULTIPROCESSORS, carry, tiles_of_a_piece

_CHANNELS = 32
"""A lane each."""

_TOKENS = 32
"""In a tile at most: each is a register for each tensor, and two for its address."""

_TOKENS_BACK = 16
"""The same backward, of float32 and wider: 32 spill. Narrower numbers, which are not copied ahead, need the 32."""

_PROGRAMS = 4 * MULTIPROCESSORS
"""That keep memory busy: where pieces of time do not make more of them, time is cut."""


def diagonal_scan(a: Tensor, x: Tensor, state: Tensor | None = None) -> Tensor:
    """See `fpexp.ops.diagonal_scan`. What is not contiguous is copied."""
    arguments = (a, x, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(Tensor, _DiagonalScan.apply(*arguments))
    h, steps = forward(a.contiguous(), x.contiguous(), None if state is None else state.contiguous())
    run_all(steps)
    return h


def launches(a: Tensor, x: Tensor, state: Tensor | None = None) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    h, steps = forward(a, x, state)
    return steps | backward(a, h, state, h)[1]


def forward(a: Tensor, x: Tensor, state: Tensor | None) -> tuple[Tensor, dict[str, Launch]]:
    """Return h, not yet filled, and what fills it, by name; arguments are contiguous."""
    h, steps = torch.empty_like(x), {}
    if (room := _room_for_ends(x)) is not None:
        products, ends = room
        steps["ends"] = _launch(_forward, x, a=a, x=x, state=None, h=None, products=products, ends=ends)
        steps["carry"] = carry(products, ends, state, None)
        state = ends
    steps["forward"] = _launch(_forward, x, a=a, x=x, state=state, h=h, products=None, ends=None)
    return h, steps


def backward(a: Tensor, h: Tensor, state: Tensor | None, grad: Tensor) -> tuple[list[Tensor | None], dict[str, Launch]]:
    """Return the gradients of a, x and state, not yet filled, and what fills them; arguments are contiguous."""
    da, dx = torch.empty_like(a), torch.empty_like(h)
    dstate = None if state is None else torch.empty_like(state)
    owed, ends, steps = None, dstate, {}
    if (room := _room_for_ends(h)) is not None:
        products, owed = room
        nothing: dict[str, None] = dict.fromkeys(("h", "state", "owed", "da", "dx"))
        steps["ends, back"] = _launch(_backward, h, a=a, grad=grad, **nothing, products=products, ends=owed)
        steps["carry, back"] = carry(products, owed, None, dstate, back=True)
        ends = None
    tensors = {"a": a, "h": h, "state": state, "grad": grad, "owed": owed, "da": da, "dx": dx}
    steps["backward"] = _launch(_backward, h, **tensors, products=None, ends=ends)
    return [da, dx, dstate], steps


def _tile(like: Tensor) -> tuple[int, int]:
    """Return its tokens and channels."""
    _, length, width = like.shape
    return min(_TOKENS, triton.next_power_of_2(length)), min(_CHANNELS, triton.next_power_of_2(width))


def _span(like: Tensor) -> int:
    """Return the tokens of a piece."""
    (batch, length, width), (tokens, channels) = like.shape, _tile(like)
    programs = batch * triton.cdiv(width, channels)
    return tokens * tiles_of_a_piece(triton.cdiv(length, tokens), programs, _PROGRAMS)


def _room_for_ends(like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return room for the product of the decays of each piece and for its end from zero, (B, pieces, d).

    None where time is one piece.
    """
    batch, length, width = like.shape
    pieces = triton.cdiv(length, _span(like))
    if pieces == 1:
        return None
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    products, ends = like.new_empty(2, batch, pieces, width, dtype=dtype)
    return products, ends


def _launch(kernel: Any, like: Tensor, **tensors: Tensor | None) -> Launch:
    (batch, length, width), (tokens, channels), span = like.shape, _tile(like), _span(like)
    if kernel is _backward and like.element_size() > 2:
        tokens = min(tokens, _TOKENS_BACK)
    sizes = {"length": length, "span": span, "width": width, "CHANNELS": channels, "TOKENS": tokens}
    programs = batch * triton.cdiv(length, span) * triton.cdiv(width, channels)
    return Launch(kernel, programs, 1, {**tensors, **sizes, "COMPUTE": COMPUTE.get(like.dtype, tl.float32)})


class _DiagonalScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, state: Tensor | None) -> Tensor:
        a, state = a.contiguous(), None if state is None else state.contiguous()
        h, steps = forward(a, x.contiguous(), state)
        run_all(steps)
        ctx.save_for_backward(a, h, state)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, h, state = ctx.saved_tensors
        gradients, steps = backward(a, h, state, grad.contiguous())
        run_all(steps)
        return tuple(gradients)


# Kernels. A program is a piece of a sequence, and a block of channels. The place of a tile is 64-bit, places inside it
# are 32-bit. Where room for `products` is given, only these and the ends of the pieces are found.


@triton.jit
def _after(a1, h1, a2, h2):  # h -> a1 h + h1, and after it h -> a2 h + h2
    return a1 * a2, a2 * h1 + h2


@triton.jit(do_not_specialize=["width"])
def _forward(
    a, x, state, h, products, ends, length, span, width,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks, pieces = tl.cdiv(width, CHANNELS), tl.cdiv(length, span)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # sequence * pieces + piece
    sequence, begin = row // pieces, tl.program_id(0) // blocks % pieces * span
    stop = tl.minimum(begin + span, length)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)
    place = token[:, None] * width + channel[None, :]
    carried, whole = tl.zeros([CHANNELS], COMPUTE), tl.full([CHANNELS], 1, COMPUTE)
    if state is not None:
        carried = tl.load(state + row * width + channel, channel < width, other=0).to(COMPUTE)
    for start in tl.range(begin, stop, TOKENS, num_stages=3):
        at = (sequence * length + start) * width
        inside = (start + token < stop)[:, None] & (channel < width)[None, :]
        # Tokens past the end leave the state alone.
        a_tile = tl.where(inside, tl.load(a + at + place, inside, other=0).to(COMPUTE), 1)
        h_tile = tl.load(x + at + place, inside, other=0).to(COMPUTE)
        h_tile += tl.where(token[:, None] == 0, a_tile * carried[None, :], 0)
        a_tile, h_tile = tl.associative_scan((a_tile, h_tile), 0, _after)
        carried = tl.sum(tl.where(token[:, None] == TOKENS - 1, h_tile, 0), 0)
        if products is None:
            tl.store(h + at + place, h_tile.to(h.dtype.element_ty), inside)
        else:
            whole *= tl.sum(tl.where(token[:, None] == TOKENS - 1, a_tile, 0), 0)
    if products is not None:
        tl.store(products + row * width + channel, whole, channel < width)
        tl.store(ends + row * width + channel, carried, channel < width)


@triton.jit(do_not_specialize=["width"])
def _backward(
    a, h, state, grad, owed, da, dx, products, ends, length, span, width,
    CHANNELS: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks, pieces = tl.cdiv(width, CHANNELS), tl.cdiv(length, span)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, begin = row // pieces, tl.program_id(0) // blocks % pieces * span
    stop = tl.minimum(begin + span, length)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    token = tl.arange(0, TOKENS)
    place = -token[:, None] * width + channel[None, :]
    first = tl.zeros([CHANNELS], COMPUTE)
    if state is not None:
        first = tl.load(state + sequence * width + channel, channel < width, other=0).to(COMPUTE)
    g_later, whole = tl.zeros([CHANNELS], COMPUTE), tl.full([CHANNELS], 1, COMPUTE)
    if owed is not None:
        g_later = tl.load(owed + row * width + channel, channel < width, other=0)
    # Rows of a tile go back in time: Triton's own reversed scan moves every number to another lane and back.
    for last in tl.range(stop - 1, begin - 1, -TOKENS, num_stages=3, disable_licm=True):
        at = (sequence * length + last) * width
        t, within = last - token[:, None], (channel < width)[None, :]
        inside = (t >= begin) & within
        a_next = tl.load(a + at + width + place, inside & (t < stop - 1), other=0).to(COMPUTE)
        a_next = tl.where(t < stop - 1, a_next, 1)  # what is owed has been through the piece after
        g = tl.load(grad + at + place, inside, other=0).to(COMPUTE)
        g += tl.where(token[:, None] == 0, a_next * g_later[None, :], 0)
        a_next, g = tl.associative_scan((a_next, g), 0, _after)
        earliest = t == tl.maximum(last - TOKENS + 1, begin)
        g_later = tl.sum(tl.where(earliest, g, 0), 0)
        if products is None:
            before = tl.load(h + at - width + place, inside & (t > 0), other=0).to(COMPUTE)
            before = tl.where(t == 0, first[None, :], before)
            tl.store(dx + at + place, g.to(dx.dtype.element_ty), inside)
            tl.store(da + at + place, (g * before).to(da.dtype.element_ty), inside)
        else:
            whole *= tl.sum(tl.where(earliest, a_next, 0), 0)
    if ends is not None:
        a_first = tl.load(a + (sequence * length + begin) * width + channel, channel < width, other=0).to(COMPUTE)
        tl.store(ends + row * width + channel, (a_first * g_later).to(ends.dtype.element_ty), channel < width)
        if products is not None:
            tl.store(products + row * width + channel, a_first * whole, channel < width)
