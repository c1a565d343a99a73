"""The sequential sweep in numba: a task takes a few sequences through all their tokens, with no call in between.

Of a token, what s = y_{t-1} contributes is a small matrix product for ROWS sequences at a time, so that a weight that
is loaded serves all of them. Then each sequence by itself, its state and all else in the first cache: the state decays
and is read out once, the token's equation is iterated as often as it needs, and what y writes into the state waits for
the next token's decay. No result depends on the other sequences of a task.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.fixed_point_sweep import SweepResult, SweepSettings, SweepTerms
from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.mixers import KnownTokens, MixedTokens, MixerForm
from fpexp.ops.mixers.cpu import (
    Mixer,
    apply,
    eigenvector_room,
    factor_room,
    keep_eigenvectors,
    l2normalise,
    make_factors,
    place,
    run_table,
    take,
    triangle_room,
)
from fpexp.ops.simd.cpu import (
    LANES,
    absolute,
    accumulate,
    aligned,
    at_least,
    broadcast,
    copy,
    copy_padded,
    exp,
    lane_max,
    lane_sum,
    load,
    sigmoid,
    softplus,
    spread,
    store,
    zeros,
)
from fpexp.status import Status

ROWS = 4  # sequences of a task: with PANEL columns, the sums of a product fill the registers
PANEL = 2 * LANES

_CONVERGED, _CAP_REACHED = int(Status.CONVERGED), int(Status.CAP_REACHED)
_DIVERGED, _NON_FINITE = int(Status.DIVERGED), int(Status.NON_FINITE)
_EPSILON = 1e-6
_STEPS_OF_AN_ITERATION = 64  # inner steps a channel that solving takes beside decaying the state: a rough mean


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult:
    """Solve all tokens in order. float32 and float64; other types are computed in float32."""
    dtype = compute_type(terms.x.dtype)
    batch, length, width = terms.x.shape
    mixer = Mixer.of(form, terms.columns)
    N = terms.A.shape[1]
    columns = mixer.rows * mixer.padded
    H = terms.H.to(dtype).clone(memory_format=torch.contiguous_format)
    mask = torch.ones(batch, length, dtype=torch.bool) if terms.mask is None else terms.mask.contiguous()
    value = torch.empty(batch, length, width, dtype=dtype)
    iterations, status = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
    residual = torch.empty(batch, length, dtype=dtype)
    norm_weight, norm_bias, norm_epsilon = terms.norm or (terms.D, terms.D, 0.0)
    by_channel = [_padded_rows(vector.to(dtype), mixer) for vector in (terms.D, norm_weight, norm_bias)]
    A = _padded_rows(terms.A.to(dtype).T, mixer).view(N, columns // LANES, LANES).transpose(0, 1)
    groups = -(-batch // ROWS)
    known = _room_to_keep(terms, mixer, value) if terms.keep else None
    _sweep.run(
        groups,
        terms.x.numel() * (N + _STEPS_OF_AN_ITERATION),
        mixer,
        (batch, length, N),
        (terms.norm is not None, float(norm_epsilon)),
        (settings.tolerance, settings.relative, settings.inner_max_iterations, settings.divergence_limit),
        (settings.damping, settings.damping_decay, settings.patience),
        flat(terms.from_x.to(dtype)),
        run_table(terms.columns),
        flat(_panels(terms.weight.to(dtype))),
        flat(terms.x.to(dtype)),
        flat(A),
        *map(flat, by_channel),
        flat(terms.y.to(dtype)),
        flat(mask),
        *map(flat, (H, value, iterations, residual, status)),
        terms.keep,
        *(flat(H[:0] if tensor is None else tensor) for tensor in _kept(known)),
    )
    return SweepResult(value, iterations, residual, status, H, known)


def _room_to_keep(terms: SweepTerms, mixer: Mixer, value: Tensor) -> KnownTokens:
    width, sizes = value.shape[-1], terms.columns.sizes

    def room(size: int) -> Tensor:
        return value.new_empty(*value.shape[:-1], size)

    tokens = MixedTokens(room(width), room(width), room(sizes[1]), room(sizes[2]), room(sizes[4]))
    return KnownTokens(value, tokens, room(sum(terms.columns.from_s)), room(eigenvector_room(mixer)))


def _kept(known: KnownTokens | None) -> tuple[Tensor | None, ...]:
    return (*known.tokens, known.from_s, known.eigenvectors) if known else (None,) * 7


def _padded_rows(vectors: Tensor, mixer: Mixer) -> Tensor:
    """(..., d) -> (..., rows * padded)"""
    rows = vectors.unflatten(-1, (mixer.rows, mixer.columns))
    return functional.pad(rows, (0, mixer.padded - mixer.columns)).flatten(-2)


def _panels(weight: Tensor) -> Tensor:
    """Return the weights on s (rows, d) as (panels, d, PANEL), padded with zeros."""
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2)


@njit(error_model="numpy")
def _product(s: Any, rows: int, width: int, weight: Any, out: Any, stride: int) -> None:
    """out (ROWS, stride) = s (rows, width) times the panels of `weight`; unused rows of s count for nothing."""
    for panel in range(stride // PANEL):
        start, column = panel * width * PANEL, panel * PANEL
        if rows == 1:
            low = high = zeros(load(weight, 0))
            for k in range(width):
                low = low + spread(s, k) * load(weight, start + k * PANEL)
                high = high + spread(s, k) * load(weight, start + k * PANEL + LANES)
            store(out, column, low)
            store(out, column + LANES, high)
            continue
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = zeros(load(weight, 0))
        for k in range(width):
            w0, w1 = load(weight, start + k * PANEL), load(weight, start + k * PANEL + LANES)
            s0, s1 = spread(s, k), spread(s, width + k)
            s2, s3 = spread(s, 2 * width + k), spread(s, 3 * width + k)
            a0, a1 = a0 + s0 * w0, a1 + s0 * w1
            b0, b1 = b0 + s1 * w0, b1 + s1 * w1
            c0, c1 = c0 + s2 * w0, c1 + s2 * w1
            d0, d1 = d0 + s3 * w0, d1 + s3 * w1
        store(out, column, a0)
        store(out, column + LANES, a1)
        store(out, stride + column, b0)
        store(out, stride + column + LANES, b1)
        store(out, 2 * stride + column, c0)
        store(out, 2 * stride + column + LANES, c1)
        store(out, 3 * stride + column, d0)
        store(out, 3 * stride + column + LANES, d1)


@njit(error_model="numpy")
def _decay_and_read(
    H: Any, at: int, columns: int, N: int, delta: Any, A: Any, write: Any, b_before: Any, c: Any, base: Any
) -> None:
    """H <- exp(delta A) (H + write b_before^T) and base = H c, in tiles (N, LANES)."""
    for block in range(0, columns, LANES):
        step, before = load(delta, block), load(write, block)
        total = zeros(step)
        for n in range(N):
            i = block * N + n * LANES
            h = (load(H, at + i) + before * spread(b_before, n)) * exp(step * load(A, i))
            store(H, at + i, h)
            total = total + h * spread(c, n)
        store(base, block, total)


@njit(error_model="numpy")
def _iterate(
    mixer: Any, width: int, norm: Any, stopping: Any, damping: Any, F: Any, x: Any, base: Any, g: Any, gated: bool,
    gate: Any, lanes: Any, norm_weight: Any, norm_bias: Any, mixed: Any, f: Any, scratch: Any, y: Any,
) -> tuple[int, float, int]:  # fmt: skip
    """Solve y = norm(gate (base + g mixed)), mixed = Q (x - y) + y, from 0; iterations, residual and status."""
    real = x.dtype.type
    tolerance, relative, cap, limit = stopping
    damping_start, damping_decay, patience = damping
    normed, norm_epsilon = norm
    columns = mixer.rows * mixer.padded
    step, best, stalled = real(damping_start), real(np.inf), 0
    for j in range(0, columns, LANES):
        store(y, j, zeros(load(x, j)))
    iteration = 0
    while True:
        iteration += 1
        for j in range(0, columns, LANES):
            store(mixed, j, load(x, j) - load(y, j))
        apply(mixer, F, mixed, scratch)
        total = zeros(load(x, 0))
        for j in range(0, columns, LANES):
            m = load(mixed, j) + load(y, j)
            store(mixed, j, m)
            value = load(base, j) + load(g, j) * m
            if gated:
                value = value * load(gate, j)
            store(f, j, value)
            total = total + value
        if normed:
            mean = broadcast(lane_sum(total) / real(width))
            total = zeros(mean)
            for j in range(0, columns, LANES):
                value = (load(f, j) - mean) * load(lanes, j)
                store(f, j, value)
                total = total + value * value
            scale = broadcast(real(1) / np.sqrt(lane_sum(total) / real(width) + real(norm_epsilon)))
            for j in range(0, columns, LANES):
                store(f, j, load(f, j) * scale * load(norm_weight, j) + load(norm_bias, j))
        difference = size = total = zeros(load(x, 0))
        for j in range(0, columns, LANES):
            value = load(f, j)
            difference = at_least(absolute(value - load(y, j)), difference)
            size = at_least(absolute(value), size)
            total = total + (value - value)  # 0, or NaN where the value is not finite
        largest, residual = lane_max(size), lane_max(difference)
        if relative:
            residual = residual / max(largest, real(_EPSILON))
        if not (lane_sum(total) == 0 and math.isfinite(residual)):
            return iteration, real(np.nan), _NON_FINITE
        if largest > real(limit):
            return iteration, residual, _DIVERGED
        if residual <= real(tolerance):
            return iteration, residual, _CONVERGED
        if iteration == cap:
            return iteration, residual, _CAP_REACHED
        if residual < best:
            best, stalled = residual, 0
        else:
            stalled += 1
            if stalled >= patience:
                step, stalled = step * real(damping_decay), 0
        for j in range(0, columns, LANES):
            store(y, j, load(y, j) + broadcast(step) * (load(f, j) - load(y, j)))


def _sweep_groups(
    first: int, last: int, mixer: Any, sizes: Any, norm: Any, stopping: Any, damping: Any, parts: Any, runs: Any,
    weight: Any, x: Any, A: Any, D: Any, norm_weight: Any, norm_bias: Any, carried: Any, mask: Any, H: Any, value: Any,
    iterations: Any, residual: Any, status: Any, keep: bool, kept_mixed: Any, kept_delta: Any, kept_b: Any,
    kept_c: Any, kept_gate: Any, kept_from_s: Any, kept_eigenvectors: Any,
) -> None:  # fmt: skip
    """`x` and what is kept have one row a token; `from_s` is at least as wide as what is kept of it."""
    batch, length, N = sizes
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    from_s = weight.size // width
    count = parts.size // (batch * length)
    b_at, c_at, delta_at = mixer.coefficients, mixer.coefficients + N, mixer.coefficients + 2 * N
    gated = count > delta_at + width
    N_padded = N + -N % LANES

    lanes = np.zeros(columns, x.dtype)
    lanes_of_row = np.zeros(mixer.padded, x.dtype)
    for i in range(mixer.rows):
        lanes[i * mixer.padded : i * mixer.padded + mixer.columns] = 1
    lanes_of_row[: mixer.columns] = 1
    s = np.zeros(ROWS * width, x.dtype)
    product = aligned(ROWS * from_s, x)
    p = np.zeros(count + LANES, x.dtype)
    F = aligned(factor_room(mixer), x)
    F[:] = 0
    compact = aligned(triangle_room(mixer), x)
    state = aligned(ROWS * columns * N, x)
    write = aligned(ROWS * columns, x)
    b = aligned(ROWS * N_padded, x)
    c = aligned(N_padded, x)
    c[:] = 0
    b_now = aligned(N_padded, x)
    b_now[:] = 0
    x_t, delta, gate = np.zeros(columns, x.dtype), np.zeros(columns, x.dtype), np.zeros(columns, x.dtype)
    y, base, g = aligned(columns, x), aligned(columns, x), aligned(columns, x)
    mixed, f = aligned(columns, x), aligned(columns, x)
    scratch = aligned(2 * columns, x)

    for group in range(first, last):
        rows = min(ROWS, batch - group * ROWS)
        for row in range(rows):
            sequence = group * ROWS + row
            copy(carried, sequence * width, s, row * width, width)
            _read_state(H, sequence * width * N, mixer, N, state, row * columns * N)
        write[:] = 0
        b[:] = 0
        for t in range(length):
            if from_s:
                _product(s, rows, width, weight, product, from_s)
            for row in range(rows):
                sequence = group * ROWS + row
                token = sequence * length + t
                if not mask[token]:
                    s[row * width : (row + 1) * width] = 0
                    value[token * width : (token + 1) * width] = 0
                    iterations[token], residual[token], status[token] = 1, 0, _CONVERGED
                    continue
                copy(parts, token * count, p, 0, count)
                for run in range(runs.shape[0]):
                    accumulate(product, row * from_s + runs[run, 1], p, runs[run, 0], runs[run, 2])
                make_factors(mixer, p, lanes_of_row, compact, True, F)
                copy_padded(p, b_at, b_now, 0, N)
                copy_padded(p, c_at, c, 0, N)
                l2normalise(b_now, 0, N_padded)
                l2normalise(c, 0, N_padded)
                place(x, token * width, mixer, x_t)
                place(p, delta_at, mixer, delta)
                if gated:
                    place(p, delta_at + width, mixer, gate)
                overlap = x.dtype.type(0)
                for n in range(N):
                    overlap += b_now[n] * c[n]
                for j in range(0, columns, LANES):
                    step = softplus(load(delta, j)) * load(lanes, j)
                    store(delta, j, step)
                    store(g, j, broadcast(overlap) * step + load(D, j))
                    if gated:
                        z = load(gate, j)
                        store(gate, j, z * sigmoid(z))
                writes, b_before = write[row * columns : (row + 1) * columns], b[row * N_padded : (row + 1) * N_padded]
                _decay_and_read(state, row * columns * N, columns, N, delta, A, writes, b_before, c, base)
                done, left, code = _iterate(
                    mixer, width, norm, stopping, damping, F, x_t, base, g, gated, gate, lanes, norm_weight,
                    norm_bias, mixed, f, scratch, y,
                )  # fmt: skip
                if keep:
                    take(mixed, mixer, kept_mixed, token * width)
                    take(delta, mixer, kept_delta, token * width)
                    copy(b_now, 0, kept_b, token * N, N)
                    copy(c, 0, kept_c, token * N, N)
                    if gated:
                        take(gate, mixer, kept_gate, token * width)
                    real_from_s = kept_from_s.size // (batch * length)
                    copy(product, row * from_s, kept_from_s, token * real_from_s, real_from_s)
                    vectors = kept_eigenvectors.size // (batch * length)
                    if vectors:
                        keep_eigenvectors(mixer, F, kept_eigenvectors, token * vectors)
                for j in range(0, columns, LANES):
                    store(writes, j, load(delta, j) * load(mixed, j))
                copy(b_now, 0, b_before, 0, N_padded)
                take(y, mixer, value, token * width)
                copy(value, token * width, s, row * width, width)
                iterations[token], residual[token], status[token] = done, left, code
        for row in range(rows):
            sequence = group * ROWS + row
            for block in range(0, columns, LANES):
                for n in range(N):
                    i = (row * columns + block) * N + n * LANES
                    store(state, i, load(state, i) + load(write, row * columns + block) * spread(b, row * N_padded + n))
            _write_state(state, row * columns * N, mixer, N, H, sequence * width * N)


@njit(error_model="numpy")
def _read_state(H: Any, at: int, mixer: Any, N: int, state: Any, to: int) -> None:
    """From (d, N) to tiles (N, LANES) of padded channels."""
    state[to : to + mixer.rows * mixer.padded * N] = 0
    for i in range(mixer.rows):
        for j in range(mixer.columns):
            lane = i * mixer.padded + j
            tile = to + lane // LANES * LANES * N + lane % LANES
            for n in range(N):
                state[tile + n * LANES] = H[at + (i * mixer.columns + j) * N + n]


@njit(error_model="numpy")
def _write_state(state: Any, to: int, mixer: Any, N: int, H: Any, at: int) -> None:
    for i in range(mixer.rows):
        for j in range(mixer.columns):
            lane = i * mixer.padded + j
            tile = to + lane // LANES * LANES * N + lane % LANES
            for n in range(N):
                H[at + (i * mixer.columns + j) * N + n] = state[tile + n * LANES]


_sweep = Kernel(njit, _sweep_groups, nogil=True, error_model="numpy")
