"""Ranges that a setting's annotation carries, e.g. `rank: Annotated[int, Range(1)]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Range:
    """`minimum <= value <= maximum`, with `above` and `below` as the strict versions."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {
            "at least": self.minimum,
            "above": self.above,
            "at most": self.maximum,
            "below": self.below,
        }
        return " and ".join(f"{word} {bound:.12g}" for word, bound in bounds.items() if bound is not None)


Count = Annotated[int, Range(1, 2**31 - 1)]
Depth = Annotated[int, Range(1, 1024)]
CountOrZero = Annotated[int, Range(0)]
Positive = Annotated[float, Range(above=0)]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Probability = Annotated[float, Range(0, below=1)]
