"""The sequential sweep in Triton: a program takes a few sequences through all their tokens.

Docstring to come.
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
"""Sequences of a program at most; a result must not depend on the batch, so nor does this."""

_VECTOR = 4096
"""Numbers that the program's vectors over channels have at most, of which ten are in registers at a time."""

_STATE = 8192
"""Numbers of the program's states at most, where these stay in registers."""

_STATE_BLOCK = 8192
"""Numbers of the states that are read at a time, where they do not."""

_COLUMNS, _DEPTH = 64, 32
"""Of a block of weights: 8 KB in float32, four of which are on their way at a time."""

_EPSILON = tl.constexpr(1e-6)  # of `fpexp.fixed_point.iterate`
_UNCONVERGED, _CAP_REACHED = tl.constexpr(int(Status.UNCONVERGED)), tl.constexpr(int(Status.CAP_REACHED))
_DIVERGED, _NON_FINITE = tl.constexpr(int(Status.DIVERGED)), tl.constexpr(int(Status.NON_FINITE))
_CONVERGED = tl.constexpr(int(Status.CONVERGED))


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult | None:
    """Solve all tokens in order, or return None where a token's numbers would overflow the registers of a program.

    `SweepResult.known` is left out. What is not contiguous is copied.
    """
    mixer = Mixer.of(form, terms.columns, terms.x.shape[2])
    if not mixer.fits or mixer.lanes > _VECTOR:
        say_once(
            f"backend=triton has no sweep for {form} at an inner width of {terms.x.shape[2]}: it is solved in torch"
        )
        return None
    result, launch = prepare(terms, form, settings)
    launch.run()
    return result


