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
    part, 0 where a dependence is off.
    """

    sizes: tuple[int, int, int, int, int]
    from_s: tuple[int, int, int, int, int]

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
    """What the scan takes: Q (x - y) + y and delta = softplus(.) (B, T, d), unit b and c (B, T, N).

    `gate` is silu(z) (B, T, d), or None where no gate stands inside the loop.
    """

    mixed: Tensor
    delta: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor | None


class KnownTokens(NamedTuple):
    """`MixedTokens` that a sweep leaves behind, with what their gradient asks for.

    `from_s` (B, T, sum of columns.from_s) is what s contributes, `eigenvectors` (B, T, .) the top ones of Kronecker
    factors.
    """

    tokens: MixedTokens
    from_s: Tensor
    eigenvectors: Tensor
