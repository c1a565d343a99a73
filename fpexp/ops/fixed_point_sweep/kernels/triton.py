"""The sweep's kernel, and what it calls for a token. `fpexp.ops.fixed_point_sweep.triton` says what lies where.

Places of a sequence or token are 64-bit, places inside it are 32-bit. Lanes that are not there are 0 throughout;
sequences that are not there are computed from whatever lies in memory, and nothing is written of them. What does not
change in the loop over tokens is computed again for each: kept, it would fill the registers. So p and s have two places
for a sequence, which tokens take in turn: of one place the assembler would keep all addresses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fpexp.ops.mixers.triton import add_from_s, apply, channels_of, l2norm, make_factors, normalise, silu, softplus
from fpexp.status import Status

_EPSILON = tl.constexpr(1e-6)  # of `fpexp.fixed_point.iterate`
_UNCONVERGED, _CAP_REACHED = tl.constexpr(int(Status.UNCONVERGED)), tl.constexpr(int(Status.CAP_REACHED))
_DIVERGED, _NON_FINITE = tl.constexpr(int(Status.DIVERGED)), tl.constexpr(int(Status.NON_FINITE))
_CONVERGED = tl.constexpr(int(Status.CONVERGED))


@triton.jit
def _step(p, channel, there, solving, head, width, N, mixer: tl.constexpr):
    """Delta (rows, channels); 0, which leaves a state as it is, where nothing is solved."""
    step = tl.load(p + mixer.coefficients + 2 * N + (channel // head)[None, :], there[None, :], other=0)
    return tl.where(solving[:, None] & there[None, :], softplus(step), 0)


@triton.jit
def _unit(p, at, n, N, solving):
    """b or c, (rows, N)."""
    v = l2norm(tl.load(p + at + n[None, :], (n < N)[None, :], other=0))
    return tl.where(solving[:, None], v, 0)


@triton.jit
def _decay(step, A, channel, there, n, N, rates):
    """exp(Delta A), (rows, channels, N)."""
    in_A = channel[:, None] * rates + tl.where(rates == 1, 0, n)[None, :]
    rate = tl.load(A + in_A, there[:, None] & (n < N)[None, :], other=0).to(step.dtype)
    return tl.exp(step[:, :, None] * rate[None, :, :])


@triton.jit
def _walk_states(
    H, A, p, vector, unit, sequence, exists, solving, head, width, N, rates,
    mixer: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """For states that are not in registers: vector = (exp(Delta A) H) c, or H = exp(Delta A) H + vector b^T."""
    n = tl.arange(0, STATES)
    for start in range(0, width, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        there = channel < width
        present = exists[:, None] & there[None, :]
        state_present = present[:, :, None] & (n < N)[None, None, :]
        in_row = vector + sequence[:, None] * width + channel[None, :]
        in_state = H + sequence[:, None, None] * width * N + (channel[:, None] * N + n[None, :])[None, :, :]
        step = _step(p, channel, there, solving, head, width, N, mixer)
        state = _decay(step, A, channel, there, n, N, rates) * tl.load(in_state, state_present, other=0)
        if WRITE:
            state += tl.load(in_row, present, other=0)[:, :, None] * unit[:, None, :]
            tl.store(in_state, state, state_present)
        else:
            tl.store(in_row, tl.sum(state * unit[:, None, :], 2), present)


@triton.jit
def _largest(f, y):
    """|f - y| and |f| of each row, the first infinite where f is not finite: a maximum passes NaN over."""
    difference = tl.abs(f - y)
    both = tl.join(tl.where(difference == difference, difference, float("inf")), tl.abs(f))
    return tl.split(tl.max(both, 1))


@triton.jit
def _solve(
    factors, x, base, g, gate, solving, present, there, norm_weight, norm_bias, width, NORM_EPSILON: tl.constexpr,
    mixer: tl.constexpr, settings: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Iterate y = norm(gate (base + g mixed)), mixed = Q (x - y) + y, from 0; rows stop one by one."""
    y, mixed = tl.zeros_like(base), tl.zeros_like(base)
    residual = tl.sum(y, 1)
    best, step, stalled = residual + float("inf"), residual + settings.damping, tl.zeros_like(solving).to(tl.int32)
    iterations, status = stalled + 1, stalled + _CONVERGED
    going, iteration = solving, 0
    left = tl.sum(going.to(tl.int32), 0)
    while left > 0:
        iteration += 1
        x_t = tl.load(x, present, other=0).to(y.dtype)
        mixed = apply(factors, x_t - y, mixer) + y
        f = base + g * mixed
        if GATED:
            f = gate * f
        if norm_weight is not None:
            f = normalise(f, there, norm_weight, norm_bias, width, NORM_EPSILON)
        difference, size = _largest(f, y)
        if settings.relative:
            difference = difference / tl.maximum(size, _EPSILON)
        finite = (difference < float("inf")) & (size < float("inf"))
        code = tl.where(difference <= settings.tolerance, _CONVERGED, _UNCONVERGED)
        code = tl.where((code == _UNCONVERGED) & (iteration == settings.inner_max_iterations), _CAP_REACHED, code)
        code = tl.where(size > settings.divergence_limit, _DIVERGED, code)
        code = tl.where(finite, code, _NON_FINITE)
        iterations = tl.where(going, iteration, iterations)
        status = tl.where(going, code, status)
        residual = tl.where(going, tl.where(finite, difference, float("nan")), residual)
        going = going & (code == _UNCONVERGED)

        improved = difference < best
        best = tl.where(improved, difference, best)
        stalled = tl.where(improved, 0, stalled + 1)
        decays = stalled >= settings.patience
        step = tl.where(decays, step * settings.damping_decay, step)
        stalled = tl.where(decays, 0, stalled)
        y = tl.where(going[:, None], f - (1 - step)[:, None] * (f - y), y)
        left = tl.sum(going.to(tl.int32), 0)
    return y, mixed, iterations, residual, status


