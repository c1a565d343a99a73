"""The sweep in numba: one pass over time, parallel over sequences, each token iterated in registers and L1.

For each token one matrix product of torch adds what s contributes; one kernel then builds the mixer, decays the state,
reads the base off it, iterates the token map to its own end and writes the state.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload
from torch.nn import functional

from fpexp.ops.fixed_point_sweep import MixerForm, SweepResult, SweepSettings, SweepTerms
from fpexp.ops.kernel import Kernel
from fpexp.status import Status

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba does not compile")

_KINDS = {"householder": 0, "dplr": 1, "kronecker": 2}
_CONVERGED, _CAP_REACHED = int(Status.CONVERGED), int(Status.CAP_REACHED)
_DIVERGED, _NON_FINITE = int(Status.DIVERGED), int(Status.NON_FINITE)
_EPSILON = 1e-6
_TINY = 1e-15
_STEPS_OF_AN_ITERATION = 64  # inner steps a channel that solving takes beside decaying the state: a rough mean


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult:
    """Solve all tokens in order. float32 and float64; other types are computed in float32."""
    dtype = terms.x.dtype if terms.x.dtype == torch.float64 else torch.float32
    batch, length, width = terms.x.shape
    parts = [terms.coefficients, terms.b, terms.c, terms.delta] + ([] if terms.z is None else [terms.z])
    x_parts = torch.cat([part.to(dtype) for part in parts], dim=-1).transpose(0, 1).contiguous()
    sizes = [part.shape[-1] for part in parts]
    copies = _column_runs(sizes, terms.weight_sizes)
    weight = terms.weight.to(dtype).mT
    x = terms.x.to(dtype).transpose(0, 1).contiguous()
    A, D = terms.A.to(dtype).contiguous().numpy(), terms.D.to(dtype).contiguous().numpy()
    norm_weight, norm_bias, norm_epsilon = _norm_arrays(terms, width, dtype)
    H = terms.H.to(dtype).clone(memory_format=torch.contiguous_format)
    mask = torch.ones(length, batch, dtype=torch.bool) if terms.mask is None else terms.mask.T.contiguous()
    value = torch.empty(length, batch, width, dtype=dtype)
    iterations = torch.empty(length, batch, dtype=torch.long)
    residual = torch.empty(length, batch, dtype=dtype)
    status = torch.empty(length, batch, dtype=torch.long)
    delta_start = sum(sizes[:3])
    s = terms.y[:, 0].to(dtype)
    work = batch * width * (A.shape[1] + _STEPS_OF_AN_ITERATION)
    for t in range(length):
        p = x_parts[t]
        if copies:
            from_s = s @ weight
            for target, source in copies:
                p[:, target] += from_s[:, source]
        p[:, delta_start : delta_start + width] = functional.softplus(p[:, delta_start : delta_start + width])
        if terms.z is not None:
            functional.silu(p[:, delta_start + width :], inplace=True)
        _solve.run(
            batch,
            work,
            _KINDS[form.kind],
            form.sizes[0],
            form.sizes[1],
            form.a_max,
            form.rows,
            form.power_iterations,
            p.numpy(),
            x[t].numpy(),
            terms.z is not None,
            A,
            D,
            H.numpy(),
            terms.norm is not None,
            norm_weight,
            norm_bias,
            norm_epsilon,
            mask[t].numpy(),
            settings.tolerance,
            settings.relative,
            settings.inner_max_iterations,
            settings.damping,
            settings.damping_decay,
            settings.patience,
            settings.divergence_limit,
            value[t].numpy(),
            iterations[t].numpy(),
            residual[t].numpy(),
            status[t].numpy(),
        )
        s = value[t]
    return SweepResult(
        value.transpose(0, 1).contiguous(),
        iterations.T.contiguous(),
        residual.T.contiguous(),
        status.T.contiguous(),
        H,
    )


def _column_runs(sizes: list[int], weight_sizes: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """Return which columns of x's part each run of columns of s's part is added to."""
    runs: list[tuple[slice, slice]] = []
    target = source = 0
    for size, present in zip(sizes, weight_sizes, strict=False):
        if present:
            if runs and runs[-1][0].stop == target:
                runs[-1] = (slice(runs[-1][0].start, target + size), slice(runs[-1][1].start, source + size))
            else:
                runs.append((slice(target, target + size), slice(source, source + size)))
            source += size
        target += size
    return runs


def _norm_arrays(terms: SweepTerms, width: int, dtype: torch.dtype) -> tuple[Any, Any, float]:
    if terms.norm is None:
        return np.ones(width), np.zeros(width), 0.0
    weight, bias, epsilon = terms.norm
    return weight.to(dtype).contiguous().numpy(), bias.to(dtype).contiguous().numpy(), epsilon


_FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered; NaN and infinity keep their meaning."""


