"""The sequential sweep in numba: a task takes a few sequences through all their tokens, with no call in between.

Of a token, what s = y_{t-1} contributes is a small matrix product for ROWS sequences at a time, so that a weight that
is loaded serves all of them. Then each sequence by itself, its state and all else in the first cache: the state decays
and is read out once, the token's equation is iterated as often as it needs, and what y writes into the state waits for
the next token's decay. No result depends on the other sequences of a task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.mixers import KnownTokens, MixedTokens, MixerForm
from fpexp.ops.mixers.cpu import (
    Mixer,
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
    accumulate,
    aligned,
    broadcast,
    cleared,
    copy,
    copy_padded,
    exp,
    load,
    sigmoid,
    softplus,
    spread,
    store,
    zeros,
)
from fpexp.ops.sweep import SweepResult, SweepSettings
from fpexp.ops.sweep.cpu import ROWS, Rules, iterate_token, panels, times_panels
from fpexp.status import Status

_CONVERGED = int(Status.CONVERGED)
_STEPS_OF_AN_ITERATION = 64  # inner steps a channel that solving takes beside decaying the state: a rough mean


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult:
    """Solve all tokens in order. float32 and float64; other types are computed in float32."""
    dtype = compute_type(terms.x.dtype)
    batch, length, width = terms.x.shape
    mixer = Mixer.of(form, terms.columns, width)
    N = terms.H.shape[-1]
    columns = mixer.rows * mixer.padded
    H = terms.H.to(dtype).clone(memory_format=torch.contiguous_format)
    mask = torch.ones(batch, length, dtype=torch.bool) if terms.mask is None else terms.mask.contiguous()
    value = torch.empty(batch, length, width, dtype=dtype)
    iterations, status = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
    residual = torch.empty(batch, length, dtype=dtype)
    norm_weight, norm_bias, norm_epsilon = terms.norm or (terms.D, None, 0.0)
    by_channel = [
        _padded_rows(vector.to(dtype), mixer)
        for vector in (terms.D, norm_weight, torch.zeros_like(terms.D) if norm_bias is None else norm_bias)
    ]
    A = _padded_rows(terms.A.to(dtype).T, mixer).view(-1, columns // LANES, LANES).transpose(0, 1)
    known = _room_to_keep(terms, mixer, value) if terms.keep else None
    rules = Rules.of(settings, float(norm_epsilon) if terms.norm is not None else None, norm_bias is not None)
    given = (terms.from_x.to(dtype), panels(terms.weight.to(dtype)), terms.x.to(dtype), A, *by_channel)
    nothing = value.new_empty(0)
    kept = (*known.tokens, known.from_s, known.eigenvectors) if known else (nothing,) * len(_Kept._fields)
    _sweep.run(
        -(-batch // ROWS),
        terms.x.numel() * (N + _STEPS_OF_AN_ITERATION),
        mixer,
        (batch, length, N, terms.columns.sizes[3]),
        rules,
        run_table(terms.columns),
        _Given(*map(flat, (*given, terms.y.to(dtype), mask))),
        _Found(*map(flat, (H, value, iterations, residual, status))),
        terms.keep,
        _Kept(*(flat(nothing if tensor is None else tensor) for tensor in kept)),
    )
    return SweepResult(value, iterations, residual, status, H, known)


# The kernel unpacks these at once, and its helpers take arrays one by one: numba counts a reference at each access to
# an array in a tuple, which cost a quarter of the sweep's time.


class _Given(NamedTuple):
    """Flat arrays: `weight` in panels, `A` in tiles (N or 1, LANES); D, the norm's weight and bias in padded rows."""

    from_x: Any
    weight: Any
    x: Any
    A: Any
    D: Any
    norm_weight: Any
    norm_bias: Any
    y: Any
    mask: Any


class _Found(NamedTuple):
    """Flat arrays; H holds the first state too."""

    H: Any
    value: Any
    iterations: Any
    residual: Any
    status: Any


class _Kept(NamedTuple):
    """The flat arrays of `KnownTokens`."""

    mixed: Any
    delta: Any
    b: Any
    c: Any
    gate: Any
    from_s: Any
    eigenvectors: Any


