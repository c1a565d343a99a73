"""What the fused kernels share of the channel mixers: how coefficients define Q, its product, and the adjoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class MixerForm:
    """A channel mixer as the kernels know it: how its coefficients define Q.

    `sizes` is (rank, 0) for householder and dplr and (d1, d2) for kronecker; `rows` and `power_iterations` say how a
    Kronecker factor is normalised.
    """

    kind: Literal["householder", "dplr", "kronecker"]
    sizes: tuple[int, int]
    a_max: float
    rows: bool = False
    power_iterations: int = 0


@dataclass(frozen=True)
class Columns:
    """How the columns of what x and s contribute are shared out: mixer coefficients, b, c, delta, z.

    `sizes` are those of x's part, where the last is 0 unless the gate stands inside the loop; `from_s` those of s's
    part, 0 where a dependence is off. Delta has one column a channel, or one for a head of as many channels each.
    """

    sizes: tuple[int, int, int, int, int]
    from_s: tuple[int, int, int, int, int]

    def check(self, from_x: Tensor, weight: Tensor, x: Tensor, N: int) -> None:
        """Raise a ValueError where tensors do not fit: kernels do not look where they read."""
        _, b, c, delta, z = self.sizes
        width = x.shape[-1]
        fits = (b, c) == (N, N) and delta > 0 and width % delta == 0 and z in (0, width)
        fits &= all(present in (0, size) for present, size in zip(self.from_s, self.sizes, strict=True))
        fits &= from_x.shape == (*x.shape[:-1], sum(self.sizes)) and weight.shape == (sum(self.from_s), width)
        if not fits:
            raise ValueError(
                f"x {tuple(x.shape)}, from_x {tuple(from_x.shape)} and weight {tuple(weight.shape)} do not fit {self}"
            )

    def runs(self) -> list[tuple[int, int, int]]:
        """Return (from which column of x's part on, from which of s's part on, how many) are added."""
        runs: list[tuple[int, int, int]] = []
        target = source = 0
        for size, present in zip(self.sizes, self.from_s, strict=True):
            if present:
                if runs and runs[-1][0] + runs[-1][2] == target:
                    runs[-1] = (*runs[-1][:2], runs[-1][2] + size)
                else:
                    runs.append((target, source, size))
                source += size
            target += size
        return runs


class MixedTokens(NamedTuple):
    """What the scan takes: Q (x - y) + y (B, T, d), delta = softplus(.) (B, T, d or heads), unit b and c (B, T, N).

    `gate` is silu(z) (B, T, d), or None where no gate stands inside the loop.
    """

    mixed: Tensor
    delta: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor | None


class KnownTokens(NamedTuple):
    """`MixedTokens` that a sweep leaves behind, with what their gradient asks for.

    `y` is the iterate that all this belongs to, `from_s` (B, T, sum of columns.from_s) what s contributes, and
    `eigenvectors` (B, T, .) the top ones of Kronecker factors.
    """

    y: Tensor
    tokens: MixedTokens
    from_s: Tensor
    eigenvectors: Tensor
