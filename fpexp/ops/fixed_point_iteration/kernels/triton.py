"""The iteration's kernel, and the stages of a tile. `fpexp.ops.fixed_point_iteration.triton` says how they go together.

The place of a row is 64-bit. What a thread stores and another loads has a barrier in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fpexp.ops.mixers.triton import add_from_s, apply, channels_of, l2norm, make_factors, normalise, silu, softplus
from fpexp.status import Status

_CONVERGED, _UNCONVERGED, _DIVERGED, _NON_FINITE = (
    tl.constexpr(int(status)) for status in (Status.CONVERGED, Status.UNCONVERGED, Status.DIVERGED, Status.NON_FINITE)
)
_EPSILON = tl.constexpr(1e-6)
"""As in `fpexp.fixed_point.iterate`."""

_ITERATIONS, _STOPPED, _TICKET, _FINISHED = (tl.constexpr(place) for place in range(4))
"""Places of `control`."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_SETTLED = tl.constexpr(1024)
"""Sequences that are settled at a time."""


@triton.jit(do_not_specialize=["batch", "length", "most", "allowed"])
def iteration(
    from_x, weight, x, A, D, norm_weight, norm_bias, carried, state, mask,
    y, f, between, passed, s, p, mixed, factors, control, worst, largest,
    residual, status, iterations, frozen, delta, best, stalled,
    batch, length, width, count, N, most, allowed,
    mixer: tl.constexpr, plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    if tl.load(control + _STOPPED) == 0:
        iteration = tl.load(control + _ITERATIONS) + 1
        total = batch * length
        size = total.to(tl.int64) * width
        new, old = iteration % 2 * size, (iteration + 1) % 2 * size
        program = tl.program_id(0).to(tl.int64)
        s += program * plan.rows * width
        p += program * plan.rows * count
        mixed += program * plan.rows * width
        factors += program * plan.group * mixer.factor_room
        tile = tl.atomic_add(control + _TICKET, 1)
        while tile * plan.rows < total:
            first = tile * plan.rows
            if tl.max(_live(first + tl.arange(0, plan.rows), total, length, frozen).to(tl.int32), 0) > 0:
                _place(y + new, y + old, f + old, s, carried, delta, frozen, first, iteration, total, length, width,
                       plan, COMPUTE)  # fmt: skip
                tl.debug_barrier()
                _add_from_s(from_x, s, weight, p, frozen, first, total, length, count, width, mixer, plan)
                tl.debug_barrier()
                _activate(p, count, width, N, mixer, plan)
                _mix(x, y + new, p, factors, mixed, first, total, width, count, length, frozen, mixer, plan, COMPUTE)
                _scan(p, mixed, A, D, state, f + new, between, passed, frozen, tile, iteration, total, length, width,
                      count, N, mixer, plan, COMPUTE)  # fmt: skip
                tl.debug_barrier()
                _close(f + new, y + new, norm_weight, norm_bias, mask, worst, largest, frozen, first, total, length,
                       width, mixer, plan, COMPUTE)  # fmt: skip
                tl.debug_barrier()
            tile = tl.atomic_add(control + _TICKET, 1)
        tl.debug_barrier()
        if tl.atomic_add(control + _FINISHED, 1) == tl.num_programs(0) - 1:
            _settle(control, worst, largest, residual, status, iterations, frozen, delta, best, stalled, iteration,
                    batch, most, allowed, plan, COMPUTE)  # fmt: skip


@triton.jit
def _live(row, total, length, frozen):
    """Whether there is a row and its sequence is still iterated."""
    return (row < total) & (tl.load(frozen + row // length, row < total, other=1) == 0)


@triton.jit(noinline=True)
def _place(
    y_new, y_old, f_old, s, carried, delta, frozen, first, iteration, total, length, width,
    plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """y <- lerp(y, f, delta), zero at first; and s, the same one row back or the carried token."""
    local = tl.arange(0, plan.rows)
    row = first + local
    live = _live(row, total, length, frozen)
    sequence, begins = row // length, row % length == 0
    weight = tl.load(delta + sequence, live & (iteration > 1), other=1)[:, None]
    known, earlier = (live & (iteration > 1))[:, None], (live & (iteration > 1) & (row % length > 0))[:, None]
    for start in range(0, width, plan.columns):
        channel = start + tl.arange(0, plan.columns)
        there = (channel < width)[None, :]
        at = row.to(tl.int64)[:, None] * width + channel[None, :]
        f_tile = tl.load(f_old + at, known & there, other=0)
        y_tile = tl.load(y_old + at, known & there & (weight < 1), other=0)
        tl.store(y_new + at, _lerp(y_tile, f_tile, weight), live[:, None] & there)
        f_tile = tl.load(f_old + at - width, earlier & there, other=0)
        y_tile = tl.load(y_old + at - width, earlier & there & (weight < 1), other=0)
        in_carried = sequence.to(tl.int64)[:, None] * width + channel[None, :]
        from_before = tl.load(carried + in_carried, (live & begins)[:, None] & there, other=0).to(COMPUTE)
        s_tile = tl.where(begins[:, None], from_before, _lerp(y_tile, f_tile, weight))
        tl.store(s + local[:, None] * width + channel[None, :], s_tile.to(s.dtype.element_ty), there)


@triton.jit(noinline=True)
def _add_from_s(
    from_x, s, weight, p, frozen, first, total, length, count, width, mixer: tl.constexpr, plan: tl.constexpr
):
    """p = from_x + s W^T"""
    local = tl.arange(0, plan.rows)
    live = _live(first + local, total, length, frozen)[:, None]
    from_x += (first + local).to(tl.int64)[:, None] * count
    s += local[:, None] * width
    p += local[:, None] * count
    add_from_s(from_x, s, weight, p, live, count, width, mixer, plan.columns, plan.depth, plan.precision)


@triton.jit
def _lerp(y, f, weight):
    """As torch's: f itself where the weight is 1."""
    return tl.where(weight < 0.5, y + weight * (f - y), f - (f - y) * (1 - weight))


@triton.jit(noinline=True)
def _activate(p, count, width, N, mixer: tl.constexpr, plan: tl.constexpr):
    """b and c to unit length, delta = softplus(.) and the gate silu(.), in place."""
    p += tl.arange(0, plan.rows)[:, None] * count + mixer.coefficients
    n = tl.arange(0, plan.states)[None, :]
    b, c = tl.load(p + n, n < N, other=0), tl.load(p + N + n, n < N, other=0)
    tl.debug_barrier()
    tl.store(p + n, l2norm(b), n < N)
    tl.store(p + N + n, l2norm(c), n < N)
    p += 2 * N
    for start in range(0, width // plan.head_size, plan.columns):
        step = start + tl.arange(0, plan.columns)[None, :]
        delta = tl.load(p + step, step < width // plan.head_size, other=0)
        tl.debug_barrier()
        tl.store(p + step, softplus(delta), step < width // plan.head_size)
    if plan.gated:
        p += width // plan.head_size
        for start in range(0, width, plan.columns):
            channel = start + tl.arange(0, plan.columns)[None, :]
            z = tl.load(p + channel, channel < width, other=0)
            tl.debug_barrier()
            tl.store(p + channel, silu(z), channel < width)


@triton.jit(noinline=True)
def _mix(
    x, y, p, factors, mixed, first, total, width, count, length, frozen,
    mixer: tl.constexpr, plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """mixed = Q (x - y) + y"""
    channel, there = channels_of(mixer)
    factors += tl.arange(0, plan.group)[:, None] * mixer.factor_room
    for start in range(0, plan.rows, plan.group):
        local = start + tl.arange(0, plan.group)
        inside = _live(first + local, total, length, frozen)[:, None] & there[None, :]
        at = (first + local).to(tl.int64)[:, None] * width + channel[None, :]
        make_factors(p + local[:, None] * count, factors, mixer)
        tl.debug_barrier()
        y_tile = tl.load(y + at, inside, other=0)
        v = apply(factors, tl.load(x + at, inside, other=0).to(COMPUTE) - y_tile, mixer)
        tl.store(mixed + local[:, None] * width + channel[None, :], v + y_tile, inside)
        tl.debug_barrier()


@triton.jit(noinline=True)
def _scan(
    p, mixed, A, D, state, f, between, passed, frozen, tile, iteration, total, length, width, count, N,
    mixer: tl.constexpr, plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """f = gate * (H c + D * mixed), not yet normed."""
    n = tl.arange(0, plan.states)
    in_b = mixer.coefficients + n
    first, blocks = tile * plan.rows, tl.cdiv(width, plan.channels)
    after = first + plan.rows
    for start in range(0, width, plan.channels):
        channel = start + tl.arange(0, plan.channels)
        there, in_delta = channel < width, mixer.coefficients + 2 * N + channel // plan.head_size
        in_gate = mixer.coefficients + 2 * N + width // plan.head_size + channel
        present = there[:, None] & (n < N)[None, :]
        in_state = channel[:, None] * N + n[None, :]
        if plan.alike:
            rate = tl.load(A + channel, there, other=0).to(COMPUTE)[:, None] * _LOG2_E
        else:
            rate = tl.load(A + in_state, present, other=0).to(COMPUTE) * _LOG2_E
        skip = tl.load(D + channel, there, other=0).to(COMPUTE)
        sequence, t = first // length, first % length
        live = tl.load(frozen + sequence) == 0
        H = tl.full([plan.channels, plan.states], 0, COMPUTE)
        flag = passed + tile * blocks + start // plan.channels
        if (t > 0) & live:
            seen = tl.atomic_add(flag - blocks, 0, sem="acquire")
            while seen < iteration:
                seen = tl.atomic_add(flag - blocks, 0, sem="acquire")
            left = between + (tile - 1).to(tl.int64) * width * N + in_state
            H = tl.load(left, present, other=0, cache_modifier=".cg")
        token, v_token, f_token = p, mixed, f + first.to(tl.int64) * width
        for _ in range(tl.minimum(plan.rows, total - first)):
            if t == 0:
                live = tl.load(frozen + sequence) == 0
                H = tl.load(state + sequence.to(tl.int64) * width * N + in_state, present, other=0).to(COMPUTE)
            step, v = tl.load(token + in_delta, there, other=0), tl.load(v_token + channel, there, other=0)
            b, c = tl.load(token + in_b, n < N, other=0), tl.load(token + N + in_b, n < N, other=0)
            H = tl.exp2(step[:, None] * rate) * H + (step * v)[:, None] * b[None, :]
            output = tl.sum(H * c[None, :], 1) + skip * v
            if plan.gated:
                output *= tl.load(token + in_gate, there, other=0)
            tl.store(f_token + channel, output, there & live)
            token += count
            v_token += width
            f_token += width
            t += 1
            if t == length:
                t, sequence = 0, sequence + 1
        if (after < total) & (after % length > 0):
            tl.store(between + tile.to(tl.int64) * width * N + in_state, H, present)
            tl.debug_barrier()
            tl.atomic_xchg(flag, iteration, sem="release")


@triton.jit(noinline=True)
def _close(
    f, y, norm_weight, norm_bias, mask, worst, largest, frozen, first, total, length, width,
    mixer: tl.constexpr, plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Norm f, and let the residual and size of each sequence be at least those of its rows, as bits: NaN is largest."""
    channel, there = channels_of(mixer)
    for start in range(0, plan.rows, plan.group):
        row = first + start + tl.arange(0, plan.group)
        live = _live(row, total, length, frozen)
        inside = live[:, None] & there[None, :]
        at = row.to(tl.int64)[:, None] * width + channel[None, :]
        f_tile = tl.load(f + at, inside, other=0)
        if norm_weight is not None:
            gain = tl.load(norm_weight + channel, there, other=0).to(COMPUTE)
            if norm_bias is None:
                f_tile = normalise(f_tile, there, gain, None, width, plan.epsilon)
            else:
                shift = tl.load(norm_bias + channel, there, other=0).to(COMPUTE)
                f_tile = normalise(f_tile, there, gain, shift, width, plan.epsilon)
            tl.debug_barrier()
            tl.store(f + at, f_tile, inside)
        change = f_tile - tl.load(y + at, inside, other=0)
        far, size = tl.max(tl.abs(change), 1), tl.max(tl.abs(f_tile), 1)
        if plan.relative:
            far /= tl.maximum(size, _EPSILON)
        lost = (tl.max((change != change).to(tl.int32), 1) > 0) | (far != far)  # a maximum may lose a NaN
        counted = live
        if mask is not None:
            counted = live & (tl.load(mask + row, live, other=0) != 0)
        tl.atomic_max(worst + row // length, _bits(far, lost), counted)
        tl.atomic_max(largest + row // length, _bits(size, lost), counted)


@triton.jit
def _bits(number, lost):
    """Of numbers that are not negative: whole numbers in the same order, NaN after infinity."""
    if number.dtype == tl.float64:
        bits = tl.where(lost, 0x7FF8000000000000, number.to(tl.int64, bitcast=True))
    else:  # not a second return, which would be compiled for either
        bits = tl.where(lost, 0x7FC00000, number.to(tl.int32, bitcast=True))
    return bits


@triton.jit(noinline=True)
def _settle(
    control, worst, largest, residual, status, iterations, frozen, delta, best, stalled, iteration, batch, most,
    allowed, plan: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """What `iterate`, `Stopping` and `Damped` do after an evaluation."""
    bad, waiting, going = 0, 0, 0
    for start in range(0, batch, _SETTLED):
        i = start + tl.arange(0, _SETTLED)
        inside = i < batch
        live = inside & (tl.load(frozen + i, inside, other=1) == 0)
        far = tl.load(worst + i, inside, other=0, cache_modifier=".cg").to(COMPUTE, bitcast=True)
        size = tl.load(largest + i, inside, other=0, cache_modifier=".cg").to(COMPUTE, bitcast=True)
        code = tl.where(far <= plan.tolerance, _CONVERGED, _UNCONVERGED)
        code = tl.where(size > plan.divergence_limit, _DIVERGED, code)
        code = tl.where((far < float("inf")) & (size < float("inf")), code, _NON_FINITE)
        tl.store(residual + i, far, live)
        tl.store(status + i, code, live)
        tl.store(iterations + i, iteration, live)

        damping, lowest = tl.load(delta + i, live, other=0), tl.load(best + i, live, other=0)
        damping = tl.where(iteration == 1, plan.damping, damping)
        lowest = tl.where(iteration == 1, float("inf"), lowest)
        improved = far < lowest
        stall = tl.where(improved, 0, tl.load(stalled + i, live, other=0) + 1)
        decays = stall >= plan.patience
        tl.store(delta + i, tl.where(decays, damping * plan.damping_decay, damping), live)
        tl.store(best + i, tl.where(improved, far, lowest), live)
        tl.store(stalled + i, tl.where(decays, 0, stall), live)

        bad += tl.sum((live & (code >= _DIVERGED)).to(tl.int32), 0)
        waiting += tl.sum((live & (code == _UNCONVERGED)).to(tl.int32), 0)
        ended = code >= _DIVERGED
        if plan.stop_early:
            ended = code != _UNCONVERGED
        going += tl.sum((live & (ended == 0)).to(tl.int32), 0)
        if plan.together:
            ended = ended & (i < 0)
        tl.store(frozen + i, ended.to(tl.int32), live)
        tl.store(worst + i, tl.zeros_like(i).to(worst.dtype.element_ty), inside)
        tl.store(largest + i, tl.zeros_like(i).to(largest.dtype.element_ty), inside)
    stopped = going == 0
    if plan.together:
        stopped = bad > 0
        if plan.stop_early:
            stopped = stopped | (waiting <= allowed)
    tl.store(control + _ITERATIONS, iteration)
    tl.store(control + _STOPPED, (stopped | (iteration >= most)).to(tl.int32))
    tl.store(control + _TICKET, 0)
    tl.store(control + _FINISHED, 0)