def _room_to_keep(terms: SweepTerms, mixer: Mixer, value: Tensor) -> KnownTokens:
    width, sizes = value.shape[-1], terms.columns.sizes

    def room(size: int) -> Tensor:
        return value.new_empty(*value.shape[:-1], size)

    tokens = MixedTokens(room(width), room(sizes[3]), room(sizes[1]), room(sizes[2]), room(sizes[4]))
    return KnownTokens(value, tokens, room(sum(terms.columns.from_s)), room(eigenvector_room(mixer)))


def _padded_rows(vectors: Tensor, mixer: Mixer) -> Tensor:
    """(..., d) -> (..., rows * padded)"""
    rows = vectors.unflatten(-1, (mixer.rows, mixer.columns))
    return functional.pad(rows, (0, mixer.padded - mixer.columns)).flatten(-2)


@njit(error_model="numpy")
def _decay_and_read(
    H: Any, at: int, columns: int, N: int, delta: Any, A: Any, write: Any, write_at: int, b_before: Any, b_at: int,
    c: Any, base: Any,
) -> None:  # fmt: skip
    """H <- exp(delta A) (H + write b_before^T) and base = H c, in tiles (N, LANES) from H[at] on.

    One decay serves all N where A has one.
    """
    alike = A.size == columns
    for block in range(0, columns, LANES):
        step, before = load(delta, block), load(write, write_at + block)
        total = zeros(step)
        if alike:
            decay = exp(step * load(A, block))
            for n in range(N):
                i = at + block * N + n * LANES
                h = (load(H, i) + before * spread(b_before, b_at + n)) * decay
                store(H, i, h)
                total = total + h * spread(c, n)
            store(base, block, total)
            continue
        for n in range(N):
            i = block * N + n * LANES
            h = (load(H, at + i) + before * spread(b_before, b_at + n)) * exp(step * load(A, i))
            store(H, at + i, h)
            total = total + h * spread(c, n)
        store(base, block, total)


@njit(error_model="numpy")
def _read_token(
    mixer: Any, N: int, steps: int, x: Any, D: Any, at: int, p: Any, gated: bool, lanes: Any, compact: Any, F: Any,
    x_t: Any, by_channel: Any, delta: Any, b: Any, c: Any, gate: Any, g: Any,
) -> None:  # fmt: skip
    """From the coefficients p of token number `at` to the factors of Q, x_t, delta, unit b and c, the gate and g."""
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    b_at, c_at, delta_at = mixer.coefficients, mixer.coefficients + N, mixer.coefficients + 2 * N
    make_factors(mixer, p, lanes, compact, True, F)
    copy_padded(p, b_at, b, 0, N)
    copy_padded(p, c_at, c, 0, N)
    l2normalise(b, 0, b.size)
    l2normalise(c, 0, c.size)
    place(x, at * width, mixer, x_t)
    if steps == width:
        place(p, delta_at, mixer, delta)
    else:
        head_size = width // steps
        for head in range(steps):
            by_channel[head * head_size : (head + 1) * head_size] = p[delta_at + head]
        place(by_channel, 0, mixer, delta)
    if gated:
        place(p, delta_at + steps, mixer, gate)
    overlap = p.dtype.type(0)
    for n in range(N):
        overlap += b[n] * c[n]
    for j in range(0, columns, LANES):
        step = softplus(load(delta, j)) * load(lanes, j)
        store(delta, j, step)
        store(g, j, broadcast(overlap) * step + load(D, j))
        if gated:
            z = load(gate, j)
            store(gate, j, z * sigmoid(z))


