"""Picard's iteration in Triton: a launch evaluates f on all tokens of all sequences and settles what follows from it.

Tokens of all sequences stand in one row after the other, in tiles of some rows, whatever sequences these are of.
Programs, one or two on each multiprocessor, take tiles in order by a ticket. Of a tile a program

    1. makes the iterate, y = delta f + (1 - delta) y of the launch before, and s of it, which reaches one row back;
    2. makes the coefficients from_x + s W^T, the weight coming from the L2 cache once for all rows;
    3. mixes, a few rows at a time, with the functions of `fpexp.ops.mixers`;
    4. scans, a block of channels after the other: a token after the other with the state in registers, from the carried
       state where a sequence begins, and else from what the tile before has left of the block;
    5. norms, and adds the residuals of its rows to those of their sequences by a maximum in memory.

The last program to finish settles the iteration: statuses, damping, whether all is over or a sequence is frozen. A
launch after the end returns at once, so that the host may launch some ahead and look seldom; counts and values are as
if it had looked after each. The damped iterate waits for the next launch since the damping hears of the residual first.

What the tile before leaves is waited for on a flag, block by block: its program holds an earlier ticket, so that it
runs already and waits for nobody later; and block i of a tile is scanned beside block i + 1 of the tile before. So a
sequence lasts as long as T / rows + d / channels blocks, where one program for each would take their product, and at
the batches of language would leave all but a few multiprocessors idle.

Roofline for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16, L2 some 5.5 TB/s; 132 SMs at 1.7 GHz, 16 exp2 and 128 float32
operations a clock each), for M = B T tokens, C columns of from_x, S of them with a part from s, weights of w bytes:

    memory      (16 d + w C) M bytes: the old f, x and from_x come, y and f go; 4 d M more where delta < 1
    L2          w S d M / 32 bytes of weights; coefficients and mixed tokens, 4 (4 C + 2 d) M, where they fit in it
    operations  2 S d M on tensor cores, d N M exp2, 6 d N M in float32 (Kronecker: and 2 (d1 + d2) d + d1^3 + d2^3)

In microseconds an iteration of Householder r = 1 in bfloat16, predicted, not measured:

    size                              memory  tensor cores  exp2  weights from L2  the tiles' chain  predicted
    cpu    B 256, T 16, d 128             3         0          2          1               -           25 to 40
    gpu    B 64, T 1024, d 512          157        46        149        208             160         700 to 1000
    words  B 512, T 16, d 1024           39        22         37        100               -          300 to 500
    paper  B 2, T 2048, d 2048 (gate)    43        88         37        390             350         800 to 1000
    copy   B 128, T 128, d 2048, N 32   156       180        298        805             100        1800 to 2500

The chain is T / 32 + d / channels blocks of 32 tokens, some 150 clocks a token and 2 us to hand over; it hides behind
other sequences where there are many. Weights from L2 cost most: their floor falls with more rows in a tile, whose
coefficients then leave the cache (at d 1024 they fill it already: 2 x 132 programs x 460 kB). Plain torch makes 75
launches an iteration (Kronecker 89 by rows, 205 spectral) and two looks of the host: some 400 us at the size `cpu`,
whatever the GPU; at the others it passes over (M, d) some 30 times, 0.5 ms at the size `words`, so that no more than a
factor of two is expected there for Householder.

Compiled for sm_80, sm_90 and sm_100: 122 to 128 registers and 48 kB of shared memory, two programs to a multiprocessor,
with weights of 16 bits; 162 to 254 registers and one program with float32 weights, and for Kronecker at d 2048. No
spills at the sizes of `fpexp.bench.launches`; at a width of 33, which no vector load divides, 88 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.backend import say_once
from fpexp.ops.fixed_point_iteration import IterationResult, IterationSettings
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
from fpexp.ops.pieces.triton import MULTIPROCESSORS
from fpexp.status import Status

AHEAD = 4
"""Launches between two looks of the host at whether all is over: a look costs as much as one or two of the smallest."""

_LEAST = 16
"""Rows of a tile and channels of a weight's block at least, for tensor cores."""

