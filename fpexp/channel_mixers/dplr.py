"""Diagonal-plus-low-rank channel mixer."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fpexp.channel_mixers.base import LowRank
from fpexp.ops.mixers import MixerForm
from fpexp.ranges import Count, Range


class DPLR(LowRank):
    """Q = I - sum_i a_i u_i u_i^T,  u_i = l2norm(silu(.)),  a_i = a_max * sigmoid(.)  (paper sec. 3.3, app. C.3).

    `apply` is O(r d) a token. Not contractive for r > 1: the u_i may align and their weights add up.
    """

    def __init__(self, width: int, *, rank: Count, a_max: Annotated[float, Range(above=0, maximum=2)]) -> None:
        super().__init__(width, rank, a_max)

    def _form(self) -> MixerForm:
        return MixerForm("dplr", (self.rank, 0), self.a_max)

    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        """Return Q v, shape (..., width)."""
        u, a = factors
        overlaps = a * (u * v.unsqueeze(-2)).sum(-1)
        return v - (overlaps.unsqueeze(-1) * u).sum(-2)
