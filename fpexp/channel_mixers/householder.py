"""Householder channel mixer."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fpexp.channel_mixers.base import LowRank
from fpexp.ops.mixers import MixerForm
from fpexp.ranges import Count, Range


class Householder(LowRank):
    """Product of r generalised Householder reflections (paper sec. 3.3, app. C.3).

    Q = (I - a_1 u_1 u_1^T) ... (I - a_r u_r u_r^T),  u_i = l2norm(silu(.)),  a_i = a_max * sigmoid(.)

    `apply` is O(r d) a token and never builds Q. With `a_max = 2` an eigenvalue can reach -1; I - Q is contractive
    for r = 1 and `a_max < 1` only. `orthogonal`: see `LowRank`.
    """

    def __init__(
        self, width: int, *, rank: Count, a_max: Annotated[float, Range(above=0, maximum=2)], orthogonal: bool = False
    ) -> None:
        super().__init__(width, rank, a_max, orthogonal)

    def _form(self) -> MixerForm | None:
        return None if self.orthogonal else MixerForm("householder", (self.rank, 0), self.a_max)

    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        """Return Q v, shape (..., width)."""
        u, a = factors
        for i in reversed(range(self.rank)):
            reflector = u[..., i, :]
            v = v - a[..., i, None] * (reflector * v).sum(-1, keepdim=True) * reflector
        return v
