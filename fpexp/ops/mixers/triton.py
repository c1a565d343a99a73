"""The channel mixers of a few tokens in Triton, for kernels to call: coefficients, factors and product, and the norms.

A vector over channels is a tile (rows, lanes), a row for each token: `lanes1` rows of `lanes2` lanes in one axis, of
which the first `rows` and `columns` are channels and the rest is 0. Kronecker has d1 rows of d2 channels, the others
one row. Coefficients and factors lie in memory of the program's own, which stays in the first cache: `p` and `factors`
are tiles (rows, 1) of pointers to where a token's begin. Between a store and a load of what another thread has stored
the caller has a barrier. The factors of a token, in numbers:

    householder, dplr   u (rank, lanes), a (rank)
    kronecker           K1 (lanes1, lanes1), K2 (lanes2, lanes2), each with zeros for padding

Products of float32 are made of three of tf32, those with weights of 16 bits are in the type of the weights; sums are
float32. All is float64 where the program computes in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fpexp.ops.l2norm import EPSILON
from fpexp.ops.mixers import Columns, MixerForm

_KINDS = {"householder": 0, "dplr": 1, "kronecker": 2}
_KRONECKER = tl.constexpr(2)
_HOUSEHOLDER = tl.constexpr(0)
_EPSILON = tl.constexpr(EPSILON)
_TINY = tl.constexpr(1e-15)
"""As in `fpexp.channel_mixers.kronecker`."""

_LARGEST_FACTOR = 128
"""Rows of a Kronecker factor at most: 16384 numbers, which a program's registers or shared memory hold a few times."""

LEAST = 16
"""Rows and columns of a product at least."""

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bits of bfloat16 numbers, as if they were integers."""


@dataclass(frozen=True)
class Mixer:
    """A mixer at one width, as the kernels take it: `size` is the rank or d1; `runs` are those of `Columns`."""

    kind: int
    size: int
    rows: int
    columns: int
    lanes1: int
    lanes2: int
    coefficients: int
    a_max: float
    by_rows: bool
    power_iterations: int
    runs: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, form: MixerForm, columns: Columns, width: int) -> Mixer:
        """Return `form` at `width` channels; ValueError where the coefficients are not those of `form`."""
        kronecker = form.kind == "kronecker"
        rows, row = form.sizes if kronecker else (1, width)
        counts = [n + n * (n + 1) // 2 for n in form.sizes] if kronecker else [form.sizes[0] * (width + 1)]
        if sum(counts) != columns.sizes[0]:
            raise ValueError(f"{form} has {sum(counts)} coefficients at width {width}, not {columns.sizes[0]}")
        lanes1 = max(LEAST, triton.next_power_of_2(rows)) if kronecker else 1
        lanes2 = max(LEAST, triton.next_power_of_2(row))
        return cls(
            kind=_KINDS[form.kind],
            size=form.sizes[0],
            rows=rows,
            columns=row,
            lanes1=lanes1,
            lanes2=lanes2,
            coefficients=sum(counts),
            a_max=form.a_max,
            by_rows=form.rows,
            power_iterations=form.power_iterations,
            runs=tuple(columns.runs()),
        )

    @property
    def lanes(self) -> int:
        """Of a vector over channels."""
        return self.lanes1 * self.lanes2

    @property
    def factor_room(self) -> int:
        """How many numbers the factors of a token are."""
        if self.kind == _KINDS["kronecker"]:
            return self.lanes1**2 + self.lanes2**2
        return self.size * self.lanes + self.size

    @property
    def fits(self) -> bool:
        """Whether a program can hold a factor."""
        return self.kind != _KINDS["kronecker"] or self.lanes2 <= _LARGEST_FACTOR


def precision(compute: torch.dtype) -> str:
    """Return what factors of products are taken to: float32 in three parts."""
    return "ieee" if compute == torch.float64 else "tf32x3"


# Functions of numbers. None overflows: exp(+-3e4) is 0 or inf, and 1 / inf is 0.


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def silu(x):
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)); the quotient makes good what rounding 1 + small has lost."""
    small = tl.exp(-tl.abs(x))
    rounded = 1 + small
    log1p = tl.where(rounded == 1, small, tl.log(rounded) * (small / tl.where(rounded == 1, 1, rounded - 1)))
    return tl.maximum(x, 0) + log1p


