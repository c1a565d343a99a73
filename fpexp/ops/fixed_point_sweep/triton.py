"""The sequential sweep in Triton: a program takes a few sequences through all their tokens, with one launch for all.

Of a token, what s = y_{t-1} contributes is a product of the program's sequences with all weights, block after block;
then factors, b, c, Delta and the decayed states; then the token's equation is iterated, as often as the slowest
sequence of the program needs, each stopping by itself; then y is written into the states. Sums run along one sequence,
and how many sequences a program has depends on the layer alone: a result depends on no other sequence.

Where what lies: vectors over channels are in registers, coefficients and factors in memory of the program's own (tens
of KB, which the first cache keeps). The states are in registers up to `_STATE` numbers for all sequences of a program
(d N = 2048 for four, or for two with Kronecker factors); above that they go by in blocks, read twice and written once a
token, from the first cache or L2. The weights are not pinned: where they have less than some 150 KB (d 128) they stay
in an SM's first cache (256 KB with shared memory), above that every program streams them from L2 (50 MB) for each
token. So it pays to have several sequences in a program, and more than to hold their states, which are smaller: at d
1024, N 16, K, a token reads 4.7 MB of float32 weights, and 0.8 MB for four states.

Roofline for an H200, float32 (bfloat16 projections in brackets). From memory, 4.3 TB/s: from_x, x and y once and H
twice; on tensor cores 2 B T R d operations for R rows of weights (790 TFLOP/s bfloat16, a tenth of that in three tf32):

                                        memory   tensor cores   weights   programs   weights through L2
    cpu    B 256 T 16   d 128  N 16 K   3.3 us   3 us           117 KB    128        first cache
    gpu    B 64  T 1024 d 512  N 16 K   140 us   0.6 ms         1.5 MB    16         14 us a token
    paper  B 512 T 16   d 1024 N 16 K   48 us    0.2 ms         4.7 MB    128        110 us a token
           B 512 T 16   d 1024 N 16 H2  68 us    0.4 ms         8.5 MB    128        200 us a token
    copy   B 128 T 256  d 2048 N 32 K   0.3 ms   4.7 ms         23 MB     128        530 us a token

with 5.5 TB/s of L2 for all SMs and 64 bytes a clock for one (both assumed). The tokens' order is what costs: a token
waits for some 20 barriers and loads (3 us; spectral K 8 us more for its power iteration), an iteration for 10 (0.5 to
1 us; K 1 to 4 us, d (d1 + d2) products a sequence without tensor cores). With 5 iterations a token, predicted: cpu 0.25
ms (0.25), gpu 35 ms (28), paper K 2.4 ms (1.5), H2 3.4 ms (1.8), copy 150 ms (85). Not measured yet. At paper widths
the weights dominate, and a launch for each token, with one product for the whole batch, would read them once: some 15
us a token. That is not built.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.backend import say_once
from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.launch.triton import COMPUTE, Launch
from fpexp.ops.mixers import MixerForm
from fpexp.ops.mixers.triton import (
    Mixer,
    add_from_s,
    apply,
    channels_of,
    l2norm,
    make_factors,
    normalise,
    precision,
    silu,
    softplus,
)
from fpexp.ops.sweep import SweepResult, SweepSettings
from fpexp.status import Status

_ROWS = 4
"""Sequences of a program at most; a result must not depend on the batch, so nor does this.

Beside Kronecker factors of 32 channels 24 bytes a thread spill on sm_80 at d 512, and 216 at d 1024. With two sequences
none do at d 512; but then every weight is read for two and not for four, and the batch of word problems at paper scale
is two programs for each multiprocessor, with room for one.
"""

_VECTOR = 4096
"""Numbers that the program's vectors over channels have at most, of which ten are in registers at a time."""

_LARGEST = 16384
"""Numbers of a vector or a Kronecker factor at most; above `_VECTOR` registers spill."""

_STATE = 8192
"""Numbers of the program's states that stay in registers at most; half of it beside Kronecker factors."""

_BLOCK = 4096
"""Numbers of states that do not which are read at a time."""

_WARPS = 8

_COLUMNS, _DEPTH = 64, 32
"""Of a block of weights: 8 KB in float32, four of which are on their way at a time."""