def launches(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> dict[str, Launch]:
    """What a solve launches, by name; meta tensors will do to compile it."""
    return {"sweep": prepare(terms, form, settings)[1]}


class Plan(NamedTuple):
    """How many sequences a program takes, by how many warps, and how many channels of a state at a time.

    `block` is None where the states stay in registers.
    """

    rows: int
    warps: int
    block: int | None

    @classmethod
    def of(cls, lanes: int, states: int) -> Plan:
        """Return the plan for vectors of `lanes` and states of as many times `states` numbers."""
        rows = max(1, min(_ROWS, _VECTOR // lanes))
        numbers = rows * lanes * states
        on_chip = numbers <= _STATE
        return cls(rows, 8, None if on_chip else max(1, _STATE_BLOCK // (rows * states)))


def prepare(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> tuple[SweepResult, Launch]:
    """Return the result, not yet filled, and what fills it."""
    batch, length, width = terms.x.shape
    N, (count, steps) = terms.H.shape[2], (terms.from_x.shape[2], terms.columns.sizes[3])
    mixer = Mixer.of(form, terms.columns, width)
    plan = Plan.of(mixer.lanes, triton.next_power_of_2(N))
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
    norm_weight, norm_bias, norm_epsilon = terms.norm or (None, None, 0.0)
    given = {
        "from_x": terms.from_x,
        "weight": terms.weight,
        "x": terms.x,
        "A": terms.A,
        "D": terms.D,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "carried": terms.y,
        "mask": terms.mask,
    }
    arguments = {name: None if tensor is None else tensor.contiguous() for name, tensor in given.items()}
    arguments |= {
        "H": result.H,
        "value": result.value,
        "iterations": result.iterations,
        "residual": result.residual,
        "status": result.status,
        "p": room(programs * plan.rows, count),
        "factors": room(programs * plan.rows, mixer.factor_room),
        "s": room(programs * plan.rows, width),
        "vector": None if plan.block is None else room(programs * plan.rows, width),
    }
    sizes = {"batch": batch, "length": length, "width": width, "N": N, "count": count, "steps": steps}
    sizes |= {"rates": terms.A.shape[1], "factor_room": mixer.factor_room, "nothing": 0}
    constants = {
        "mixer": mixer,
        "settings": settings,
        "NORM_EPSILON": float(norm_epsilon),
        "ROWS": plan.rows,
        "STATES": triton.next_power_of_2(N),
        "BLOCK": plan.block,
        "GATED": terms.columns.sizes[4] > 0,
        "COLUMNS": _COLUMNS,
        "DEPTH": _DEPTH,
        "COMPUTE": COMPUTE.get(dtype, tl.float32),
        "PRECISION": precision(dtype),
    }
    return result, Launch(_sweep, programs, plan.warps, {**arguments, **sizes, **constants})


# Kernels. Places of a sequence or token are 64-bit, places inside it are 32-bit. Lanes and sequences that are not there
# are 0 throughout, but for coefficients and factors of the latter, which are never asked for.


@triton.jit
def _step(p, channel, there, solving, steps, width, N, mixer: tl.constexpr):
    """Delta (rows, channels); 0, which leaves a state as it is, where nothing is solved."""
    step = tl.load(p + mixer.coefficients + 2 * N + (channel // (width // steps))[None, :], there[None, :], other=0)
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
    H, A, p, vector, unit, sequence, exists, solving, steps, width, N, rates,
    mixer: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """For states that are not in registers: vector = (exp(Delta A) H) c, or H = exp(Delta A) H + vector b^T."""
    n = tl.arange(0, STATES)
    for start in range(0, width, BLOCK):
        channel = start + tl.arange(0, BLOCK)
        there = channel < width
        present = exists[:, None] & there[None, :]
        state_present = present[:, :, None] & (n < N)[None, None, :]
        in_row = vector + channel[None, :]
        in_state = H + sequence[:, None, None] * width * N + (channel[:, None] * N + n[None, :])[None, :, :]
        step = _step(p, channel, there, solving, steps, width, N, mixer)
        state = _decay(step, A, channel, there, n, N, rates) * tl.load(in_state, state_present, other=0)
        if WRITE:
            state += tl.load(in_row, present, other=0)[:, :, None] * unit[:, None, :]
            tl.store(in_state, state, state_present)
        else:
            tl.store(in_row, tl.sum(state * unit[:, None, :], 2), present)


@triton.jit
def _largest(f, y):
    """|f - y| and |f| of each row, infinite where f is not finite."""
    infinity = float("inf")
    difference, size = tl.abs(f - y), tl.abs(f)
    both = tl.join(tl.where(difference == difference, difference, infinity), tl.where(size == size, size, infinity))
    return tl.split(tl.max(both, 1))


@triton.jit
def _solve(
    factors, x, base, g, gate, solving, there, norm_weight, norm_bias, width, nothing, NORM_EPSILON: tl.constexpr,
    mixer: tl.constexpr, settings: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Iterate y = norm(gate (base + g mixed)), mixed = Q (x - y) + y, from 0; rows stop one by one."""
    y, mixed = tl.zeros_like(x), tl.zeros_like(x)
    residual = tl.sum(y, 1)
    best, step, stalled = residual + float("inf"), residual + settings.damping, tl.zeros_like(solving).to(tl.int32)
    iterations, status = stalled + 1, stalled + _CONVERGED
    going, iteration = solving, 0
    left = tl.sum(going.to(tl.int32), 0)
    while left > 0:
        iteration += 1
        mixed = apply(factors + iteration * nothing, x - y, mixer) + y
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


@triton.jit(do_not_specialize=["nothing"])
def _sweep(
    from_x, weight, x, A, D, norm_weight, norm_bias, carried, mask, H, value, iterations, residual, status,
    p, factors, s, vector, batch, length, width, N, count, steps, rates, factor_room, nothing,
    mixer: tl.constexpr, settings: tl.constexpr, NORM_EPSILON: tl.constexpr, ROWS: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, STATES)
    sequence = program * ROWS + tl.arange(0, ROWS)
    exists = sequence < batch
    channel, real = channels_of(mixer)
    present = exists[:, None] & real[None, :]
    state_present = present[:, :, None] & (n < N)[None, None, :]
    in_state = (channel[:, None] * N + n[None, :])[None, :, :]
    first_s = s + sequence[:, None] * width + channel[None, :]
    tl.store(first_s, tl.load(carried + sequence[:, None] * width + channel[None, :], present, other=0), present)
    if BLOCK is None:
        state = tl.load(H + sequence[:, None, None] * width * N + in_state, state_present, other=0)
    tl.debug_barrier()

    for t in range(length):
        again = t * nothing
        sequence = program * ROWS + again + tl.arange(0, ROWS)
        exists = sequence < batch
        present = exists[:, None] & real[None, :]
        p_t = p + sequence[:, None] * count
        s_t = s + sequence[:, None] * width
        factors_t = factors + sequence[:, None] * factor_room
        at = sequence * length + t
        solving = exists
        if mask is not None:
            solving = exists & (tl.load(mask + at, exists, other=0) != 0)
        x_row = from_x + at[:, None] * count
        add_from_s(x_row, s_t, weight, p_t, exists[:, None], count, width, mixer, COLUMNS, DEPTH, PRECISION)
        tl.debug_barrier()
        make_factors(p_t, factors_t, mixer)
        tl.debug_barrier()
        b = _unit(p_t, mixer.coefficients, n, N, solving)
        c = _unit(p_t, mixer.coefficients + N, n, N, solving)
        delta = _step(p_t, channel, real, solving, steps, width, N, mixer)
        skip = tl.load(D + again + channel, real, other=0).to(COMPUTE)
        g = tl.sum(b * c, 1)[:, None] * delta + skip[None, :]
        x_t = tl.load(x + at[:, None] * width + channel[None, :], present, other=0).to(COMPUTE)
        gate = x_t
        if GATED:
            z = tl.load(p_t + mixer.coefficients + 2 * N + steps + channel[None, :], real[None, :], other=0)
            gate = silu(z)
        vector_t = vector
        if BLOCK is None:
            state = _decay(delta, A + again, channel, real, n, N, rates) * state
            base = tl.sum(state * c[:, None, :], 2)
        else:
            vector_t = vector + sequence[:, None] * width
            _walk_states(
                H, A, p_t, vector_t, c, sequence, exists, solving, steps, width, N, rates, mixer, BLOCK, STATES,
                False,
            )  # fmt: skip
            tl.debug_barrier()
            base = tl.load(vector_t + channel[None, :], present, other=0)
        scale, shift = norm_weight, norm_bias
        if norm_weight is not None:
            scale = tl.load(norm_weight + again + channel, real, other=0).to(COMPUTE)
        if norm_bias is not None:
            shift = tl.load(norm_bias + again + channel, real, other=0).to(COMPUTE)
        y, mixed, done, left, code = _solve(
            factors_t, x_t, base, g, gate, solving, real, scale, shift, width, nothing, NORM_EPSILON, mixer, settings, GATED
        )  # fmt: skip
        delta = _step(p_t, channel, real, solving, steps, width, N, mixer)
        write = tl.where(solving[:, None], delta * mixed, 0)
        if BLOCK is None:
            b = _unit(p_t, mixer.coefficients, n, N, solving)
            state += write[:, :, None] * b[:, None, :]
        else:
            tl.debug_barrier()
            tl.store(vector_t + channel[None, :], write, present)
            tl.debug_barrier()
            b = _unit(p_t, mixer.coefficients, n, N, solving)
            _walk_states(
                H, A, p_t, vector_t, b, sequence, exists, solving, steps, width, N, rates, mixer, BLOCK, STATES,
                True,
            )  # fmt: skip
        tl.store(value + at[:, None] * width + channel[None, :], y, present)
        tl.store(s_t + channel[None, :], y, present)
        tl.store(iterations + at, done, exists)
        tl.store(residual + at, left, exists)
        tl.store(status + at, code, exists)
        tl.debug_barrier()
    if BLOCK is None:
        tl.store(H + sequence[:, None, None] * width * N + in_state, state, state_present)