@triton.jit
def l2norm(v):
    """v / sqrt(|v|^2 + eps) over the last axis."""
    return v * (1 / tl.sqrt(tl.sum(v * v, len(v.shape) - 1, keep_dims=True) + _EPSILON))


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a b, with any leading axis; sums in float32 or float64."""
    narrow: tl.constexpr = a.dtype.primitive_bitwidth == 16
    if narrow and _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32 if narrow else a.dtype)


# Tiles over channels.


@triton.jit
def channels_of(mixer: tl.constexpr):
    """Return the channel of each lane and whether there is one, (lanes) each."""
    lane = tl.arange(0, mixer.lanes1 * mixer.lanes2)
    i, j = lane // mixer.lanes2, lane % mixer.lanes2
    return i * mixer.columns + j, (i < mixer.rows) & (j < mixer.columns)


@triton.jit
def normalise(f, there, weight, bias, width, epsilon, CENTRED: tl.constexpr):
    """LayerNorm, or RMSNorm where not CENTRED, of a tile (rows, lanes); weight and bias (lanes) are 0 at padding."""
    if CENTRED:
        f = tl.where(there[None, :], f - tl.sum(f, 1, keep_dims=True) / width, 0)
    scale = 1 / tl.sqrt(tl.sum(f * f, 1, keep_dims=True) / width + epsilon)
    return f * scale * weight[None, :] + bias[None, :]


# Coefficients.


@triton.jit
def source_of(column, mixer: tl.constexpr):
    """Return which row of the weights on s adds to a column of x's part; -1 for none."""
    source = tl.full(column.shape, -1, tl.int32)
    for i in tl.static_range(len(mixer.runs)):
        before = column - mixer.runs[i][0]
        source = tl.where((before >= 0) & (before < mixer.runs[i][2]), before + mixer.runs[i][1], source)
    return source


