"""What training and evaluation know of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fpexp.tasks.lengths import LengthPolicy

IGNORE = -100  # target of a position that is not scored, the default of torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """`inputs` (B, T) token indices; `targets` (B, T), `IGNORE` where nothing is scored.

    `mask` (B, T) is true at real tokens, padding on the right; None when all are real.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.inputs.to(device), self.targets.to(device), mask)

    def chunk(self, parts: int) -> list[Batch]:
        """Split into at most `parts` batches of consecutive sequences."""
        masks: Any = [None] * parts if self.mask is None else self.mask.chunk(parts)
        pairs = zip(self.inputs.chunk(parts), self.targets.chunk(parts), strict=True)
        return [Batch(inputs, targets, mask) for (inputs, targets), mask in zip(pairs, masks, strict=False)]

    @property
    def scored(self) -> int:
        """Number of scored positions."""
        return int((self.targets != IGNORE).sum())


class Task(Protocol):
    """A source of batches. Every draw comes from the generator that it is given."""

    vocabulary_size: int
    lengths: LengthPolicy
    chance: float
    """Accuracy of a uniform guess at one scored position."""
    decoding: str
    """How outputs are read, recorded with every accuracy."""
    prefixes_are_samples: bool
    """True where the first k positions of a longer sample are a sample of length k, targets included."""

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `size` sequences of `length`."""
        ...

    def input_length(self, length: int) -> int:
        """Return the number of input tokens of a sample of `length`."""
        ...

    def check_length(self, length: int, key: str) -> None:
        """Raise a `UserError` that names `key` when a sequence of `length` does not fit."""
        ...

    def expected_overlap(self, length: int, drawn: int) -> float:
        """Return the expected share of fresh sequences of `length` that are among `drawn` training sequences."""
        ...


@runtime_checkable
class Prompted(Protocol):
    """A task whose sequences can be written as text."""

    def read_prompt(self, text: str) -> Tensor:
        """Return the tokens (T,), T >= 1, of what a user wrote; a `UserError` names what cannot be read."""
        ...

    def write(self, tokens: Tensor) -> str:
        """Return tokens (T,) as text."""
        ...


@runtime_checkable
class Tagging(Protocol):
    """A prompted task with an answer at every token."""

    def tag(self, inputs: Tensor) -> Tensor:
        """Return the targets of inputs (B, T), `IGNORE` where nothing is scored."""
        ...


@runtime_checkable
class Generating(Protocol):
    """A prompted task whose answer is written after the prompt, up to `stop_token`."""

    stop_token: int