_ROWS = 32
"""Of a tile: each row more saves reading the weight, and costs room for coefficients in the caches."""

_TILE = 4096
"""Numbers of a tile in registers at most: 16 a thread."""

_WARPS = 8

_REGISTERS = 128
"""Of a thread at most, so that a multiprocessor has room for two programs, one of which loads while the other computes.

Each stage is a function of its own to the compiler, which else lets all of them together have twice as many. Where
these would spill (products of float32 weights and large factors do), a program has as many as it wants, and the
multiprocessor for itself.
"""

_LARGEST = 8192
"""Numbers of a token's channels or of a Kronecker factor at most: 32 a thread, of several at a time."""

_PAIRED = 1024
"""Numbers of a Kronecker factor at most where two programs have room; more would spill."""

_ALIGNED = 4
"""Places of numbers of a sequence come in so many, 16 bytes at least: all begin where a compiler knows it."""

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


@dataclass(frozen=True)
class Plan:
    """What is known when a kernel is compiled: sizes of tiles, the form of f, and the rules of damping and stopping.

    `group` rows are mixed at a time, `channels` x `states` is a block of the state, `columns` x `depth` one of the
    weight. `alike`: A is the same for all N.
    """

    rows: int
    group: int
    channels: int
    states: int
    columns: int
    depth: int
    head_size: int
    alike: bool
    gated: bool
    epsilon: float
    precision: str
    tolerance: float
    relative: bool
    divergence_limit: float
    together: bool
    stop_early: bool
    damping: float
    damping_decay: float
    patience: int

    @classmethod
    def of(cls, terms: SweepTerms, mixer: Mixer, settings: IterationSettings) -> Plan:
        """Choose sizes that fit a program's registers and shared memory."""
        batch, length, width = terms.x.shape
        N = terms.H.shape[-1]
        rows = max(_LEAST, min(_ROWS, triton.next_power_of_2(batch * length)))
        states = triton.next_power_of_2(N)
        numbers = mixer.largest if mixer.lanes1 == 1 else 2 * mixer.largest
        return cls(
            rows=rows,
            group=max(1, min(rows, _TILE // numbers)),
            channels=min(max(1, _TILE // states), triton.next_power_of_2(width)),
            states=states,
            columns=64,
            depth=max(_LEAST, min(128 // terms.weight.element_size(), triton.next_power_of_2(width))),
            head_size=width // terms.columns.sizes[3],
            alike=terms.A.shape[1] == 1,
            gated=terms.columns.sizes[4] > 0,
            epsilon=0.0 if terms.norm is None else terms.norm[2],
            precision=precision(terms.x.dtype),
            tolerance=settings.tolerance,
            relative=settings.relative,
            divergence_limit=settings.divergence_limit,
            together=settings.together,
            stop_early=settings.stop_early,
            damping=settings.damping,
            damping_decay=settings.damping_decay,
            patience=settings.patience,
        )


@torch.no_grad()
def iterate(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> IterationResult | None:
    """See `fpexp.ops.fixed_point_iteration`. float32 and float64; other types are computed in float32.

    None, and said once, where a program could not hold a token's channels or a factor of its mixer.
    """
    mixer = Mixer.of(form, terms.columns, terms.x.shape[2])
    if mixer.largest > _LARGEST:
        say_once(f"backend=triton has no iteration for {form} at an inner width of {terms.x.shape[2]}: it is in torch")
        return None
    launch, result, stopped = prepare(terms, form, settings)
    for launched in range(1, settings.max_iterations + 1):
        launch.run()
        looks = settings.stop_early and launched % AHEAD == 0 and launched < settings.max_iterations
        if looks and stopped.item():
            break
    return result()


def launches(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> dict[str, Launch]:
    """What an iteration launches; terms of meta tensors will do to compile it."""
    return {"iteration": prepare(terms, form, settings)[0]}


def prepare(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> tuple[Launch, Any, Tensor]:
    """Return what makes an iteration, what returns the result of those that were made, and whether they are over."""
    batch, length, width = terms.x.shape
    total, count, N = batch * length, terms.from_x.shape[-1], terms.H.shape[-1]
    if total > 2**31 - 2**16:  # a ticket past the end still counts rows
        raise ValueError(f"{batch} sequences of {length} tokens: an iteration takes less than 2^31 tokens")
    mixer = Mixer.of(form, terms.columns, width)
    plan = Plan.of(terms, mixer, settings)
    dtype = torch.float64 if terms.x.dtype == torch.float64 else torch.float32
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    tiles, blocks = triton.cdiv(total, plan.rows), triton.cdiv(width, plan.channels)
    pairs = terms.weight.element_size() == 2 and (mixer.lanes1 == 1 or mixer.largest <= _PAIRED)
    programs = min(tiles, (2 if pairs else 1) * _multiprocessors(terms.x.device))

    def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return terms.x.new_empty(shape, dtype=dtype)

    places = _ALIGNED * triton.cdiv(batch, _ALIGNED)
    zeros = terms.x.new_zeros(4 + 2 * places + tiles * blocks, dtype=torch.int32)
    control, frozen, stalled, passed = zeros.split([4, places, places, tiles * blocks])
    worst, largest = terms.x.new_zeros(2, places, dtype=bits)
    y, f = room(2, batch, length, width), room(2, batch, length, width)
    residual, delta, best = room(3, places)
    iterations, status = room(2, places, dtype=torch.long)
    norm_weight, norm_bias, _ = terms.norm or (None, None, 0.0)
    given = {
        "from_x": terms.from_x,
        "weight": terms.weight,
        "x": terms.x,
        "A": terms.A,
        "D": terms.D,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "carried": terms.y,
        "state": terms.H,
        "mask": terms.mask,
    }
    arguments: dict[str, Any] = {
        **{name: None if tensor is None else tensor.detach().contiguous() for name, tensor in given.items()},
        "y": y,
        "f": f,
        "between": room(tiles if plan.rows % length else 0, width, N),
        "passed": passed,
        "s": room(programs, plan.rows, width, dtype=terms.weight.dtype),
        "p": room(programs, plan.rows, count),
        "mixed": room(programs, plan.rows, width),
        "factors": room(programs, plan.group, mixer.factor_room),
        "control": control,
        "worst": worst,
        "largest": largest,
        "residual": residual,
        "status": status,
        "iterations": iterations,
        "frozen": frozen,
        "delta": delta,
        "best": best,
        "stalled": stalled,
        "batch": batch,
        "length": length,
        "width": width,
        "count": count,
        "N": N,
        "most": settings.max_iterations,
        "allowed": _allowed(batch, settings.outlier_quantile),
        "mixer": mixer,
        "plan": plan,
        "COMPUTE": COMPUTE.get(dtype, tl.float32),
    }

    def result() -> IterationResult:
        of_sequences = (found[:batch] for found in (iterations, residual, status))
        value = torch.where((iterations[:batch] % 2 == 1)[:, None, None], y[1], y[0])
        return IterationResult(value, *of_sequences)

    return Launch(_iteration, programs, _WARPS, arguments, _REGISTERS if pairs else None), result, control[1]


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _allowed(batch: int, outlier_quantile: float) -> int:
    """How many sequences may be left when a batch stops, by the comparison that `fpexp.fixed_point.iterate` makes."""
    return int((torch.arange(1, batch + 1) <= outlier_quantile * batch).sum())


# Kernel. The place of a row is 64-bit. What a thread stores and another loads has a barrier in between.


@triton.jit(do_not_specialize=["batch", "length", "most", "allowed"])
def _iteration(
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
