"""The selective scan's kernels. `fpexp.ops.selective_scan.triton` has the equations and what they cost.

A program is a piece of a sequence, and a block of channels. The place of a tile is 64-bit, places inside it are 32-bit.
`width` is not specialised: were it known that 16 divides it, loads would take four channels a lane, and the scan with
them would go across lanes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["width"])
def ends(
    values, delta, A, rows, products, ends, length, span, width, N, BACK: tl.constexpr,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Find the decay of each piece, and the state that it ends with from zero, or what it owes of its own, `BACK`.

    Either is a sum of value_t row_t over tokens, decayed from the token to the end of the piece, or up to and with the
    token from the start. So go from where no decay is, and sum delta on the way.
    """
    blocks, pieces = tl.cdiv(width, CHANNELS), tl.cdiv(length, span)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # sequence * pieces + piece
    sequence, begin = row // pieces, tl.program_id(0) // blocks % pieces * span
    stop = tl.minimum(begin + span, length)
    token, n = tl.arange(0, TOKENS), tl.arange(0, STATES)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    there, states = (channel < width)[None, :], (n < N)[None, :]
    present = (n < N)[:, None] & there
    in_state = channel[None, :] * N + n[:, None]
    rate = tl.load(A + in_state, present, other=0).to(COMPUTE) * _LOG2_E
    on = token if BACK else -token
    in_tile, in_row = on[:, None] * width + channel[None, :], on[:, None] * N + n[None, :]
    passed, end = tl.zeros([CHANNELS], COMPUTE), tl.zeros([STATES, CHANNELS], COMPUTE)
    for gone in range(0, stop - begin, TOKENS):
        at = sequence * length + (begin + gone if BACK else stop - 1 - gone)
        inside = (gone + token < stop - begin)[:, None]
        value = tl.load(values + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        step = tl.load(delta + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        if not BACK:  # the write at a token is decayed by those after it
            value *= step
            after = inside & there & (gone + token > 0)[:, None]
            step = tl.load(delta + (at + 1) * width + in_tile, after, other=0).to(COMPUTE)
        tile = tl.load(rows + at * N + in_row, inside & states, other=0).to(COMPUTE)
        exponent = passed[None, :] + tl.cumsum(step, 0)
        passed += tl.sum(step, 0)
        decayed = tl.exp2(exponent[:, None, :] * rate[None, :, :]) * value[:, None, :]
        end += tl.sum(decayed * tile[:, :, None], 0)
    if not BACK:
        passed += tl.load(delta + (sequence * length + begin) * width + channel, channel < width, other=0).to(COMPUTE)
    tl.store(products + row * width * N + in_state, tl.exp2(passed[None, :] * rate), present)
    tl.store(ends + row * width * N + in_state, end, present)


@triton.jit
def _after(a1, e1, w1, a2, e2, w2):
    return a1 * a2, a2 * (e1 + w1) + e2, w2


@triton.jit
def _before(p2, G2, decay2, p1, G1, decay1):  # token 2 first; its decay is that by which G leaves it for token 1
    return p1 * (decay2 * p2), p1 * (decay2 * G2) + G1, decay1


@triton.jit(do_not_specialize=["width"])
def forward(
    x, delta, A, b, c, D, state, y, final, kept, length, span, width, N,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks, pieces = tl.cdiv(width, CHANNELS), tl.cdiv(length, span)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    sequence, begin = row // pieces, tl.program_id(0) // blocks % pieces * span
    token, n = tl.arange(0, TOKENS), tl.arange(0, STATES)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    there, states = (channel < width)[None, :], (n < N)[None, :]
    present = (n < N)[:, None] & there
    in_tile, in_row = token[:, None] * width + channel[None, :], token[:, None] * N + n[None, :]
    in_state, in_kept = channel[None, :] * N + n[:, None], n[:, None] * width + channel[None, :]
    rate = tl.load(A + in_state, present, other=0).to(COMPUTE) * _LOG2_E
    skip = tl.load(D + channel, channel < width, other=0).to(COMPUTE)
    H = tl.zeros([STATES, CHANNELS], COMPUTE)
    if state is not None:
        H = tl.load(state + row * width * N + in_state, present, other=0).to(COMPUTE)
    for start in range(begin, tl.minimum(begin + span, length), TOKENS):
        at = sequence * length + start
        inside = (start + token < length)[:, None]
        if kept is not None:
            tile = sequence * tl.cdiv(length, TOKENS) + start // TOKENS
            tl.store(kept + tile * N * width + in_kept, H, present)
        x_tile = tl.load(x + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        step = tl.load(delta + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        b_tile = tl.load(b + at * N + in_row, inside & states, other=0).to(COMPUTE)
        c_tile = tl.load(c + at * N + in_row, inside & states, other=0).to(COMPUTE)
        decay = tl.exp2(step[:, None, :] * rate[None, :, :])
        write = (step * x_tile)[:, None, :] * b_tile[:, :, None]
        e = tl.where(token[:, None, None] == 0, decay * H[None, :, :], 0)
        _, e, write = tl.associative_scan((decay, e, write), 0, _after)
        states_after = e + write
        y_tile = tl.sum(states_after * c_tile[:, :, None], 1) + skip[None, :] * x_tile
        tl.store(y + at * width + in_tile, y_tile.to(y.dtype.element_ty), inside & there)
        H = tl.sum(tl.where(token[:, None, None] == TOKENS - 1, states_after, 0), 0)
    if final is not None:
        tl.store(final + row * width * N + in_state, H, present)


@triton.jit(do_not_specialize=["width"])
def backward(
    x, delta, A, b, c, D, kept, grad_y, owed, dx, ddelta, dA, db, dc, dD, dstate, length, span, width, N,
    CHANNELS: tl.constexpr, STATES: tl.constexpr, TOKENS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks, pieces = tl.cdiv(width, CHANNELS), tl.cdiv(length, span)
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    sequence, batch = row // pieces, tl.num_programs(0) // blocks // pieces
    begin = tl.program_id(0) // blocks % pieces * span
    token, n = tl.arange(0, TOKENS), tl.arange(0, STATES)
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    there, states = (channel < width)[None, :], (n < N)[None, :]
    present = (n < N)[:, None] & there
    in_tile, in_row = token[:, None] * width + channel[None, :], token[:, None] * N + n[None, :]
    in_state, in_kept = channel[None, :] * N + n[:, None], n[:, None] * width + channel[None, :]
    A_tile = tl.load(A + in_state, present, other=0).to(COMPUTE)
    skip = tl.load(D + channel, channel < width, other=0).to(COMPUTE)
    decayed_G = tl.zeros([STATES, CHANNELS], COMPUTE)  # decay_{t+1} G_{t+1}
    if owed is not None:
        decayed_G = tl.load(owed + row * width * N + in_state, present, other=0).to(COMPUTE)
    dA_sum, dD_sum = tl.zeros([STATES, CHANNELS], COMPUTE), tl.zeros([CHANNELS], COMPUTE)
    tiles = tl.cdiv(length, TOKENS)
    last = tl.cdiv(tl.minimum(begin + span, length), TOKENS) - 1
    for i in tl.range(last, begin // TOKENS - 1, -1, disable_licm=True):
        start = i * TOKENS
        at = sequence * length + start
        inside = (start + token < length)[:, None]
        x_tile = tl.load(x + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        step = tl.load(delta + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        gy = tl.load(grad_y + at * width + in_tile, inside & there, other=0).to(COMPUTE)
        b_tile = tl.load(b + at * N + in_row, inside & states, other=0).to(COMPUTE)
        c_tile = tl.load(c + at * N + in_row, inside & states, other=0).to(COMPUTE)
        H = tl.load(kept + (sequence * tiles + i) * N * width + in_kept, present, other=0)
        decay = tl.exp2(step[:, None, :] * (A_tile * _LOG2_E)[None, :, :])
        write = (step * x_tile)[:, None, :] * b_tile[:, :, None]
        decayed = tl.where(token[:, None, None] == 0, decay * H[None, :, :], 0)
        _, decayed, write = tl.associative_scan((decay, decayed, write), 0, _after)
        in_blocks = (block.to(tl.int64) * batch * length + at) * N
        tl.store(dc + in_blocks + in_row, tl.sum((decayed + write) * gy[:, None, :], 2), inside & states)

        # Back in time: flipped, since Triton's own reversed scan moves every number to another lane and back.
        G = gy[:, None, :] * c_tile[:, :, None] + tl.where(token[:, None, None] == TOKENS - 1, decayed_G[None, :, :], 0)
        ones = tl.full([TOKENS, STATES, CHANNELS], 1, COMPUTE)
        _, G, _ = tl.associative_scan((ones, tl.flip(G, 0), tl.flip(decay, 0)), 0, _before)
        G = tl.flip(G, 0)
        decayed_G = tl.sum(tl.where(token[:, None, None] == 0, decay * G, 0), 0)
        grad_exponent = G * decayed
        through_b = tl.sum(G * b_tile[:, :, None], 1)
        through_decay = tl.sum(grad_exponent * A_tile[None, :, :], 1)
        dA_sum += tl.sum(grad_exponent * step[:, None, :], 0)
        dD_sum += tl.sum(gy * x_tile, 0)
        tl.store(db + in_blocks + in_row, tl.sum(G * (step * x_tile)[:, None, :], 2), inside & states)
        dx_tile, ddelta_tile = step * through_b + skip[None, :] * gy, x_tile * through_b + through_decay
        tl.store(dx + at * width + in_tile, dx_tile.to(dx.dtype.element_ty), inside & there)
        tl.store(ddelta + at * width + in_tile, ddelta_tile.to(ddelta.dtype.element_ty), inside & there)
    tl.store(dA + row * width * N + in_state, dA_sum, present)
    tl.store(dD + row * width + channel, dD_sum, channel < width)
    if dstate is not None:
        tl.store(dstate + row * width * N + in_state, decayed_G.to(dstate.dtype.element_ty), present)
