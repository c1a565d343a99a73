"""The channel mixers of one token in SIMD registers, for kernels to call: factors, product, and what they pass back.

Vectors over channels are padded with zeros to whole registers: to `rows` rows of `columns` channels, each of
`padded` lanes. Kronecker has d1 rows of d2 channels, the others one row. All factors of a token stand in one array F:

    householder, dplr   u (rank, padded), a (rank)
    kronecker           of each factor n x n: U^T and G = U U^T (n, padded), then vectors of `padded` lanes: its row
                        weights w, sigmoid of the diagonal, top eigenvector, scratch,
                        1 / (its eigenvalue + eps); K = diag(w) G

F must be zero at first: what is never written is padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from fpexp.ops.l2norm import EPSILON
from fpexp.ops.mixers import Columns, MixerForm
from fpexp.ops.simd.cpu import (
    LANES,
    broadcast,
    copy,
    copy_padded,
    get,
    lane_sum,
    load,
    ones,
    put,
    sigmoid,
    spread,
    store,
    zeros,
)

HOUSEHOLDER, DPLR, KRONECKER = 0, 1, 2
_KINDS = {"householder": HOUSEHOLDER, "dplr": DPLR, "kronecker": KRONECKER}
_TINY = 1e-15
_RESCALE = 8  # power iterations without rescaling: a trace of 1 leaves at least n^-8


class Mixer(NamedTuple):
    """A mixer at one width, as the kernels take it: `size1` is the rank or d1, `padded1` d1 in whole registers."""

    kind: int
    size1: int
    padded1: int
    rows: int
    columns: int
    padded: int
    coefficients: int
    a_max: float
    by_rows: bool
    power_iterations: int

    @classmethod
    def of(cls, form: MixerForm, columns: Columns, width: int) -> Mixer:
        """Return `form` at `width` channels; ValueError where the coefficients are not those of `form`."""
        kind = _KINDS[form.kind]
        rows, row = form.sizes if kind == KRONECKER else (1, width)
        counts = [n + n * (n + 1) // 2 for n in form.sizes] if kind == KRONECKER else [form.sizes[0] * (width + 1)]
        if sum(counts) != columns.sizes[0]:
            raise ValueError(f"{form} has {sum(counts)} coefficients at width {width}, not {columns.sizes[0]}")
        size, options = form.sizes[0], (form.a_max, form.rows, form.power_iterations)
        return cls(kind, size, whole(size), rows, row, whole(row), sum(counts), *options)


def run_table(columns: Columns) -> Any:
    """Return `columns.runs()` as an array (runs, 3)."""
    return np.array(columns.runs(), dtype=np.int64).reshape(-1, 3)


def whole(size: int) -> int:
    """Return `size` rounded up to whole registers."""
    return size + -size % LANES


_compiled = njit(error_model="numpy")


@_compiled
def factor_room(mixer: Any) -> int:
    """Return how many numbers F has."""
    if mixer.kind == KRONECKER:
        return _one_factor(mixer.size1, mixer.padded1) + _one_factor(mixer.columns, mixer.padded)
    return mixer.size1 * mixer.padded + mixer.padded1


@_compiled
def triangle_room(mixer: Any) -> int:
    """Return how many numbers the scratch for a triangle has."""
    n = mixer.columns if mixer.kind == KRONECKER else 0
    return n * (n + 1) // 2 + LANES


@_compiled
def _one_factor(n: int, padded: int) -> int:
    return (2 * n + 5) * padded


def eigenvector_room(mixer: Mixer) -> int:
    """Return how many numbers `keep_eigenvectors` keeps of a token."""
    return mixer.padded1 + mixer.padded if mixer.kind == KRONECKER and not mixer.by_rows else 0


@_compiled
def keep_eigenvectors(mixer: Any, F: Any, kept: Any, at: int) -> None:
    """Copy the top eigenvectors from F."""
    v1, v2 = _eigenvectors(mixer)
    copy(F, v1, kept, at, mixer.padded1)
    copy(F, v2, kept, at + mixer.padded1, mixer.padded)


@_compiled
def recall_eigenvectors(mixer: Any, kept: Any, at: int, F: Any) -> None:
    """The inverse of `keep_eigenvectors`."""
    v1, v2 = _eigenvectors(mixer)
    copy(kept, at, F, v1, mixer.padded1)
    copy(kept, at + mixer.padded1, F, v2, mixer.padded)


@_compiled
def _eigenvectors(mixer: Any) -> tuple[int, int]:
    second = _one_factor(mixer.size1, mixer.padded1)
    return (2 * mixer.size1 + 2) * mixer.padded1, second + (2 * mixer.columns + 2) * mixer.padded


@_compiled
def place(source: Any, at: int, mixer: Any, target: Any) -> None:
    """Spread `source[at:]`, one number a channel, over the padded rows of `target`."""
    for i in range(mixer.rows):
        copy_padded(source, at + i * mixer.columns, target, i * mixer.padded, mixer.columns)


@_compiled
def take(source: Any, mixer: Any, target: Any, at: int) -> None:
    """The inverse of `place`."""
    for i in range(mixer.rows):
        copy(source, i * mixer.padded, target, at + i * mixer.columns, mixer.columns)


@_compiled
def l2normalise(v: Any, at: int, count: int) -> float:
    """v / sqrt(|v|^2 + eps) for `count` numbers from `at` and zeros after; returns the scale."""
    total = zeros(load(v, at))
    for j in range(0, count, LANES):
        total = total + load(v, at + j) * load(v, at + j)
    scale = v.dtype.type(1) / np.sqrt(lane_sum(total) + v.dtype.type(EPSILON))
    for j in range(0, count, LANES):
        store(v, at + j, load(v, at + j) * broadcast(scale))
    return scale


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
def make_factors(mixer: Any, p: Any, lanes: Any, compact: Any, search: bool, F: Any) -> None:
    """Fill F from the coefficients p of a token, which LANES numbers follow.

    `lanes` (padded) is 1 at real channels of a row and 0 at padding. `search`: find the eigenvectors, which otherwise
    are in F already. `compact` is scratch for a triangle.
    """
    if mixer.kind == KRONECKER:
        end = _make_kronecker(mixer, p, 0, mixer.size1, mixer.padded1, compact, search, F, 0)
        _make_kronecker(
            mixer, p, end, mixer.columns, mixer.padded, compact, search, F, _one_factor(mixer.size1, mixer.padded1)
        )
        return
    width, rank = mixer.columns, mixer.size1
    for i in range(rank):
        for j in range(0, mixer.padded, LANES):
            v = load(p, i * width + j) * load(lanes, j)
            store(F, i * mixer.padded + j, v * sigmoid(v))
        l2normalise(F, i * mixer.padded, mixer.padded)
    for i in range(0, rank, LANES):
        store(F, rank * mixer.padded + i, broadcast(p.dtype.type(mixer.a_max)) * sigmoid(load(p, rank * width + i)))


@_compiled
def _make_kronecker(
    mixer: Any, p: Any, at: int, n: int, padded: int, compact: Any, search: bool, F: Any, to: int
) -> int:
    """One factor; returns where its coefficients end in p."""
    G, w = to + n * padded, to + 2 * n * padded
    diagonal, v = w + padded, w + 2 * padded
    triangle = n * (n + 1) // 2
    for i in range(0, triangle, LANES):
        entry = load(p, at + n + i)
        store(compact, i, entry * sigmoid(entry))
    entry_index = 0
    for i in range(n):
        for j in range(i, n):
            put(F, to + j * padded + i, get(compact, entry_index))
            entry_index += 1
    for i in range(n):
        for block in range(0, padded, LANES):
            total = zeros(load(F, G))
            for k in range(i, n):
                total = total + spread(F, to + k * padded + i) * load(F, to + k * padded + block)
            store(F, G + i * padded + block, total)
    for block in range(0, padded, LANES):
        store(F, diagonal + block, sigmoid(load(p, at + block)))
    if mixer.by_rows:
        for i in range(n):
            total = zeros(load(F, G))
            for block in range(0, padded, LANES):
                row = load(F, G + i * padded + block)
                total = total + row * row
            F[v + i] = p.dtype.type(1) / np.sqrt(lane_sum(total) + p.dtype.type(EPSILON))
        for block in range(0, padded, LANES):
            store(F, w + block, load(F, diagonal + block) * load(F, v + block))
    else:
        if search:
            _top_eigenvector(F, G, n, padded, v, mixer.power_iterations)
        inverse = p.dtype.type(1) / (_rayleigh(F, G, n, padded, v) + p.dtype.type(EPSILON))
        F[v + 2 * padded] = inverse
        for block in range(0, padded, LANES):
            store(F, w + block, load(F, diagonal + block) * broadcast(inverse))
    return at + n + triangle


@_compiled
def _symmetric_product(F: Any, G: int, n: int, padded: int, v: int, to: int, scale: float) -> None:
    """F[to:] = scale G v; several sums at a time, for a sum waits for its last product."""
    for block in range(0, padded, LANES):
        sum0 = sum1 = sum2 = sum3 = zeros(load(F, G))
        whole_fours = n - n % 4
        for k in range(0, whole_fours, 4):
            at = G + k * padded + block
            sum0 = sum0 + spread(F, v + k) * load(F, at)
            sum1 = sum1 + spread(F, v + k + 1) * load(F, at + padded)
            sum2 = sum2 + spread(F, v + k + 2) * load(F, at + 2 * padded)
            sum3 = sum3 + spread(F, v + k + 3) * load(F, at + 3 * padded)
        for k in range(whole_fours, n):
            sum0 = sum0 + spread(F, v + k) * load(F, G + k * padded + block)
        store(F, to + block, ((sum0 + sum1) + (sum2 + sum3)) * broadcast(scale))


@_compiled
def _top_eigenvector(F: Any, G: int, n: int, padded: int, v: int, iterations: int) -> None:
    """Power iteration from the column of the largest diagonal entry, scaled by the trace so that nothing underflows."""
    real = F.dtype.type
    start, trace, largest = 0, real(0), real(0)
    for i in range(n):
        entry = get(F, G + i * padded + i)
        trace += entry
        if entry > largest:
            start, largest = i, entry
    scale = real(1) / max(trace, real(_TINY))
    scratch = v + padded
    for block in range(0, padded, LANES):
        store(F, v + block, load(F, G + start * padded + block) * broadcast(scale))
    for iteration in range(iterations):
        _symmetric_product(F, G, n, padded, v, scratch, scale)
        for block in range(0, padded, LANES):
            store(F, v + block, load(F, scratch + block))
        if iteration % _RESCALE == _RESCALE - 1:
            _normalise(F, v, padded)
    _normalise(F, v, padded)


@_compiled
def _normalise(F: Any, v: int, padded: int) -> None:
    total = zeros(load(F, v))
    for block in range(0, padded, LANES):
        total = total + load(F, v + block) * load(F, v + block)
    scale = broadcast(F.dtype.type(1) / max(np.sqrt(lane_sum(total)), F.dtype.type(_TINY)))
    for block in range(0, padded, LANES):
        store(F, v + block, load(F, v + block) * scale)


@_compiled
def _rayleigh(F: Any, G: int, n: int, padded: int, v: int) -> float:
    scratch = v + padded
    _symmetric_product(F, G, n, padded, v, scratch, F.dtype.type(1))
    total = zeros(load(F, v))
    for block in range(0, padded, LANES):
        total = total + load(F, v + block) * load(F, scratch + block)
    return lane_sum(total)


@_compiled
def _left_product(A: Any, G: int, n: int, step: int, B: Any, b: int, rows: int, padded: int, to: Any, at: int) -> None:
    """to[at:] = G B for G (n, `rows`) with rows `step` apart, B (rows, padded): four rows of G share a row of B."""
    fours = n - n % 4
    for block in range(0, padded, LANES):
        for i in range(0, fours, 4):
            sum0 = sum1 = sum2 = sum3 = zeros(load(B, b))
            row = G + i * step
            for k in range(rows):
                right = load(B, b + k * padded + block)
                sum0 = sum0 + spread(A, row + k) * right
                sum1 = sum1 + spread(A, row + step + k) * right
                sum2 = sum2 + spread(A, row + 2 * step + k) * right
                sum3 = sum3 + spread(A, row + 3 * step + k) * right
            out = at + i * padded + block
            store(to, out, sum0)
            store(to, out + padded, sum1)
            store(to, out + 2 * padded, sum2)
            store(to, out + 3 * padded, sum3)
        for i in range(fours, n):
            total = zeros(load(B, b))
            for k in range(rows):
                total = total + spread(A, G + i * step + k) * load(B, b + k * padded + block)
            store(to, at + i * padded + block, total)


@_compiled
def apply(mixer: Any, F: Any, v: Any, scratch: Any) -> None:
    """v <- Q v in place, padded; `scratch` is twice as long as v."""
    padded = mixer.padded
    if mixer.kind == KRONECKER:
        n1, n2, padded1 = mixer.size1, mixer.columns, mixer.padded1
        G1, second = n1 * padded1, _one_factor(n1, padded1)
        w1, G2, w2 = 2 * n1 * padded1, second + n2 * padded, second + 2 * n2 * padded
        size = n1 * padded
        _left_product(v, 0, n1, padded, F, G2, n2, padded, scratch, size)
        for i in range(0, size, padded):
            for block in range(0, padded, LANES):
                store(scratch, i + block, load(scratch, size + i + block) * load(F, w2 + block))
        _left_product(F, G1, n1, padded1, scratch, 0, n1, padded, scratch, size)
        for i in range(n1):
            weight = broadcast(v.dtype.type(mixer.a_max) * F[w1 + i])
            for block in range(i * padded, (i + 1) * padded, LANES):
                store(v, block, load(v, block) - weight * load(scratch, size + block))
        return
    rank = mixer.size1
    if mixer.kind == HOUSEHOLDER:
        for i in range(rank - 1, -1, -1):
            _reflect(v, v, F, i * padded, F[rank * padded + i], padded)
    else:
        for j in range(0, padded, LANES):
            store(scratch, j, load(v, j))
        for i in range(rank):
            _reflect(v, scratch, F, i * padded, F[rank * padded + i], padded)


@_compiled
def _dot(a: Any, at: int, b: Any, bt: int, count: int) -> float:
    """Two sums at a time, for a sum waits for its last product."""
    even = odd = zeros(load(a, at))
    pairs = count - count % (2 * LANES)
    for j in range(0, pairs, 2 * LANES):
        even = even + load(a, at + j) * load(b, bt + j)
        odd = odd + load(a, at + j + LANES) * load(b, bt + j + LANES)
    for j in range(pairs, count, LANES):
        even = even + load(a, at + j) * load(b, bt + j)
    return lane_sum(even + odd)


@_compiled
def _add(v: Any, at: int, weight: float, u: Any, ut: int, count: int) -> None:
    """v += weight u"""
    for j in range(0, count, LANES):
        store(v, at + j, load(v, at + j) + broadcast(weight) * load(u, ut + j))


@_compiled
def _reflect(v: Any, seen: Any, F: Any, u: int, a: float, padded: int) -> None:
    """v -= a (u . seen) u"""
    _add(v, 0, -a * _dot(F, u, seen, 0, padded), F, u, padded)


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
            overlap = _dot(F, i * padded, scratch, i * padded, padded)
            _add(scratch, i * padded, -F[weights + i] * overlap, F, i * padded, padded)
    for i in range(rank):
        u, a = i * padded, F[weights + i]
        given = (i + 1) * padded if mixer.kind == HOUSEHOLDER else rank * padded
        seen = g if mixer.kind == HOUSEHOLDER else scratch  # of DPLR, the gradient as it came, in scratch[0]
        overlap, back = _dot(F, u, scratch, given, padded), _dot(F, u, seen, 0, padded)
        for j in range(0, padded, LANES):
            sums = broadcast(overlap) * load(seen, j) + broadcast(back) * load(scratch, given + j)
            store(scratch, du + j, broadcast(-a) * sums)
        scratch[da + i] = -overlap * back
        _add(g, 0, -a * back, F, u, padded)
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
    G1, w1, second = n1 * padded1, 2 * n1 * padded1, _one_factor(n1, padded1)
    G2, w2 = second + n2 * padded, second + 2 * n2 * padded
    size = n1 * padded
    S, M, R, dR, dM, dS = 0, size, 2 * size, 3 * size, 4 * size, 5 * size
    Z1 = 6 * size
    Z2 = Z1 + n1 * padded1
    back = Z2 + n2 * padded
    _left_product(v, 0, n1, padded, F, G2, n2, padded, scratch, S)
    for i in range(0, size, padded):
        for block in range(0, padded, LANES):
            store(scratch, M + i + block, load(scratch, S + i + block) * load(F, w2 + block))
    _left_product(F, G1, n1, padded1, scratch, M, n1, padded, scratch, R)
    dw1, dw2 = w1 + 3 * padded1, w2 + 3 * padded  # in the vectors of scratch
    scale = p.dtype.type(-mixer.a_max)
    for i in range(n1):
        row = i * padded
        put(F, dw1 + i, scale * _dot(g, row, scratch, R + row, padded))
        weight = broadcast(scale * F[w1 + i])
        for block in range(row, row + padded, LANES):
            store(scratch, dR + block, weight * load(g, block))
    _left_product(F, G1, n1, padded1, scratch, dR, n1, padded, scratch, dM)
    for block in range(0, padded, LANES):
        total = zeros(load(g, 0))
        for i in range(block, size, padded):
            total = total + load(scratch, dM + i) * load(scratch, S + i)
            store(scratch, dS + i, load(scratch, dM + i) * load(F, w2 + block))
        store(F, dw2 + block, total)
    _left_product(scratch, dS, n1, padded, F, G2, n2, padded, scratch, back)
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
        scale, total = F[dw + padded], _dot(F, dw, F, w, padded)
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
