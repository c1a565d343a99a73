"""The sequential sweep of FP-RNN in numba, built as that of FP-Mamba is (`fpexp.ops.fixed_point_sweep.cpu`).

A task takes ROWS sequences through all their tokens. Of a token, what s contributes to the mixer's coefficients is one
product for all of them; then each by itself makes the factors of Q and iterates

    h_t = base + g * (Q_t (v_t - h_t) + h_t),   base = lambda_t * h_{t-1},   g = 1 - lambda_t

in the first cache. No result depends on the other sequences of a task.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numba import njit
from torch import Tensor

from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.mixers import KnownTokens, MixedTokens, MixerForm
from fpexp.ops.mixers.cpu import (
    Mixer,
    eigenvector_room,
    factor_room,
    keep_eigenvectors,
    make_factors,
    place,
    take,
    triangle_room,
)
from fpexp.ops.simd.cpu import LANES, accumulate, aligned, cleared, copy, load, sigmoid, softplus, store, zeros
from fpexp.ops.sweep import SweepResult, SweepSettings
from fpexp.ops.sweep.cpu import ROWS, Rules, iterate_token, panels, times_panels
from fpexp.ops.vector_sweep import VectorTerms
from fpexp.status import Status

_CONVERGED = int(Status.CONVERGED)
_STEPS_OF_A_TOKEN = 64  # inner steps a channel: a rough mean


@torch.no_grad()
def sweep(terms: VectorTerms, form: MixerForm, settings: SweepSettings) -> SweepResult:
    """Solve all tokens in order. float32 and float64; other types are computed in float32."""
    dtype = compute_type(terms.v.dtype)
    batch, length, width = terms.v.shape
    mixer = Mixer.of(form, terms.columns, width)
    mask = torch.ones(batch, length, dtype=torch.bool) if terms.mask is None else terms.mask
    value = torch.empty(batch, length, width, dtype=dtype)
    h = torch.empty(batch, 1, width, dtype=dtype)
    iterations, status = (torch.empty(batch, length, dtype=torch.long) for _ in range(2))
    residual = torch.empty(batch, length, dtype=dtype)
    known = _room_to_keep(terms, mixer, value) if terms.keep else None
    nothing = value.new_empty(0)
    kept = (
        (known.tokens.mixed, known.tokens.delta, known.from_s, known.eigenvectors)
        if known
        else (nothing,) * len(_Kept._fields)
    )
    given = (tensor.to(dtype) for tensor in (terms.from_x, panels(terms.weight), terms.v, terms.y, terms.h))
    _sweep.run(
        -(-batch // ROWS),
        terms.v.numel() * _STEPS_OF_A_TOKEN,
        mixer,
        (batch, length),
        Rules.of(settings, norm_epsilon=None),
        _Given(*map(flat, (*given, mask))),
        _Found(*map(flat, (h, value, iterations, residual, status))),
        terms.keep,
        _Kept(*map(flat, kept)),
    )
    return SweepResult(value, iterations, residual, status, h, known)


class _Given(NamedTuple):
    """Flat arrays, `weight` in panels; `y` and `h` are the state before the first token."""

    from_x: Any
    weight: Any
    v: Any
    y: Any
    h: Any
    mask: Any


class _Found(NamedTuple):
    """Flat arrays; `h` is the last token's image."""

    h: Any
    value: Any
    iterations: Any
    residual: Any
    status: Any


class _Kept(NamedTuple):
    """The flat arrays of `KnownTokens` that are not empty here."""

    mixed: Any
    delta: Any
    from_s: Any
    eigenvectors: Any


def _room_to_keep(terms: VectorTerms, mixer: Mixer, value: Tensor) -> KnownTokens:
    def room(size: int) -> Tensor:
        return value.new_empty(*value.shape[:-1], size)

    width = value.shape[-1]
    tokens = MixedTokens(room(width), room(width), room(0), room(0), room(0))
    return KnownTokens(value, tokens, room(terms.columns.from_s[0]), room(eigenvector_room(mixer)))


