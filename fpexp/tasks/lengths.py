"""How long the training sequences are."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fpexp.errors import UserError
from fpexp.ranges import Count, Fraction


@dataclass(frozen=True)
class LengthPolicy:
    """`fixed`: always `max`. `uniform`: one length a batch from [min, max]. `grow`: from `min` to `max`, one length
    after another, whenever a training batch reaches the accuracy `mastery`, of the kind that the task says.

    Of a batch with examples of several lengths, these are the longest's; the others are no shorter than `min`.
    """

    policy: Literal["fixed", "uniform", "grow"]
    min: Count
    max: Count
    mastery: Fraction

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise UserError(f"task.lengths.min={self.min} is more than task.lengths.max={self.max}")


def too_long(key: str, length: int, needed: int, context: int, longest: int) -> UserError:
    """Return the error for a length that needs more tokens than the context has, where `longest` still fits."""
    possible = f"at most {longest} here, or " if longest > 0 else ""
    return UserError(
        f"{key}={length} needs {needed} tokens, more than task.context={context}; {possible}raise task.context for a "
        "new run"
    )


class Lengths:
    """The state of a length policy: the current length, and how many sequences of each length were drawn.

    Lengths that are not `possible` are passed over; ValueError where none between min and max is.
    """

    def __init__(self, policy: LengthPolicy, possible: Callable[[int], bool] = lambda length: True) -> None:
        self.policy = policy
        self.choices = [length for length in range(policy.min, policy.max + 1) if possible(length)]
        if not self.choices:
            raise ValueError(f"no length from {policy.min} to {policy.max} is possible")
        self.current = self.choices[0] if policy.policy == "grow" else self.choices[-1]
        self.drawn: dict[int, int] = {}

    def next(self, generator: torch.Generator) -> int:
        """Return the length of the next batch."""
        if self.policy.policy == "uniform":
            self.current = self.choices[int(torch.randint(len(self.choices), (), generator=generator))]
        return self.current

    def count(self, length: int, examples: int) -> None:
        """Take note that training has drawn examples of a length."""
        self.drawn[length] = self.drawn.get(length, 0) + examples

    def observe(self, accuracy: float) -> None:
        """Take note of how a training batch of the current length went."""
        mastered = accuracy >= self.policy.mastery
        if self.policy.policy == "grow" and mastered and self.current < self.choices[-1]:
            self.current = self.choices[bisect.bisect_right(self.choices, self.current)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        return {"current": self.current, "drawn": sorted(self.drawn.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.current = int(state["current"])
        self.drawn = {int(length): int(count) for length, count in state["drawn"]}
