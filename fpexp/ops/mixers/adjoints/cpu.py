"""What a channel mixer's product passes back, for kernels to call; laid out as in `fpexp.ops.mixers.cpu`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from fpexp.ops.l2norm import EPSILON
from fpexp.ops.mixers.cpu import DPLR, HOUSEHOLDER, KRONECKER, add, dot, factor_size, left_product
from fpexp.ops.simd.cpu import LANES, broadcast, copy, get, lane_sum, load, ones, put, sigmoid, spread, store, zeros

_compiled = njit(error_model="numpy")


@_compiled
def l2normalise_back(u: Any, du: Any, at: int, count: int, scale: float) -> None:
    """du <- scale (du - u (u . du)), the gradient of what `l2normalise` was given."""
    total = zeros(load(u, at))
    for j in range(0, count, LANES):
        total = total + load(u, at + j) * load(du, at + j)
    overlap = broadcast(lane_sum(total))
    for j in range(0, count, LANES):
        store(du, at + j, broadcast(scale) * (load(du, at + j) - load(u, at + j) * overlap))


@_compiled
def silu_back(v: Any, gradient: Any) -> Any:
    """The gradient of what silu was given."""
    s = sigmoid(v)
    return gradient * s * (ones(v) + v * (ones(v) - s))


@_compiled
def room_to_go_back(mixer: Any) -> int:
    """Return how many numbers the scratch of `apply_back` has."""
    size = mixer.rows * mixer.padded
    if mixer.kind == KRONECKER:
        n1, n2 = mixer.size1, mixer.columns
        return 7 * size + n1 * mixer.padded1 + n2 * mixer.padded
    return (mixer.size1 + 2) * size + mixer.padded1


@_compiled
def apply_back(mixer: Any, p: Any, lanes: Any, compact: Any, F: Any, v: Any, g: Any, dp: Any, scratch: Any) -> None:
    """Given v and the gradient g of Q v: g <- the gradient of v, dp[:coefficients] = that of the coefficients p."""
    if mixer.kind == KRONECKER:
        _kronecker_back(mixer, p, compact, F, v, g, dp, scratch)
    else:
        _low_rank_back(mixer, p, lanes, F, v, g, dp, scratch)


@_compiled
def _low_rank_back(mixer: Any, p: Any, lanes: Any, F: Any, v: Any, g: Any, dp: Any, scratch: Any) -> None:
    rank, padded, width = mixer.size1, mixer.padded, mixer.columns
    weights, du, da = rank * padded, (rank + 1) * padded, (rank + 2) * padded
    for j in range(0, padded, LANES):
        store(scratch, rank * padded + j, load(v, j))
        if mixer.kind == DPLR:
            store(scratch, j, load(g, j))
    if mixer.kind == HOUSEHOLDER:  # scratch[i + 1] is what reflection i was given
        for i in range(rank - 1, 0, -1):
            for j in range(0, padded, LANES):
                store(scratch, i * padded + j, load(scratch, (i + 1) * padded + j))
            overlap = dot(F, i * padded, scratch, i * padded, padded)
            add(scratch, i * padded, -F[weights + i] * overlap, F, i * padded, padded)
    for i in range(rank):
        u, a = i * padded, F[weights + i]
        given = (i + 1) * padded if mixer.kind == HOUSEHOLDER else rank * padded
        seen = g if mixer.kind == HOUSEHOLDER else scratch  # of DPLR, the gradient as it came, in scratch[0]
        overlap, back = dot(F, u, scratch, given, padded), dot(F, u, seen, 0, padded)
        for j in range(0, padded, LANES):
            sums = broadcast(overlap) * load(seen, j) + broadcast(back) * load(scratch, given + j)
            store(scratch, du + j, broadcast(-a) * sums)
        scratch[da + i] = -overlap * back
        add(g, 0, -a * back, F, u, padded)
        total = zeros(load(F, u))
        for j in range(0, padded, LANES):
            raw = load(p, i * width + j) * load(lanes, j)
            raw = raw * sigmoid(raw)
            total = total + raw * raw
        scale = p.dtype.type(1) / np.sqrt(lane_sum(total) + p.dtype.type(EPSILON))
        projection = zeros(load(F, u))
        for j in range(0, padded, LANES):
            projection = projection + load(F, u + j) * load(scratch, du + j)
        along = broadcast(lane_sum(projection))
        for j in range(0, padded, LANES):
            raw_gradient = broadcast(scale) * (load(scratch, du + j) - load(F, u + j) * along)
            store(scratch, du + j, silu_back(load(p, i * width + j), raw_gradient))
        copy(scratch, du, dp, i * width, width)
    a_max = p.dtype.type(mixer.a_max)
    for i in range(rank):
        a = F[weights + i]
        dp[rank * width + i] = scratch[da + i] * a * (p.dtype.type(1) - a / a_max)


@_compiled
def _kronecker_back(mixer: Any, p: Any, compact: Any, F: Any, v: Any, g: Any, dp: Any, scratch: Any) -> None:
    """out = v - a_max diag(w1) G1 (V G2) diag(w2), V the rows of v; G1 and G2 are symmetric.

    S = V G2, M = S diag(w2), R = G1 M; dR, dM, dS in turn.
    """
    n1, n2, padded1, padded = mixer.size1, mixer.columns, mixer.padded1, mixer.padded
    G1, w1, second = n1 * padded1, 2 * n1 * padded1, factor_size(n1, padded1)
    G2, w2 = second + n2 * padded, second + 2 * n2 * padded
    size = n1 * padded
    S, M, R, dR, dM, dS = 0, size, 2 * size, 3 * size, 4 * size, 5 * size
    Z1 = 6 * size
    Z2 = Z1 + n1 * padded1
    back = Z2 + n2 * padded
    left_product(v, 0, n1, padded, F, G2, n2, padded, scratch, S)
    for i in range(0, size, padded):
        for block in range(0, padded, LANES):
            store(scratch, M + i + block, load(scratch, S + i + block) * load(F, w2 + block))
    left_product(F, G1, n1, padded1, scratch, M, n1, padded, scratch, R)
    dw1, dw2 = w1 + 3 * padded1, w2 + 3 * padded  # in the vectors of scratch
    scale = p.dtype.type(-mixer.a_max)
    for i in range(n1):
        row = i * padded
        put(F, dw1 + i, scale * dot(g, row, scratch, R + row, padded))
        weight = broadcast(scale * F[w1 + i])
        for block in range(row, row + padded, LANES):
            store(scratch, dR + block, weight * load(g, block))
    left_product(F, G1, n1, padded1, scratch, dR, n1, padded, scratch, dM)
    for block in range(0, padded, LANES):
        total = zeros(load(g, 0))
        for i in range(block, size, padded):
            total = total + load(scratch, dM + i) * load(scratch, S + i)
            store(scratch, dS + i, load(scratch, dM + i) * load(F, w2 + block))
        store(F, dw2 + block, total)
    left_product(scratch, dS, n1, padded, F, G2, n2, padded, scratch, back)
    for block in range(0, size, LANES):
        store(g, block, load(g, block) + load(scratch, back + block))
    for i in range(n1):  # Z1 = dG1 + dG1^T, G1 having had dR M^T
        for j in range(i + 1):
            total = zeros(load(g, 0))
            for block in range(0, padded, LANES):
                at, other = i * padded + block, j * padded + block
                total = total + load(scratch, dR + at) * load(scratch, M + other)
                total = total + load(scratch, M + at) * load(scratch, dR + other)
            entry = lane_sum(total)
            put(scratch, Z1 + i * padded1 + j, entry)
            put(scratch, Z1 + j * padded1 + i, entry)
    for block in range(0, padded, LANES):  # Z2 = V^T dS + dS^T V, four rows of it at a time
        fours = n2 - n2 % 4
        for k in range(0, fours, 4):
            sum0 = sum1 = sum2 = sum3 = zeros(load(g, 0))
            for i in range(0, size, padded):
                right, left = load(scratch, dS + i + block), load(v, i + block)
                sum0 = sum0 + spread(v, i + k) * right + spread(scratch, dS + i + k) * left
                sum1 = sum1 + spread(v, i + k + 1) * right + spread(scratch, dS + i + k + 1) * left
                sum2 = sum2 + spread(v, i + k + 2) * right + spread(scratch, dS + i + k + 2) * left
                sum3 = sum3 + spread(v, i + k + 3) * right + spread(scratch, dS + i + k + 3) * left
            out = Z2 + k * padded + block
            store(scratch, out, sum0)
            store(scratch, out + padded, sum1)
            store(scratch, out + 2 * padded, sum2)
            store(scratch, out + 3 * padded, sum3)
        for k in range(fours, n2):
            total = zeros(load(g, 0))
            for i in range(0, size, padded):
                total = total + spread(v, i + k) * load(scratch, dS + i + block)
                total = total + spread(scratch, dS + i + k) * load(v, i + block)
            store(scratch, Z2 + k * padded + block, total)
    end = _kronecker_factor_back(mixer, p, 0, n1, padded1, compact, F, 0, scratch, Z1, dp)
    _kronecker_factor_back(mixer, p, end, n2, padded, compact, F, second, scratch, Z2, dp)


@_compiled
def _kronecker_factor_back(
    mixer: Any, p: Any, at: int, n: int, padded: int, compact: Any, F: Any, factor: int, scratch: Any, Z: int, dp: Any
) -> int:
    """Of one factor, from dw in its vector of scratch and Z = dG + dG^T to the gradient of its coefficients."""
    real = p.dtype.type
    G, w = factor + n * padded, factor + 2 * n * padded
    diagonal, v, dw = w + padded, w + 2 * padded, w + 3 * padded
    if mixer.by_rows:  # w = s |row|^-1, v holds |row|^-1
        for block in range(0, padded, LANES):
            inverse, s = load(F, v + block), load(F, diagonal + block)
            d = load(F, dw + block)
            store(F, w + block, zeros(d) - inverse * inverse * inverse * d * s)
            store(F, dw + block, d * inverse)
        for i in range(n):
            for block in range(0, padded, LANES):
                both = broadcast(F[w + i]) + load(F, w + block)
                at_row = i * padded + block
                store(scratch, Z + at_row, load(scratch, Z + at_row) + both * load(F, G + at_row))
    else:  # w = s / (v . G v + eps)
        scale, total = F[dw + padded], dot(F, dw, F, w, padded)
        for block in range(0, padded, LANES):
            store(F, dw + block, load(F, dw + block) * broadcast(scale))
        for i in range(n):
            weight = broadcast(real(-2) * total * scale) * spread(F, v + i)
            for block in range(0, padded, LANES):
                at_row = Z + i * padded + block
                store(scratch, at_row, load(scratch, at_row) + weight * load(F, v + block))
    for i in range(n):
        s = get(F, diagonal + i)
        put(dp, at + i, get(F, dw + i) * s * (real(1) - s))
    for j in range(n):  # row j of U^T, for which G = U U^T gives dU^T = U^T Z
        for block in range(0, padded, LANES):
            total_row = zeros(load(F, G))
            for k in range(j + 1):
                total_row = total_row + spread(F, factor + j * padded + k) * load(scratch, Z + k * padded + block)
            store(F, G + j * padded + block, total_row)
    entry = 0
    for i in range(n):
        for j in range(i, n):
            put(compact, entry, get(F, G + j * padded + i))
            entry += 1
    for i in range(0, entry, LANES):
        store(compact, i, silu_back(load(p, at + n + i), load(compact, i)))
    copy(compact, 0, dp, at + n, entry)
    return at + n + entry