def _helper(function: Any) -> Any:
    """Compile a function that kernels call; its code is part of theirs, and of their cache."""
    return njit(fastmath=_FASTMATH)(function)


@intrinsic
def _float_from_bits(typing_context, bits):
    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), code


def _exp(x):
    """e^x. In float32 by range reduction and a polynomial (Cephes), within 2 ulp, which LLVM turns into SIMD code."""
    raise NotImplementedError("compiled code only")


@overload(_exp)
def _exp_of_type(x):
    if x == types.float64:
        return lambda x: math.exp(x)
    if x == types.float32:
        return lambda x: _exp_float32(x)
    return None


@_helper
def _exp_float32(x):
    clamped = min(max(x, np.float32(-87.3)), np.float32(88.0))
    k = np.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    r = clamped - k * np.float32(0.693359375)
    r = r + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    value = p * _float_from_bits((np.int32(k) + np.int32(127)) << np.int32(23))  # type: ignore[call-arg]
    value = np.float32(0) if x < np.float32(-87.3) else value
    value = np.float32(np.inf) if x > np.float32(88.0) else value
    return value if x == x else x


@_helper
def _low_rank_factors(p, rank, width, a_max, u, a):
    """u_i = l2norm(silu(.)), a_i = a_max sigmoid(.)"""
    one = p.dtype.type(1)
    for i in range(rank):
        total = p.dtype.type(0)
        for j in range(width):
            v = p[i * width + j]
            v = v / (one + _exp(-v))
            u[i, j] = v
            total += v * v
        scale = one / np.sqrt(total + p.dtype.type(_EPSILON))
        for j in range(width):
            u[i, j] *= scale
        a[i] = a_max / (one + _exp(-p[rank * width + i]))


@_helper
def _kronecker_factor(p, offset, n, rows, power_iterations, factor):
    """factor = diag(sigmoid(.)) normalise(U U^T), U upper triangular from silu(.); returns the offset after it."""
    one, zero, epsilon = p.dtype.type(1), p.dtype.type(0), p.dtype.type(_EPSILON)
    upper = np.zeros((n, n), p.dtype)
    entry = offset + n
    for i in range(n):
        for j in range(i, n):
            v = p[entry]
            upper[i, j] = v / (one + _exp(-v))
            entry += 1
    for i in range(n):
        for j in range(i + 1):
            total = zero
            for k in range(i, n):
                total += upper[i, k] * upper[j, k]
            factor[i, j] = total
            factor[j, i] = total
    if not rows:
        scale = one / (_largest_eigenvalue(factor, n, power_iterations) + epsilon)
    for i in range(n):
        if rows:
            total = epsilon
            for j in range(n):
                total += factor[i, j] * factor[i, j]
            scale = one / np.sqrt(total)
        weight = scale / (one + _exp(-p[offset + i]))
        for j in range(n):
            factor[i, j] *= weight
    return entry


@_helper
def _largest_eigenvalue(gram, n, iterations):
    """Power iteration from the column of the largest diagonal entry."""
    start = 0
    for i in range(1, n):
        if gram[i, i] > gram[start, start]:
            start = i
    v = gram[start].copy()
    product = np.empty_like(v)
    _normalise(v)
    for _ in range(iterations):
        _symmetric_product(gram, v, product, n)
        v[:] = product
        _normalise(v)
    _symmetric_product(gram, v, product, n)
    total = gram.dtype.type(0)
    for i in range(n):
        total += v[i] * product[i]
    return total


@_helper
def _symmetric_product(gram, v, product, n):
    product[:] = gram.dtype.type(0)
    for i in range(n):
        for j in range(n):
            product[j] += gram[i, j] * v[i]


@_helper
def _normalise(v):
    """v / |v|, whatever its scale."""
    total = v.dtype.type(0)
    for i in range(v.shape[0]):
        total += v[i] * v[i]
    scale = v.dtype.type(1) / max(np.sqrt(total), v.dtype.type(_TINY))
    for i in range(v.shape[0]):
        v[i] *= scale


@_helper
def _l2normalise(v):
    total = v.dtype.type(_EPSILON)
    for i in range(v.shape[0]):
        total += v[i] * v[i]
    scale = v.dtype.type(1) / np.sqrt(total)
    for i in range(v.shape[0]):
        v[i] *= scale


@_helper
def _mix(kind, u, a, k1, k2t, a_max, v, scratch):
    """v <- Q v, in place."""
    zero = v.dtype.type(0)
    width = v.shape[0]
    if kind == 0:
        for i in range(u.shape[0] - 1, -1, -1):
            overlap = zero
            for j in range(width):
                overlap += u[i, j] * v[j]
            overlap *= a[i]
            for j in range(width):
                v[j] -= overlap * u[i, j]
    elif kind == 1:
        scratch[:] = v
        for i in range(u.shape[0]):
            overlap = zero
            for j in range(width):
                overlap += u[i, j] * scratch[j]
            overlap *= a[i]
            for j in range(width):
                v[j] -= overlap * u[i, j]
    else:
        d1, d2 = k1.shape[0], k2t.shape[0]
        scratch[:] = zero
        for i in range(d1):
            for k in range(d1):
                weight = k1[i, k]
                for j in range(d2):
                    scratch[i * d2 + j] += weight * v[k * d2 + j]
        for i in range(d1):
            for k in range(d2):
                weight = a_max * scratch[i * d2 + k]
                for j in range(d2):
                    v[i * d2 + j] -= weight * k2t[k, j]


