"""The channel mixers of a few tokens in Triton, for kernels to call: coefficients, factors and product, and the norms.

A vector over channels is a tile (rows, lanes), a row for each token: `lanes1` rows of `lanes2` lanes in one axis, of
which the first `rows` and `columns` are channels and the rest is 0. Kronecker has d1 rows of d2 channels, the others
one row. Coefficients and factors lie in memory of the program's own, which stays in the first cache: `p` and `factors`
are tiles (rows, 1) of pointers to where a token's begin. Between a store and a load of what another thread has stored
the caller has a barrier. The factors of a token, in numbers:

    householder, dplr   u (rank, lanes), a (rank)
    kronecker           K1^T (lanes1, lanes1), K2^T (lanes2, lanes2), with zeros for padding, and scratch (2, lanes)

Products with weights are made of three of tf32 where these are float32, else in their type of 16 bits, with sums in
float32. Those of factors are sums of outer products, a row and a column from memory at a time: Triton would give each
of a few matrices to one warp, whose registers it overflows. All is float64 where the program computes in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fpexp.ops.l2norm import EPSILON
from fpexp.ops.launch.triton import product
from fpexp.ops.mixers import Columns, MixerForm

_KINDS = {"householder": 0, "dplr": 1, "kronecker": 2}
_KRONECKER = tl.constexpr(2)
_HOUSEHOLDER = tl.constexpr(0)
_EPSILON = tl.constexpr(EPSILON)
_TINY = tl.constexpr(1e-15)
"""As in `fpexp.channel_mixers.kronecker`."""

STAGES = tl.constexpr(5)
"""Of the pipeline of weights: one block less is on its way while one is multiplied."""


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
        """Return `form` at `width` channels.

        ValueError where `form` has another width or other coefficients, or weights on s are more than 32-bit offsets
        reach.
        """
        kronecker = form.kind == "kronecker"
        rows, row = form.sizes if kronecker else (1, width)
        if rows * row != width:
            raise ValueError(f"{form} is of width {rows * row}, not {width}")
        counts = [n + n * (n + 1) // 2 for n in form.sizes] if kronecker else [form.sizes[0] * (width + 1)]
        if sum(counts) != columns.sizes[0]:
            raise ValueError(f"{form} has {sum(counts)} coefficients at width {width}, not {columns.sizes[0]}")
        if sum(columns.from_s) * width > 2**31:
            raise ValueError(f"{form} at width {width}: kernels take up to 2^31 weights on s, not all {columns.from_s}")
        return cls(
            kind=_KINDS[form.kind],
            size=form.sizes[0],
            rows=rows,
            columns=row,
            lanes1=triton.next_power_of_2(rows),
            lanes2=triton.next_power_of_2(row),
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
            return self.lanes1**2 + self.lanes2**2 + 2 * self.lanes
        return self.size * self.lanes + self.size

    @property
    def largest(self) -> int:
        """How many numbers the largest tile of a token is: a vector, or a Kronecker factor while it is made."""
        return max(self.lanes, self.lanes2**2) if self.kind == _KINDS["kronecker"] else self.lanes


def precision(compute: torch.dtype) -> str:
    """Return what a product with weights is taken in: float32 in three parts."""
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


# Tiles over channels.


@triton.jit
def channels_of(mixer: tl.constexpr):
    """Return the channel of each lane and whether there is one, (lanes) each."""
    lane = tl.arange(0, mixer.lanes1 * mixer.lanes2)
    i, j = lane // mixer.lanes2, lane % mixer.lanes2
    return i * mixer.columns + j, (i < mixer.rows) & (j < mixer.columns)


@triton.jit
def normalise(f, there, weight, bias, width, epsilon):
    """LayerNorm, or RMSNorm where bias is None, of a tile (rows, lanes); weight and bias (lanes) are 0 at padding."""
    if bias is not None:
        f = tl.where(there[None, :], f - tl.sum(f, 1, keep_dims=True) / width, 0)
    scale = 1 / tl.sqrt(tl.sum(f * f, 1, keep_dims=True) / width + epsilon)
    f = f * scale * weight[None, :]
    return f if bias is None else f + bias[None, :]


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
    """p = from_x + s weight^T: tiles (rows, 1) of pointers, of which `inside` are there.

    `count` columns, COLUMNS at a time; the weights (rows of s's part, width) go by in blocks of DEPTH channels. Where a
    dependence is off, from_x is copied, and no weight of it is read.
    """
    for start in range(0, count, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        source = source_of(column, mixer)
        there = inside & (column < count)[None, :]
        total = tl.load(from_x + column[None, :], there, other=0).to(p.dtype.element_ty)
        if tl.max(source, 0) >= 0:
            for k in tl.range(0, width, DEPTH, num_stages=STAGES):
                channel = k + tl.arange(0, DEPTH)
                in_weight = source[None, :] * width + channel[:, None]
                rows = tl.load(s + channel[None, :], inside & (channel < width)[None, :], other=0)
                block = tl.load(weight + in_weight, (source >= 0)[None, :] & (channel < width)[:, None], other=0)
                total += product(rows.to(block.dtype), block, total.dtype, PRECISION)
        tl.store(p + column[None, :], total, there)


# Factors.


@triton.jit
def make_factors(p, factors, mixer: tl.constexpr):
    """Fill the factors of tokens from their coefficients. Has barriers, but none at its beginning or end."""
    if mixer.kind == _KRONECKER:
        first, last = tl.arange(0, mixer.lanes1), tl.arange(0, mixer.lanes2)
        transposed = factors[:, :, None] + (first[None, :] * mixer.lanes1 + first[:, None])[None, :, :]
        tl.store(transposed, kronecker_factor(p, factors, mixer.size, mixer.lanes1, mixer))
        ends: tl.constexpr = mixer.size + mixer.size * (mixer.size + 1) // 2
        second = factors + mixer.lanes1 * mixer.lanes1
        transposed = second[:, :, None] + (last[None, :] * mixer.lanes2 + last[:, None])[None, :, :]
        tl.store(transposed, kronecker_factor(p + ends, second, mixer.columns, mixer.lanes2, mixer))
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
def kronecker_factor(p, scratch, n: tl.constexpr, LANES: tl.constexpr, mixer: tl.constexpr):
    """diag(sigmoid(.)) normalise(U U^T), (rows, LANES, LANES), of coefficients n + n (n + 1) / 2 from p on.

    `scratch`, of LANES^2 numbers a row, may be written again once this has returned.
    """
    i, j = tl.arange(0, LANES)[:, None], tl.arange(0, LANES)[None, :]
    in_triangle = n + i * (2 * n - i + 1) // 2 + j - i
    U = silu(tl.load(p[:, :, None] + in_triangle[None, :, :], ((i <= j) & (j < n))[None, :, :], other=0))
    tl.store(scratch[:, :, None] + (j * LANES + i)[None, :, :], U)
    tl.debug_barrier()
    gram = outer_products(scratch, scratch, n, LANES, LANES)
    tl.debug_barrier()
    gram = l2norm(gram) if mixer.by_rows else gram * (1 / (largest_eigenvalue(gram, mixer) + _EPSILON))
    diagonal = tl.load(p[:, :, None] + i[None, :, :], (i < n)[None, :, :], other=0)
    return sigmoid(diagonal) * gram


@triton.jit
def outer_products(a, b, count, LANES1: tl.constexpr, LANES2: tl.constexpr):
    """a^T b, (rows, LANES1, LANES2), of matrices with `count` rows of LANES1 and of LANES2 numbers in memory."""
    i, j = tl.arange(0, LANES1)[None, :], tl.arange(0, LANES2)[None, :]
    total = tl.zeros([a.shape[0], LANES1, LANES2], a.dtype.element_ty)
    for k in range(count):
        total += tl.load(a + k * LANES1 + i)[:, :, None] * tl.load(b + k * LANES2 + j)[:, None, :]
    return total


@triton.jit
def largest_eigenvalue(gram, mixer: tl.constexpr):
    """v . gram v, (rows, 1, 1), of v by power iteration from the column of the largest diagonal entry.

    gram v and v^T gram in turn, which are the same: a sum over one axis is laid out as the next product takes it.
    """
    LANES: tl.constexpr = gram.shape[1]
    i, j = tl.arange(0, LANES)[None, :, None], tl.arange(0, LANES)[None, None, :]
    diagonal = tl.sum(tl.where(i == j, gram, 0), 1)
    start = tl.argmax(diagonal, 1)
    v = unit(tl.sum(tl.where(i == start[:, None, None], gram, 0), 1, keep_dims=True), 2)
    if mixer.power_iterations % 2 == 1:
        v = unit(tl.trans(tl.sum(gram * v, 2, keep_dims=True), (0, 2, 1)), 2)
    for _ in range(mixer.power_iterations // 2):
        w = unit(tl.sum(gram * v, 2, keep_dims=True), 1)
        v = unit(tl.sum(gram * w, 1, keep_dims=True), 2)
    return tl.sum(tl.sum(gram * v, 2, keep_dims=True) * tl.trans(v, (0, 2, 1)), 1, keep_dims=True)


@triton.jit
def unit(v, AXIS: tl.constexpr):
    """v / max(|v|, tiny)"""
    length = tl.sqrt(tl.sum(v * v, AXIS, keep_dims=True))
    return v * (1 / tl.maximum(length, _TINY))


# The product.


@triton.jit
def apply(factors, v, mixer: tl.constexpr):
    """Return Q v for a tile (rows, lanes) that is 0 at padding. Has barriers, but none at its beginning or end."""
    if mixer.kind == _KRONECKER:
        second = factors + mixer.lanes1 * mixer.lanes1
        first_room = second + mixer.lanes2 * mixer.lanes2
        second_room = first_room + mixer.lanes1 * mixer.lanes2
        lane = tl.arange(0, mixer.lanes1 * mixer.lanes2)
        transposed = lane % mixer.lanes2 * mixer.lanes1 + lane // mixer.lanes2
        tl.store(first_room + transposed[None, :], v)
        tl.debug_barrier()
        matrix = outer_products(first_room, second, mixer.columns, mixer.lanes1, mixer.lanes2)
        tl.store(second_room + lane[None, :], tl.reshape(matrix, v.shape))
        tl.debug_barrier()
        mixed = outer_products(factors, second_room, mixer.size, mixer.lanes1, mixer.lanes2)
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