@triton.jit(do_not_specialize=["batch", "length"])
def sweep(
    from_x, weight, x, A, D, norm_weight, norm_bias, carried, mask, H, value, iterations, residual, status,
    p, factors, s, vector, batch, length, width, N, count, head, rates, factor_room,
    mixer: tl.constexpr, settings: tl.constexpr, NORM_EPSILON: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, STATES)
    sequence = program * ROWS + tl.arange(0, ROWS)
    exists = sequence < batch
    channel, real = channels_of(mixer)
    present = exists[:, None] & real[None, :]
    state_present = present[:, :, None] & (n < N)[None, None, :]
    in_state = (channel[:, None] * N + n[None, :])[None, :, :]
    in_row = sequence[:, None] * width + channel[None, :]
    tl.store(s + 2 * sequence[:, None] * width + channel[None, :], tl.load(carried + in_row, present, other=0), present)
    if BLOCK is None:
        state = tl.load(H + sequence[:, None, None] * width * N + in_state, state_present, other=0)
    tl.debug_barrier()

    for t in tl.range(length, disable_licm=True):
        at = sequence * length + t
        solving = exists
        if mask is not None:
            solving = exists & (tl.load(mask + at, exists, other=0) != 0)
        place = 2 * sequence[:, None] + t % 2
        p_t, factors_t = p + place * count, factors + sequence[:, None] * factor_room
        x_t, s_t = from_x + at[:, None] * count, s + place * width
        add_from_s(x_t, s_t, weight, p_t, exists[:, None], count, width, mixer, COLUMNS, DEPTH, PRECISION)
        tl.debug_barrier()
        make_factors(p_t, factors_t, mixer)
        tl.debug_barrier()
        b = _unit(p_t, mixer.coefficients, n, N, solving)
        c = _unit(p_t, mixer.coefficients + N, n, N, solving)
        delta = _step(p_t, channel, real, solving, head, width, N, mixer)
        skip = tl.load(D + channel, real, other=0).to(COMPUTE)
        g = tl.sum(b * c, 1)[:, None] * delta + skip[None, :]
        gate = g
        if GATED:
            z = tl.load(p_t + mixer.coefficients + 2 * N + width // head + channel[None, :], real[None, :], other=0)
            gate = silu(z)
        if BLOCK is None:
            state = _decay(delta, A, channel, real, n, N, rates) * state
            base = tl.sum(state * c[:, None, :], 2)
        else:
            _walk_states(
                H, A, p_t, vector, c, sequence, exists, solving, head, width, N, rates, mixer, BLOCK, STATES, False
            )  # fmt: skip
            tl.debug_barrier()
            base = tl.load(vector + in_row, present, other=0)
        scale, shift = norm_weight, norm_bias
        if norm_weight is not None:
            scale = tl.load(norm_weight + channel, real, other=0).to(COMPUTE)
        if norm_bias is not None:
            shift = tl.load(norm_bias + channel, real, other=0).to(COMPUTE)
        in_token = at[:, None] * width + channel[None, :]
        y, mixed, done, left, code = _solve(
            factors_t, x + in_token, base, g, gate, solving, present, real, scale, shift, width, NORM_EPSILON,
            mixer, settings, GATED,
        )  # fmt: skip
        delta = _step(p_t, channel, real, solving, head, width, N, mixer)  # again: registers were short meanwhile
        write = tl.where(solving[:, None], delta * mixed, 0)
        if BLOCK is None:
            state += write[:, :, None] * b[:, None, :]
        else:
            tl.debug_barrier()
            tl.store(vector + in_row, write, present)
            tl.debug_barrier()
            _walk_states(
                H, A, p_t, vector, b, sequence, exists, solving, head, width, N, rates, mixer, BLOCK, STATES, True
            )  # fmt: skip
        tl.store(value + in_token, y, present)
        following = 2 * sequence[:, None] + (t + 1) % 2
        tl.store(s + following * width + channel[None, :], y, present)
        tl.store(iterations + at, done, exists)
        tl.store(residual + at, left, exists)
        tl.store(status + at, code, exists)
        tl.debug_barrier()
    if BLOCK is None:
        tl.store(H + sequence[:, None, None] * width * N + in_state, state, state_present)
