"""Diagonal-plus-low-rank channel mixer."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fpexp.channel_mixers.base import LowRank
from fpexp.ops.mixers import MixerForm
from fpexp.ranges import Count, Range


class DPLR(LowRank):
    """Q = I - sum_i a_i u_i u_i^T,  u_i = l2norm(silu(.)),  a_i = a_max * sigmoid(.)  (paper sec. 3.3, app. C.3).

    `apply` is O(r d) a token. Not contractive for r > 1: the u_i may align and their weights add up. `contractive`
    (paper's first version) divides the a_i by max(1, sum_i a_i), which leaves Q eigenvalues from 0 to 1; `orthogonal`:
    see `LowRank`.
    """

    def __init__(
        self,
        width: int,
        *,
        rank: Count,
        a_max: Annotated[float, Range(above=0, maximum=2)],
        contractive: bool = False,
        orthogonal: bool = False,
    ) -> None:
        super().__init__(width, rank, a_max, orthogonal)
        self.contractive = contractive

    def _form(self) -> MixerForm | None:
        plain = not (self.contractive or self.orthogonal)
        return MixerForm("dplr", (self.rank, 0), self.a_max) if plain else None

    def factors(self, coefficients: Tensor) -> tuple[Tensor, ...]:
        """Return u (..., rank, width) and a (..., rank)."""
        u, a = super().factors(coefficients)
        return u, a / a.sum(-1, keepdim=True).clamp(min=1) if self.contractive else a

    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        """Return Q v, shape (..., width)."""
        u, a = factors
        overlaps = a * (u * v.unsqueeze(-2)).sum(-1)
        return v - (overlaps.unsqueeze(-1) * u).sum(-2)