@njit(error_model="numpy")
def _keep_token(
    mixer: Any, N: int, steps: int, tokens: int, at: int, F: Any, mixed: Any, by_channel: Any, delta: Any, b: Any,
    c: Any, gate: Any, product: Any, row: int, kept: Any,
) -> None:  # fmt: skip
    """Copy what `KnownTokens` has of a token; what s contributes to it begins at product[row]."""
    width = mixer.rows * mixer.columns
    take(mixed, mixer, kept.mixed, at * width)
    if steps == width:
        take(delta, mixer, kept.delta, at * width)
    else:
        take(delta, mixer, by_channel, 0)
        for head in range(steps):
            kept.delta[at * steps + head] = by_channel[head * (width // steps)]
    copy(b, 0, kept.b, at * N, N)
    copy(c, 0, kept.c, at * N, N)
    if kept.gate.size:
        take(gate, mixer, kept.gate, at * width)
    from_s, vectors = kept.from_s.size // tokens, kept.eigenvectors.size // tokens
    copy(product, row, kept.from_s, at * from_s, from_s)
    if vectors:
        keep_eigenvectors(mixer, F, kept.eigenvectors, at * vectors)


def _sweep_groups(
    first: int, last: int, mixer: Any, sizes: Any, rules: Any, runs: Any, given: Any, found: Any, keep: bool, kept: Any
) -> None:
    batch, length, N, steps = sizes
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    from_x, weight, x, A, D, norm_weight, norm_bias, carried, mask = given
    H, value, iterations, residual, status = found
    from_s, count = weight.size // width, from_x.size // (batch * length)
    gated = count > mixer.coefficients + 2 * N + steps

    lanes = cleared(columns, x)
    for i in range(mixer.rows):
        lanes[i * mixer.padded : i * mixer.padded + mixer.columns] = 1
    F, b, c = cleared(factor_room(mixer), x), cleared(N + -N % LANES, x), cleared(N + -N % LANES, x)
    x_t, delta, gate = cleared(columns, x), cleared(columns, x), cleared(columns, x)
    by_channel = cleared(width + LANES, x)
    base, g, mixed, y = cleared(columns, x), cleared(columns, x), cleared(columns, x), cleared(columns, x)
    s, product = cleared(ROWS * width, x), aligned(ROWS * from_s, x)
    p, compact = cleared(count + LANES, x), aligned(triangle_room(mixer), x)
    f, scratch = aligned(columns, x), aligned(2 * columns, x)
    state = aligned(ROWS * columns * N, x)
    write, b_before = aligned(ROWS * columns, x), aligned(ROWS * b.size, x)  # not yet in the state

    for group in range(first, last):
        rows = min(ROWS, batch - group * ROWS)
        for row in range(rows):
            sequence = group * ROWS + row
            copy(carried, sequence * width, s, row * width, width)
            _read_state(H, sequence * width * N, mixer, N, state, row * columns * N)
        write[:] = 0
        b_before[:] = 0
        for t in range(length):
            if from_s:
                times_panels(s, rows, width, weight, product, from_s)
            for row in range(rows):
                at = (group * ROWS + row) * length + t
                if not mask[at]:
                    s[row * width : (row + 1) * width] = 0
                    value[at * width : (at + 1) * width] = 0
                    iterations[at], residual[at], status[at] = 1, 0, _CONVERGED
                    continue
                copy(from_x, at * count, p, 0, count)
                for run in range(runs.shape[0]):
                    accumulate(product, row * from_s + runs[run, 1], p, runs[run, 0], runs[run, 2])
                _read_token(
                    mixer, N, steps, x, D, at, p, gated, lanes, compact, F, x_t, by_channel, delta, b, c, gate, g
                )
                _decay_and_read(
                    state,
                    row * columns * N,
                    columns,
                    N,
                    delta,
                    A,
                    write,
                    row * columns,
                    b_before,
                    row * b.size,
                    c,
                    base,
                )
                done, left, code = iterate_token(
                    mixer, rules, F, x_t, base, g, gated, gate, lanes, norm_weight, norm_bias, f, scratch, mixed, y
                )
                if keep:
                    _keep_token(
                        mixer,
                        N,
                        steps,
                        batch * length,
                        at,
                        F,
                        mixed,
                        by_channel,
                        delta,
                        b,
                        c,
                        gate,
                        product,
                        row * from_s,
                        kept,
                    )
                for j in range(0, columns, LANES):
                    store(write, row * columns + j, load(delta, j) * load(mixed, j))
                copy(b, 0, b_before, row * b.size, b.size)
                take(y, mixer, value, at * width)
                copy(value, at * width, s, row * width, width)
                iterations[at], residual[at], status[at] = done, left, code
        for row in range(rows):
            for block in range(0, columns, LANES):
                last_write = load(write, row * columns + block)
                for n in range(N):
                    i = (row * columns + block) * N + n * LANES
                    store(state, i, load(state, i) + last_write * spread(b_before, row * b.size + n))
            _write_state(state, row * columns * N, mixer, N, H, (group * ROWS + row) * width * N)


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
