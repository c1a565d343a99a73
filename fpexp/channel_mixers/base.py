"""What a layer needs of a channel mixer, and what the low-rank mixers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.errors import UserError
from fpexp.ops.l2norm import l2norm
from fpexp.ops.mixers import MixerForm


def gram_schmidt(u: Tensor) -> Tensor:
    """Make the vectors u (..., rank, width) orthonormal in order, up to the epsilon of `l2norm`.

    What is left of a vector in the span of those before it, which is nothing, stays near zero.
    """
    found: list[Tensor] = []
    for vector in u.unbind(-2):
        for before in found:
            vector = vector - (before * vector).sum(-1, keepdim=True) * before
        found.append(l2norm(vector))
    return torch.stack(found, dim=-2)


class ChannelMixer(ABC):
    """A family of matrices Q (width x width), one for each token, without parameters of its own.

    The layer projects `coefficients` (..., coefficient_size) for each token; `factors` turns them into the tensors
    that define Q, once, and `apply` multiplies by Q as often as a solver asks.
    """

    width: int
    coefficient_size: int

    @property
    def form(self) -> MixerForm | None:
        """How the fused kernels know this mixer; None for one that they do not know.

        A subclass may change what Q is, so it does not inherit `_form`: without its own, it is computed in plain torch.
        """
        form: Callable[[ChannelMixer], MixerForm] | None = vars(type(self)).get("_form")
        return None if form is None else form(self)

    @abstractmethod
    def factors(self, coefficients: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that define Q, each with the leading axes of `coefficients`."""

    @abstractmethod
    def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
        """Return Q v, shape (..., width)."""


class LowRank(ChannelMixer):
    """Unit vectors u_i = l2norm(silu(.)) and weights a_i = a_max * sigmoid(.), i = 1..rank.

    `orthogonal`: u_1, u_2, ... are made orthogonal by Gram-Schmidt, so that they cannot become one another (rank
    collapse; the paper's first version). UserError where there are more of them than channels.
    """

    def __init__(self, width: int, rank: int, a_max: float, orthogonal: bool) -> None:
        if orthogonal and rank > width:
            raise UserError(
                f"model.channel_mixer.rank={rank} vectors of an inner width of {width} cannot be orthogonal; set "
                "model.channel_mixer.orthogonal=false or a smaller rank"
            )
        self.width, self.rank, self.a_max, self.orthogonal = width, rank, a_max, orthogonal
        self.coefficient_size = rank * width + rank

    def factors(self, coefficients: Tensor) -> tuple[Tensor, ...]:
        """Return u (..., rank, width) and a (..., rank)."""
        vectors, weights = coefficients.split([self.rank * self.width, self.rank], dim=-1)
        u = l2norm(functional.silu(vectors.unflatten(-1, (self.rank, self.width))))
        if self.orthogonal:
            u = gram_schmidt(u)
        return u, self.a_max * torch.sigmoid(weights)