def _solve_tokens(
    first, last,
    kind, size1, size2, a_max_, rows, power_iterations, p, x, gated, A, D, H, normed, norm_weight, norm_bias,
    norm_epsilon, mask, tolerance, relative, cap, damping, damping_decay, patience, limit, value, iterations,
    residual, status,
):  # fmt: skip
    width = x.shape[1]
    N = A.shape[1]
    real = x.dtype.type
    one, zero, epsilon = real(1), real(0), real(_EPSILON)
    a_max = real(a_max_)
    coefficients = p.shape[1] - 2 * N - width - (width if gated else 0)
    for sequence in range(first, last):
        if not mask[sequence]:
            value[sequence] = zero
            iterations[sequence], residual[sequence], status[sequence] = 1, zero, _CONVERGED
            continue
        row, x_t, y = p[sequence], x[sequence], value[sequence]
        u = np.empty((size1 if kind < 2 else 0, width), x.dtype)
        a = np.empty(size1 if kind < 2 else 0, x.dtype)
        k1 = np.empty((size1, size1) if kind == 2 else (0, 0), x.dtype)
        k2t = np.empty((size2, size2) if kind == 2 else (0, 0), x.dtype)
        if kind < 2:
            _low_rank_factors(row, size1, width, a_max, u, a)
        else:
            offset = _kronecker_factor(row, 0, size1, rows, power_iterations, k1)
            k2 = np.empty((size2, size2), x.dtype)
            _kronecker_factor(row, offset, size2, rows, power_iterations, k2)
            k2t[:] = k2.T
        b = row[coefficients : coefficients + N]
        c = row[coefficients + N : coefficients + 2 * N]
        _l2normalise(b)
        _l2normalise(c)
        delta = row[coefficients + 2 * N : coefficients + 2 * N + width]
        gate = row[coefficients + 2 * N + width :]

        base = np.empty(width, x.dtype)
        g = np.empty(width, x.dtype)
        overlap = zero
        for n in range(N):
            overlap += b[n] * c[n]
        state = H[sequence]
        for j in range(width):
            total = zero
            for n in range(N):
                h = state[j, n] * _exp(delta[j] * A[j, n])
                state[j, n] = h
                total += h * c[n]
            base[j] = total
            g[j] = overlap * delta[j] + D[j]

        mixed = np.empty(width, x.dtype)
        f = np.empty(width, x.dtype)
        scratch = np.empty(width, x.dtype)
        y[:] = zero
        step, best, stalled = real(damping), real(np.inf), 0
        for iteration in range(1, cap + 1):
            for j in range(width):
                mixed[j] = x_t[j] - y[j]
            _mix(kind, u, a, k1, k2t, a_max, mixed, scratch)
            total = zero
            for j in range(width):
                mixed[j] += y[j]
                f[j] = base[j] + g[j] * mixed[j]
                if gated:
                    f[j] *= gate[j]
                total += f[j]
            if normed:
                mean = total / real(width)
                total = zero
                for j in range(width):
                    f[j] -= mean
                    total += f[j] * f[j]
                scale = one / np.sqrt(total / real(width) + real(norm_epsilon))
                for j in range(width):
                    f[j] = f[j] * scale * norm_weight[j] + norm_bias[j]
            difference, size, total = zero, zero, zero
            for j in range(width):
                difference = max(difference, abs(f[j] - y[j]))
                size = max(size, abs(f[j]))
                total += f[j]
            found = difference / max(size, epsilon) if relative else difference
            if not (math.isfinite(total) and math.isfinite(found)):
                code, found = _NON_FINITE, real(np.nan)
            elif size > real(limit):
                code = _DIVERGED
            elif found <= real(tolerance):
                code = _CONVERGED
            else:
                code = _CAP_REACHED
            iterations[sequence], residual[sequence], status[sequence] = iteration, found, code
            if code != _CAP_REACHED or iteration == cap:
                break
            if found < best:
                best, stalled = found, 0
            else:
                stalled += 1
                if stalled >= patience:
                    step, stalled = step * real(damping_decay), 0
            for j in range(width):
                y[j] += step * (f[j] - y[j])
        for j in range(width):
            write = delta[j] * mixed[j]
            for n in range(N):
                state[j, n] += write * b[n]


_solve = Kernel(njit, _solve_tokens, fastmath=_FASTMATH, nogil=True)
