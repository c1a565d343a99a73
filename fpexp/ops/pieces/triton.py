"""Time in pieces that run side by side: how long one is, and what carries the state from one to the next.

A scan whose state starts a piece as S ends it as S' = decay * S + sum, where `decay` is the product of the piece's
decays and `sum` the state that it ends with from zero. So one launch finds both for every piece, `carry` turns the sums
into the states before the pieces, and a last launch runs every piece from its own. Going back in time the same holds
for the gradient of the state.

Roofline: `carry` reads and writes each sum once and reads each decay, in float32; its programs go through the pieces
one after another, with the next two on their way. 32 pieces are some 10 us, whatever their size up to 10 MB of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch

MULTIPROCESSORS = 132
"""Of an H200. What has more runs the same pieces, with some left idle."""

_FEWEST = 4
"""Pieces: fewer do not pay for reading everything twice."""

_LEAST_TILES = 8
"""Of a piece, beside which its start and the carry are short."""

_BLOCK = 512
"""Numbers of a state that a program of `carry` holds."""


def tiles_of_a_piece(tiles: int, programs: int, wanted: int) -> int:
    """Return how many of the `tiles` of a sequence a piece has; all of them where time is not cut.

    `programs` take all of time each; a power of two of pieces makes as many as there can be of `wanted`.
    """
    pieces = 1
    while 2 * pieces * programs <= wanted and 2 * pieces * _LEAST_TILES <= tiles:
        pieces *= 2
    return triton.cdiv(tiles, pieces) if pieces >= _FEWEST else tiles


def carry(decays: Tensor, sums: Tensor, first: Tensor | None, last: Tensor | None, back: bool = False) -> Launch:
    """Return what turns `sums` (rows, pieces, ...) into the states before the pieces, or after them going `back`.

    decays: one for each number, or (rows, pieces); `first`, what they start from, and `last`, filled with what is left
    at the end: (rows, ...), zeros and nowhere when None.
    """
    rows, pieces = sums.shape[:2]
    size = sums[0, 0].numel()
    sizes = {"pieces": pieces, "size": size, "EACH": decays.shape == sums.shape, "BACK": back, "BLOCK": _BLOCK}
    tensors = {"decays": decays, "sums": sums, "first": first, "last": last}
    compute = COMPUTE.get(sums.dtype, tl.float32)
    return Launch(_carry, rows * triton.cdiv(size, _BLOCK), 4, {**tensors, **sizes, "COMPUTE": compute})


@triton.jit
def _carry(
    decays, sums, first, last, pieces, size,
    EACH: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    S = tl.zeros([BLOCK], COMPUTE)
    if first is not None:
        S = tl.load(first + row * size + i, i < size, other=0).to(COMPUTE)
    for k in tl.range(0, pieces, num_stages=3):
        piece = row * pieces + (pieces - 1 - k if BACK else k)
        added = tl.load(sums + piece * size + i, i < size, other=0)
        decay = tl.load(decays + piece * size + i, i < size, other=0) if EACH else tl.load(decays + piece)
        tl.store(sums + piece * size + i, S, i < size)
        S = decay * S + added
    if last is not None:
        tl.store(last + row * size + i, S.to(last.dtype.element_ty), i < size)
