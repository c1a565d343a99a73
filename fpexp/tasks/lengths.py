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
    `rehearsal` is the share of batches that, while lengths grow, are of one that has been mastered before.
    """

    policy: Literal["fixed", "uniform", "grow"]
    min: Count
    max: Count
    mastery: Fraction
    rehearsal: Fraction = 0.0

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise UserError(f"task.lengths.min={self.min} is more than task.lengths.max={self.max}")
        if self.rehearsal and self.policy != "grow":
            raise UserError(f"task.lengths.rehearsal={self.rehearsal} is for task.lengths.policy=grow only")


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
        self.rehearses = False
        self.drawn: dict[int, int] = {}

    def next(self, generator: torch.Generator) -> int:
        """Return the length of the next batch."""
        if self.policy.policy == "uniform":
            self.current = _one_of(self.choices, generator)
        mastered = self.choices[: self.choices.index(self.current)] if self.policy.rehearsal else []
        self.rehearses = bool(mastered) and float(torch.rand((), generator=generator)) < self.policy.rehearsal
        return _one_of(mastered, generator) if self.rehearses else self.current

    def count(self, length: int, examples: int) -> None:
        """Take note that training has drawn examples of a length."""
        self.drawn[length] = self.drawn.get(length, 0) + examples

    def observe(self, accuracy: float) -> None:
        """Take note of how the last batch went; one that rehearses says nothing of the current length."""
        mastered = accuracy >= self.policy.mastery and not self.rehearses
        if self.policy.policy == "grow" and mastered and self.current < self.choices[-1]:
            self.current = self.choices[bisect.bisect_right(self.choices, self.current)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-able values."""
        return {"current": self.current, "drawn": sorted(self.drawn.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.current = int(state["current"])
        self.drawn = {int(length): int(count) for length, count in state["drawn"]}


def _one_of(lengths: list[int], generator: torch.Generator) -> int:
    return lengths[int(torch.randint(len(lengths), (), generator=generator))]