@triton.jit
def add_from_s(
    from_x, s, weight, p, inside, count, width,
    mixer: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """p = from_x + s weight^T: tiles (rows, 1) of pointers, rows at least `LEAST`, of which `inside` are there.

    `count` columns, COLUMNS at a time; the weights (rows of s's part, width) go by in blocks of DEPTH channels. Where a
    dependence is off, from_x is copied, and no weight of it is read.
    """
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        source = source_of(column, mixer)
        there = inside & (column < count)[None, :]
        total = tl.load(from_x + column[None, :], there, other=0).to(p.dtype.element_ty)
        if tl.max(source, 0) >= 0:
            for k in range(0, width, DEPTH):
                channel = k + tl.arange(0, DEPTH)
                in_weight = source[None, :] * width + channel[:, None]
                rows = tl.load(s + channel[None, :], inside & (channel < width)[None, :], other=0)
                block = tl.load(weight + in_weight, (source >= 0)[None, :] & (channel < width)[:, None], other=0)
                total += product(rows.to(block.dtype), block, PRECISION)
        tl.store(p + column[None, :], total, there)


# Factors.


@triton.jit
def make_factors(p, factors, mixer: tl.constexpr, PRECISION: tl.constexpr):
    """Fill the factors of tokens from their coefficients."""
    if mixer.kind == _KRONECKER:
        first, last = tl.arange(0, mixer.lanes1), tl.arange(0, mixer.lanes2)
        K = kronecker_factor(p, mixer.size, mixer.lanes1, mixer, PRECISION)
        tl.store(factors[:, :, None] + (first[:, None] * mixer.lanes1 + first[None, :])[None, :, :], K)
        ends: tl.constexpr = mixer.size + mixer.size * (mixer.size + 1) // 2
        K = kronecker_factor(p + ends, mixer.columns, mixer.lanes2, mixer, PRECISION)
        second = factors[:, :, None] + mixer.lanes1 * mixer.lanes1
        tl.store(second + (last[:, None] * mixer.lanes2 + last[None, :])[None, :, :], K)
    else:
        lane = tl.arange(0, mixer.lanes2)
        for i in range(mixer.size):
            tl.store(factors + i * mixer.lanes2 + lane[None, :], unit_vector(p, i, mixer))
            tl.store(factors + mixer.size * mixer.lanes2 + i, rank_weight(p, i, mixer))


@triton.jit
def unit_vector(p, i, mixer: tl.constexpr):
    """u_i = l2norm(silu(.)), (rows, lanes)"""
    lane = tl.arange(0, mixer.lanes2)
    return l2norm(silu(tl.load(p + i * mixer.columns + lane[None, :], (lane < mixer.columns)[None, :], other=0)))


@triton.jit
def rank_weight(p, i, mixer: tl.constexpr):
    """a_i = a_max sigmoid(.), (rows, 1)"""
    return mixer.a_max * sigmoid(tl.load(p + mixer.size * mixer.columns + i))


@triton.jit
def kronecker_factor(p, n: tl.constexpr, LANES: tl.constexpr, mixer: tl.constexpr, PRECISION: tl.constexpr):
    """diag(sigmoid(.)) normalise(U U^T), (rows, LANES, LANES), of coefficients n + n (n + 1) / 2 from p on."""
    i, j = tl.arange(0, LANES)[:, None], tl.arange(0, LANES)[None, :]
    in_triangle = n + i * (2 * n - i + 1) // 2 + j - i
    U = silu(tl.load(p[:, :, None] + in_triangle[None, :, :], ((i <= j) & (j < n))[None, :, :], other=0))
    gram = product(U, tl.trans(U, (0, 2, 1)), PRECISION)
    if mixer.by_rows:
        gram = l2norm(gram)
    else:
        v = top_eigenvector(gram, LANES, mixer)
        largest = tl.sum(v * times(gram, v), 1)
        gram = gram * (1 / (largest + _EPSILON))[:, None, None]
    diagonal = tl.load(p[:, :, None] + i[None, :, :], (i < n)[None, :, :], other=0)
    return sigmoid(diagonal) * gram


@triton.jit
def top_eigenvector(gram, LANES: tl.constexpr, mixer: tl.constexpr):
    """Power iteration from the column of the largest diagonal entry, (rows, LANES)."""
    i = tl.arange(0, LANES)
    diagonal = tl.sum(tl.where((i[:, None] == i[None, :])[None, :, :], gram, 0), 2)
    start = tl.argmax(diagonal, 1)
    v = unit(tl.sum(tl.where(i[None, None, :] == start[:, None, None], gram, 0), 2))
    for _ in range(mixer.power_iterations):
        v = unit(times(gram, v))
    return v


@triton.jit
def times(gram, v):
    """gram v for each row."""
    return tl.sum(gram * v[:, None, :], 2)


@triton.jit
def unit(v):
    """v / max(|v|, tiny)"""
    length = tl.sqrt(tl.sum(v * v, 1, keep_dims=True))
    return v * (1 / tl.maximum(length, _TINY))


# The product.


@triton.jit
def apply(factors, v, mixer: tl.constexpr, PRECISION: tl.constexpr):
    """Return Q v for a tile (rows, lanes) that is 0 at padding."""
    if mixer.kind == _KRONECKER:
        first, last = tl.arange(0, mixer.lanes1), tl.arange(0, mixer.lanes2)
        second = factors[:, :, None] + mixer.lanes1 * mixer.lanes1
        K2_transposed = tl.load(second + (last[None, :] * mixer.lanes2 + last[:, None])[None, :, :])
        K1 = tl.load(factors[:, :, None] + (first[:, None] * mixer.lanes1 + first[None, :])[None, :, :])
        matrix = tl.reshape(v, (v.shape[0], mixer.lanes1, mixer.lanes2))
        mixed = product(K1, product(matrix, K2_transposed, PRECISION), PRECISION)
        v -= mixer.a_max * tl.reshape(mixed, v.shape)
    else:
        lane = tl.arange(0, mixer.lanes2)
        seen = v
        for k in range(mixer.size):
            i = mixer.size - 1 - k
            u = tl.load(factors + i * mixer.lanes2 + lane[None, :])
            a = tl.load(factors + mixer.size * mixer.lanes2 + i)
            if mixer.kind == _HOUSEHOLDER:
                seen = v
            v -= a * tl.sum(u * seen, 1, keep_dims=True) * u
    return v
