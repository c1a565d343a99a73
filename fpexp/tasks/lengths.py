"""How long the training sequences are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from fpexp.errors import UserError
from fpexp.ranges import Count, Fraction


@dataclass(frozen=True)
class LengthPolicy:
    """`fixed`: always `max`. `uniform`: one length a batch from [min, max]. `grow`: from `min` to `max` by one
    whenever a training batch reaches the accuracy `mastery`, of the kind that the task says.

    Of a batch with examples of several lengths, these are the longest's; the others are no shorter than `min`.
    """

    policy: Literal["fixed", "uniform", "grow"]
    min: Count
    max: Count
    mastery: Fraction

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise UserError(f"task.lengths.min={self.min} is more than task.lengths.max={self.max}")


class Lengths:
    """The state of a length policy: the current length, and how many sequences of each length were drawn."""

    def __init__(self, policy: LengthPolicy) -> None:
        self.policy = policy
        self.current = policy.min if policy.policy == "grow" else policy.max
        self.drawn: dict[int, int] = {}

    def next(self, generator: torch.Generator) -> int:
        """Return the length of the next batch."""
        if self.policy.policy == "uniform":
            self.current = int(torch.randint(self.policy.min, self.policy.max + 1, (), generator=generator))
        return self.current

    def count(self, length: int, examples: int) -> None:
        """Take note that training has drawn examples of a length."""
        self.drawn[length] = self.drawn.get(length, 0) + examples

    def observe(self, accuracy: float) -> None:
        """Take note of how a training batch of the current length went."""
        mastered = accuracy >= self.policy.mastery
        if self.policy.policy == "grow" and mastered and self.current < self.policy.max:
            self.current += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        return {"current": self.current, "drawn": sorted(self.drawn.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.current = int(state["current"])
        self.drawn = {int(length): int(count) for length, count in state["drawn"]}
