"""The channel mixers of one token in SIMD registers, for kernels to call: factors and product.

Vectors over channels are padded with zeros to whole registers: to `rows` rows of `columns` channels, each of
`padded` lanes. Kronecker has d1 rows of d2 channels, the others one row. All factors of a token stand in one array F:

    householder, dplr   u (rank, padded), a (rank)
    kronecker           of each factor n x n: U^T and G = U U^T (n, padded), then vectors of `padded` lanes: its row
                        weights w, sigmoid of the diagonal, top eigenvector, scratch,
                        1 / (its eigenvalue + eps); K = diag(w) G

F must be zero at first: what is never written is padding. What the product passes back: `fpexp.ops.mixers.adjoints`.
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
        return factor_size(mixer.size1, mixer.padded1) + factor_size(mixer.columns, mixer.padded)
    return mixer.size1 * mixer.padded + mixer.padded1


@_compiled
def triangle_room(mixer: Any) -> int:
    """Return how many numbers the scratch for a triangle has."""
    n = mixer.columns if mixer.kind == KRONECKER else 0
    return n * (n + 1) // 2 + LANES


@_compiled
def factor_size(n: int, padded: int) -> int:
    """Return how many numbers of F belong to a Kronecker factor n x n."""
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
    second = factor_size(mixer.size1, mixer.padded1)
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
def make_factors(mixer: Any, p: Any, lanes: Any, compact: Any, search: bool, F: Any) -> None:
    """Fill F from the coefficients p of a token, which LANES numbers follow.

    `lanes` (padded) is 1 at real channels of a row and 0 at padding. `search`: find the eigenvectors, which otherwise
    are in F already. `compact` is scratch for a triangle.
    """
    if mixer.kind == KRONECKER:
        end = _make_kronecker(mixer, p, 0, mixer.size1, mixer.padded1, compact, search, F, 0)
        _make_kronecker(
            mixer, p, end, mixer.columns, mixer.padded, compact, search, F, factor_size(mixer.size1, mixer.padded1)
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
def left_product(A: Any, G: int, n: int, step: int, B: Any, b: int, rows: int, padded: int, to: Any, at: int) -> None:
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
        G1, second = n1 * padded1, factor_size(n1, padded1)
        w1, G2, w2 = 2 * n1 * padded1, second + n2 * padded, second + 2 * n2 * padded
        size = n1 * padded
        left_product(v, 0, n1, padded, F, G2, n2, padded, scratch, size)
        for i in range(0, size, padded):
            for block in range(0, padded, LANES):
                store(scratch, i + block, load(scratch, size + i + block) * load(F, w2 + block))
        left_product(F, G1, n1, padded1, scratch, 0, n1, padded, scratch, size)
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
def dot(a: Any, at: int, b: Any, bt: int, count: int) -> float:
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
def add(v: Any, at: int, weight: float, u: Any, ut: int, count: int) -> None:
    """v += weight u"""
    for j in range(0, count, LANES):
        store(v, at + j, load(v, at + j) + broadcast(weight) * load(u, ut + j))


@_compiled
def _reflect(v: Any, seen: Any, F: Any, u: int, a: float, padded: int) -> None:
    """v -= a (u . seen) u"""
    add(v, 0, -a * dot(F, u, seen, 0, padded), F, u, padded)