_EPSILON = tl.constexpr(1e-6)  # of `fpexp.fixed_point.iterate`
_UNCONVERGED, _CAP_REACHED = tl.constexpr(int(Status.UNCONVERGED)), tl.constexpr(int(Status.CAP_REACHED))
_DIVERGED, _NON_FINITE = tl.constexpr(int(Status.DIVERGED)), tl.constexpr(int(Status.NON_FINITE))
_CONVERGED = tl.constexpr(int(Status.CONVERGED))


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult | None:
    """Solve all tokens in order, or return None where one token is more than a program can hold.

    `SweepResult.known` is left out. What is not contiguous is copied.
    """
    mixer = Mixer.of(form, terms.columns, terms.x.shape[2])
    if mixer.largest > _LARGEST:
        say_once(f"backend=triton has no sweep for {form} at an inner width of {terms.x.shape[2]}: torch solves it")
        return None
    result, launch = prepare(terms, form, settings)
    launch.run()
    return result


def launches(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> dict[str, Launch]:
    """What a solve launches, by name; meta tensors will do to compile it."""
    return {"sweep": prepare(terms, form, settings)[1]}


class Plan(NamedTuple):
    """How many sequences a program takes, and how many channels of their states at a time.

    `block` is None where the states stay in registers.
    """

    rows: int
    block: int | None

    @classmethod
    def of(cls, mixer: Mixer, states: int) -> Plan:
        """Return the plan for a mixer and `states` numbers of a state to a lane."""
        rows = max(1, min(_ROWS, _VECTOR // mixer.largest))
        numbers = mixer.lanes * states
        room = _STATE // 2 if mixer.rows > 1 else _STATE
        if rows * numbers > room >= 2 * numbers:
            rows = 2
        on_chip = rows * numbers <= room
        return cls(rows, None if on_chip else max(1, _BLOCK // (rows * states)))


def prepare(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> tuple[SweepResult, Launch]:
    """Return the result, not yet filled, and what fills it."""
    batch, length, width = terms.x.shape
    N, (count, steps) = terms.H.shape[2], (terms.from_x.shape[2], terms.columns.sizes[3])
    mixer = Mixer.of(form, terms.columns, width)
    plan = Plan.of(mixer, triton.next_power_of_2(N))
    dtype = torch.float64 if terms.x.dtype == torch.float64 else torch.float32
    programs = triton.cdiv(batch, plan.rows)

    def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return terms.x.new_empty(shape, dtype=dtype)

    result = SweepResult(
        value=room(batch, length, width),
        iterations=room(batch, length, dtype=torch.long),
        residual=room(batch, length),
        status=room(batch, length, dtype=torch.long),
        H=terms.H.to(dtype).clone(memory_format=torch.contiguous_format),
    )
    arguments = terms.read_by_kernels() | {
        "H": result.H,
        "value": result.value,
        "iterations": result.iterations,
        "residual": result.residual,
        "status": result.status,
        "p": room(2 * programs * plan.rows, count),
        "factors": room(programs * plan.rows, mixer.factor_room),
        "s": room(2 * programs * plan.rows, width),
        "vector": None if plan.block is None else room(programs * plan.rows, width),
    }
    sizes = {"batch": batch, "length": length, "width": width, "N": N, "count": count}
    sizes |= {"head": width // steps, "rates": terms.A.shape[1], "factor_room": mixer.factor_room}
    constants = {
        "mixer": mixer,
        "settings": settings,
        "NORM_EPSILON": 0.0 if terms.norm is None else float(terms.norm[2]),
        "ROWS": plan.rows,
        "STATES": triton.next_power_of_2(N),
        "BLOCK": plan.block,
        "GATED": terms.columns.sizes[4] > 0,
        "COLUMNS": _COLUMNS,
        "DEPTH": _DEPTH,
        "COMPUTE": COMPUTE.get(dtype, tl.float32),
        "PRECISION": precision(dtype),
    }
    return result, Launch(_sweep, programs, _WARPS, {**arguments, **sizes, **constants})


# Kernels. Places of a sequence or token are 64-bit, places inside it are 32-bit. Lanes that are not there are 0
# throughout; sequences that are not there are computed from whatever lies in memory, and nothing is written of them.
# What does not change in the loop over tokens is computed again for each: kept, it would fill the registers. So p and s
# have two places for a sequence, which tokens take in turn: of one place the assembler would keep all addresses.


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
def _sweep(
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
