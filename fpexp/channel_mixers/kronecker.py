"""Kronecker channel mixer."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.errors import UserError
from fpexp.ops.l2norm import EPSILON, l2norm
from fpexp.ops.mixers import MixerForm
from fpexp.ranges import Count, Range

TINY = 1e-15
"""Least norm in the power iteration: an eigenvector has no scale, so any epsilon that counts would be wrong."""


class Kronecker(ChannelMixer):
    """Q = I - a_max (K1 (x) K2), with K_n = diag(sigmoid(.)) normalise(U U^T), U upper triangular, silu(.) (app. C.3).

    K1 is d1 x d1 and K2 is d2 x d2 with d = d1 d2, d1 <= d2 as close as possible. With row-major mat(v) of shape
    (d1, d2), (K1 (x) K2) v = K1 mat(v) K2^T, so `apply` is O(d (d1 + d2)) a token and never builds Q.

    `normalise: spectral` divides U U^T by its largest eigenvalue, whose eigenvector is found by power iteration without
    gradient; `rows` scales each row to unit length.
    """

    def __init__(
        self,
        width: int,
        *,
        a_max: Annotated[float, Range(above=0, maximum=2)],
        normalise: Literal["spectral", "rows"],
        power_iterations: Count = 10,
    ) -> None:
        self.width, self.a_max = width, a_max
        self.normalise, self.power_iterations = normalise, power_iterations
        self.sizes = _near_square(width)
        self.coefficient_size = sum(n + n * (n + 1) // 2 for n in self.sizes)

    def _form(self) -> MixerForm:
        return MixerForm("kronecker", self.sizes, self.a_max, self.normalise == "rows", self.power_iterations)

    def factors(self, coefficients: Tensor) -> tuple[Tensor, ...]:
        """Return K1 (..., d1, d1) and K2 (..., d2, d2)."""
        d1, d2 = self.sizes
        diagonal1, upper1, diagonal2, upper2 = coefficients.split(
            [d1, d1 * (d1 + 1) // 2, d2, d2 * (d2 + 1) // 2], dim=-1
        )
        return self._factor(diagonal1, upper1), self._factor(diagonal2, upper2)

    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        """Return Q v, shape (..., width)."""
        k1, k2 = factors
        mixed = k1 @ v.unflatten(-1, self.sizes) @ k2.mT
        return v - self.a_max * mixed.flatten(-2)

    def _factor(self, diagonal: Tensor, upper: Tensor) -> Tensor:
        n = diagonal.shape[-1]
        rows, columns = torch.triu_indices(n, n, device=upper.device)
        matrix = upper.new_zeros(*upper.shape[:-1], n, n)
        matrix[..., rows, columns] = functional.silu(upper)
        gram = matrix @ matrix.mT
        if self.normalise == "rows":
            gram = l2norm(gram)
        else:
            gram = gram / (self._largest_eigenvalue(gram) + EPSILON)[..., None, None]
        return torch.sigmoid(diagonal).unsqueeze(-1) * gram

    def _largest_eigenvalue(self, gram: Tensor) -> Tensor:
        """v . gram v. Its gradient takes out of that of K what would only scale U, which K does not depend on."""
        v = self._top_eigenvector(gram)
        return (v * (gram * v.unsqueeze(-2)).sum(-1)).sum(-1)

    @torch.no_grad()
    def _top_eigenvector(self, gram: Tensor) -> Tensor:
        """Power iteration from the column of the largest diagonal entry, which the top eigenvector overlaps."""
        column = gram.diagonal(dim1=-2, dim2=-1).argmax(-1)
        index = column[..., None, None].expand(*gram.shape[:-1], 1)
        v = functional.normalize(gram.gather(-1, index).squeeze(-1), dim=-1, eps=TINY)
        for _ in range(self.power_iterations):
            v = functional.normalize((gram * v.unsqueeze(-2)).sum(-1), dim=-1, eps=TINY)
        return v


def _near_square(width: int) -> tuple[int, int]:
    d1 = next(n for n in range(math.isqrt(width), 0, -1) if width % n == 0)
    if d1 == 1:
        raise UserError(
            f"the Kronecker mixer needs an inner width that factorises, not {width}; "
            "change model.d_model or model.expand"
        )
    return d1, width // d1