@njit(error_model="numpy")
def _read_token(
    mixer: Any, p: Any, v: Any, at: int, lanes: Any, compact: Any, F: Any, v_t: Any, logit: Any, h: Any, h_at: int,
    base: Any, g: Any,
) -> None:  # fmt: skip
    """From the coefficients p of token number `at` to the factors of Q, v_t, lambda's logit, base and g."""
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    make_factors(mixer, p, lanes, compact, True, F)
    place(v, at * width, mixer, v_t)
    place(p, mixer.coefficients, mixer, logit)
    for j in range(0, columns, LANES):
        w = load(logit, j)
        store(base, j, sigmoid(w) * load(h, h_at + j))
        store(g, j, sigmoid(zeros(w) - w) * load(lanes, j))


def _sweep_groups(
    first: int, last: int, mixer: Any, sizes: Any, rules: Any, given: Any, found: Any, keep: bool, kept: Any
) -> None:
    batch, length = sizes
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    from_x, weight, v, carried, carried_h, mask = given
    last_h, value, iterations, residual, status = found
    kept_mixed, kept_delta, kept_from_s, kept_vectors = kept
    tokens = batch * length
    stride, count = weight.size // width, from_x.size // tokens
    vectors = kept_vectors.size // tokens

    lanes = cleared(columns, v)
    for i in range(mixer.rows):
        lanes[i * mixer.padded : i * mixer.padded + mixer.columns] = 1
    F, v_t, logit = cleared(factor_room(mixer), v), cleared(columns, v), cleared(columns, v)
    base, g, mixed, y = cleared(columns, v), cleared(columns, v), cleared(columns, v), cleared(columns, v)
    s, products, h = cleared(ROWS * width, v), aligned(ROWS * stride, v), cleared(ROWS * columns, v)
    p, compact, row_h = cleared(count + LANES, v), aligned(triangle_room(mixer), v), cleared(columns, v)
    f, scratch = aligned(columns, v), aligned(2 * columns, v)

    for group in range(first, last):
        rows = min(ROWS, batch - group * ROWS)
        for row in range(rows):
            sequence = group * ROWS + row
            copy(carried, sequence * width, s, row * width, width)
            place(carried_h, sequence * width, mixer, row_h)
            copy(row_h, 0, h, row * columns, columns)
        for t in range(length):
            if stride:
                times_panels(s, rows, width, weight, products, stride)
            for row in range(rows):
                at = (group * ROWS + row) * length + t
                if not mask[at]:
                    s[row * width : (row + 1) * width] = 0
                    value[at * width : (at + 1) * width] = 0
                    iterations[at], residual[at], status[at] = 1, 0, _CONVERGED
                    continue
                copy(from_x, at * count, p, 0, count)
                if stride:
                    accumulate(products, row * stride, p, 0, mixer.coefficients)
                _read_token(mixer, p, v, at, lanes, compact, F, v_t, logit, h, row * columns, base, g)
                iterations[at], residual[at], status[at] = iterate_token(
                    mixer, rules, F, v_t, base, g, False, g, lanes, g, g, f, scratch, mixed, y
                )
                copy(f, 0, h, row * columns, columns)
                take(y, mixer, value, at * width)
                copy(value, at * width, s, row * width, width)
                if keep:
                    take(mixed, mixer, kept_mixed, at * width)
                    for j in range(0, columns, LANES):
                        store(logit, j, softplus(load(logit, j)))
                    take(logit, mixer, kept_delta, at * width)
                    if stride:
                        copy(products, row * stride, kept_from_s, at * mixer.coefficients, mixer.coefficients)
                    if vectors:
                        keep_eigenvectors(mixer, F, kept_vectors, at * vectors)
        for row in range(rows):
            copy(h, row * columns, row_h, 0, columns)
            take(row_h, mixer, last_h, (group * ROWS + row) * width)


_sweep = Kernel(njit, _sweep_groups, nogil=True, error_model="numpy")
