"""One token at a time in SIMD registers, forward and backward by hand; a task is a token.

The backward makes the factors of Q again, and keeps from the forward only the top eigenvectors of Kronecker factors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.mixers import Columns, KnownTokens, MixedTokens, MixerForm
from fpexp.ops.mixers.adjoints.cpu import apply_back, l2normalise_back, room_to_go_back, silu_back
from fpexp.ops.mixers.cpu import (
    Mixer,
    apply,
    eigenvector_room,
    factor_room,
    keep_eigenvectors,
    l2normalise,
    make_factors,
    place,
    recall_eigenvectors,
    run_table,
    take,
    triangle_room,
)
from fpexp.ops.simd.cpu import LANES, accumulate, copy, copy_padded, load, sigmoid, softplus, store

_STEPS_OF_A_TOKEN = 64  # inner steps a channel: a rough mean


def mix_tokens(
    from_x: Tensor,
    s: Tensor,
    weight: Tensor,
    x: Tensor,
    y: Tensor,
    columns: Columns,
    form: MixerForm,
    known: KnownTokens | None = None,
) -> MixedTokens:
    """See `fpexp.ops.token_mixing`."""
    dtype = compute_type(x.dtype)
    from_x, x, y = (tensor.to(dtype).contiguous() for tensor in (from_x, x, y))
    arguments = (from_x, s.to(weight.dtype), weight, x, y)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments):
        mixed, delta, b, c, gate = _MixTokens.apply(*arguments, columns, form, known)
    else:
        mixed, delta, b, c, gate = (known or _mix(*arguments, columns, form, keep=False)).tokens
    return MixedTokens(mixed, delta, b, c, gate if columns.sizes[4] else None)


def _mix(
    from_x: Tensor, s: Tensor, weight: Tensor, x: Tensor, y: Tensor, columns: Columns, form: MixerForm, keep: bool
) -> KnownTokens:
    """Compute; `keep`: the eigenvectors too."""
    mixer, N, steps = Mixer.of(form, columns, x.shape[-1]), columns.sizes[1], columns.sizes[3]
    leading = x.shape[:-1]
    from_s = functional.linear(s, weight).to(x.dtype)
    outputs = [x.new_empty(*leading, size) for size in (x.shape[-1], steps, N, N, columns.sizes[4])]
    eigenvectors = x.new_empty(*leading, eigenvector_room(mixer) if keep else 0)
    _forward.run(
        leading.numel(),
        x.numel() * _STEPS_OF_A_TOKEN,
        mixer,
        leading.numel(),
        N,
        run_table(columns),
        *map(flat, (from_x, from_s, x, y, *outputs, eigenvectors)),
    )
    return KnownTokens(y, MixedTokens(*outputs), from_s, eigenvectors)


class _MixTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        from_x: Tensor,
        s: Tensor,
        weight: Tensor,
        x: Tensor,
        y: Tensor,
        columns: Columns,
        form: MixerForm,
        known: KnownTokens | None,
    ) -> tuple[Tensor | None, ...]:
        known = known or _mix(from_x, s, weight, x, y, columns, form, keep=True)
        ctx.save_for_backward(from_x, s, weight, x, y, known.from_s, known.eigenvectors)
        ctx.columns, ctx.form = columns, form
        return tuple(known.tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from_x, s, weight, x, y, from_s, eigenvectors = ctx.saved_tensors
        given = [gradient.contiguous() for gradient in gradients[:4]]
        given.append(x.new_empty(0) if gradients[4] is None else gradients[4].contiguous())
        d_from_x, dx, dy = torch.empty_like(from_x), torch.empty_like(x), torch.empty_like(y)
        runs = ctx.columns.runs()
        tokens = x.shape[:-1].numel()
        _backward.run(
            tokens,
            x.numel() * _STEPS_OF_A_TOKEN,
            Mixer.of(ctx.form, ctx.columns, x.shape[-1]),
            tokens,
            ctx.columns.sizes[1],
            run_table(ctx.columns),
            *map(flat, (from_x, from_s, x, y, eigenvectors, *given, d_from_x, dx, dy)),
        )
        parts = [d_from_x[..., target : target + size] for target, _, size in runs]
        d_from_s = parts[0] if len(parts) == 1 else torch.cat([*parts, from_x[..., :0]], dim=-1)
        d_from_s = d_from_s.flatten(0, -2).to(weight.dtype)
        ds = (d_from_s @ weight).view_as(s) if ctx.needs_input_grad[1] else None
        return d_from_x, ds, d_from_s.T @ s.flatten(0, -2), dx, dy, None, None, None


@njit(error_model="numpy")
def _coefficients(token: int, count: int, others: int, from_x: Any, from_s: Any, runs: Any, p: Any) -> None:
    """p = from_x + from_s, of one token."""
    copy(from_x, token * count, p, 0, count)
    for run in range(runs.shape[0]):
        accumulate(from_s, token * others + runs[run, 1], p, runs[run, 0], runs[run, 2])


@njit(error_model="numpy")
def _real_lanes(mixer: Any, like: Any) -> Any:
    lanes = np.zeros(mixer.padded, like.dtype)
    lanes[: mixer.columns] = 1
    return lanes


def _mix_tokens(
    first: int, last: int, mixer: Any, tokens: int, N: int, runs: Any, from_x: Any, from_s: Any, x: Any, y: Any,
    mixed: Any, delta: Any, b: Any, c: Any, gate: Any, kept: Any,
) -> None:  # fmt: skip
    width, padded = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    count, others = from_x.size // tokens, from_s.size // tokens
    vectors, steps = kept.size // tokens, delta.size // tokens
    b_at, c_at, delta_at = mixer.coefficients, mixer.coefficients + N, mixer.coefficients + 2 * N
    lanes = _real_lanes(mixer, x)
    p = np.zeros(count + LANES, x.dtype)
    unit = np.zeros(N + -N % LANES, x.dtype)
    row = np.zeros(width + LANES, x.dtype)
    F = np.zeros(factor_room(mixer), x.dtype)
    compact = np.empty(triangle_room(mixer), x.dtype)
    v, y_t, scratch = np.zeros(padded, x.dtype), np.zeros(padded, x.dtype), np.empty(2 * padded, x.dtype)
    for token in range(first, last):
        _coefficients(token, count, others, from_x, from_s, runs, p)
        make_factors(mixer, p, lanes, compact, True, F)
        if vectors:
            keep_eigenvectors(mixer, F, kept, token * vectors)
        place(x, token * width, mixer, v)
        place(y, token * width, mixer, y_t)
        for j in range(0, padded, LANES):
            store(v, j, load(v, j) - load(y_t, j))
        apply(mixer, F, v, scratch)
        for j in range(0, padded, LANES):
            store(v, j, load(v, j) + load(y_t, j))
        take(v, mixer, mixed, token * width)
        for at, out in ((b_at, b), (c_at, c)):
            copy_padded(p, at, unit, 0, N)
            l2normalise(unit, 0, unit.size)
            copy(unit, 0, out, token * N, N)
        for j in range(0, steps, LANES):
            store(row, j, softplus(load(p, delta_at + j)))
        copy(row, 0, delta, token * steps, steps)
        if gate.size:
            for j in range(0, width, LANES):
                z = load(p, delta_at + steps + j)
                store(row, j, z * sigmoid(z))
            copy(row, 0, gate, token * width, width)


def _mix_tokens_back(
    first: int, last: int, mixer: Any, tokens: int, N: int, runs: Any, from_x: Any, from_s: Any, x: Any, y: Any,
    kept: Any, d_mixed: Any, d_delta: Any, d_b: Any, d_c: Any, d_gate: Any, d_from_x: Any, dx: Any, dy: Any,
) -> None:  # fmt: skip
    width, padded = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    count, others = from_x.size // tokens, from_s.size // tokens
    vectors, steps = kept.size // tokens, d_delta.size // tokens
    b_at, c_at, delta_at = mixer.coefficients, mixer.coefficients + N, mixer.coefficients + 2 * N
    lanes = _real_lanes(mixer, x)
    p, dp = np.zeros(count + LANES, x.dtype), np.zeros(count + LANES, x.dtype)
    unit, d_unit = np.zeros(N + -N % LANES, x.dtype), np.zeros(N + -N % LANES, x.dtype)
    row = np.zeros(width + LANES, x.dtype)
    F = np.zeros(factor_room(mixer), x.dtype)
    compact = np.empty(triangle_room(mixer), x.dtype)
    v, y_t, g = np.zeros(padded, x.dtype), np.zeros(padded, x.dtype), np.zeros(padded, x.dtype)
    scratch = np.zeros(room_to_go_back(mixer), x.dtype)
    for token in range(first, last):
        start = token * width
        _coefficients(token, count, others, from_x, from_s, runs, p)
        if vectors:
            recall_eigenvectors(mixer, kept, token * vectors, F)
        make_factors(mixer, p, lanes, compact, False, F)
        place(x, start, mixer, v)
        place(y, start, mixer, y_t)
        place(d_mixed, start, mixer, g)
        for j in range(0, padded, LANES):
            store(v, j, load(v, j) - load(y_t, j))
        apply_back(mixer, p, lanes, compact, F, v, g, dp, scratch)
        take(g, mixer, dx, start)
        place(d_mixed, start, mixer, v)
        for j in range(0, padded, LANES):
            store(v, j, load(v, j) - load(g, j))
        take(v, mixer, dy, start)
        for at, given in ((b_at, d_b), (c_at, d_c)):
            copy_padded(p, at, unit, 0, N)
            copy_padded(given, token * N, d_unit, 0, N)
            scale = l2normalise(unit, 0, unit.size)
            l2normalise_back(unit, d_unit, 0, unit.size, scale)
            copy(d_unit, 0, dp, at, N)
        copy(d_delta, token * steps, row, 0, steps)
        for j in range(0, steps, LANES):
            store(row, j, load(row, j) * sigmoid(load(p, delta_at + j)))
        copy(row, 0, dp, delta_at, steps)
        if d_gate.size:
            copy(d_gate, start, row, 0, width)
            for j in range(0, width, LANES):
                store(row, j, silu_back(load(p, delta_at + steps + j), load(row, j)))
            copy(row, 0, dp, delta_at + steps, width)
        copy(dp, 0, d_from_x, token * count, count)


_forward = Kernel(njit, _mix_tokens, nogil=True, error_model="numpy")
_backward = Kernel(njit, _mix_tokens_back, nogil=True, error_model="numpy")
