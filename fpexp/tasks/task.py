"""What training and evaluation know of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from fpexp.tasks.lengths import LengthPolicy

IGNORE = -100  # target of a position that is not scored, the default of torch's cross entropy


@dataclass(frozen=True)
class Batch:
    """`inputs` (B, T) token indices; `targets` (B, T), `IGNORE` where nothing is scored.

    `mask` (B, T) is true at real tokens, padding on the right; None when all are real. `examples` (B, T) tells where
    a row holds several: the number, from 0, of the one that a position belongs to; None when a row is one example.
    """

    inputs: Tensor
    targets: Tensor
    mask: Tensor | None = None
    examples: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return self._each(lambda part: part.to(device))

    def rows(self, selection: slice) -> Batch:
        """Return some of the sequences."""
        return self._each(lambda part: part[selection])

    def chunk(self, parts: int) -> list[Batch]:
        """Split into at most `parts` batches of consecutive sequences."""
        total = len(self.inputs)
        size = -(-total // parts)
        return [self.rows(slice(start, start + size)) for start in range(0, total, size)]

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        mask = None if self.mask is None else change(self.mask)
        examples = None if self.examples is None else change(self.examples)
        return Batch(change(self.inputs), change(self.targets), mask, examples)

    @property
    def scored(self) -> int:
        """Number of scored positions."""
        return int((self.targets != IGNORE).sum())


class Task(Protocol):
    """A source of batches. Every draw comes from the generator that it is given."""

    vocabulary_size: int
    lengths: LengthPolicy
    length_key: str
    """The setting that says how long training sequences may be."""
    chance: float
    """Accuracy of a uniform guess at one scored position."""
    decoding: str
    """How outputs are read, recorded with every accuracy."""
    prefixes_are_samples: bool
    """True where the first k positions of a longer sample are a sample of length k, targets included."""
    mastered_by: str
    """Which accuracy of a training batch `lengths.mastery` is about: last_token_accuracy or sequence_accuracy."""

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `size` sequences of `length`."""
        ...

    def input_length(self, length: int) -> int:
        """Return the number of input tokens of a sample of `length`."""
        ...

    def check_length(self, length: int, key: str) -> None:
        """Raise a `UserError` that names `key` when a sequence of `length` does not fit."""
        ...

    def expected_overlap(self, length: int, drawn: int) -> float | None:
        """Return the expected share of fresh examples of `length` that are among `drawn` ones seen in training.

        None where nobody knows.
        """
        ...


@runtime_checkable
class Mixed(Protocol):
    """A task whose training batches hold examples of several lengths."""

    def sample_mixed(self, size: int, longest: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
        """Draw `size` sequences of examples no longer than `longest`; also return the examples' lengths (E,)."""
        ...


@runtime_checkable
class Gapped(Protocol):
    """A task without examples of some lengths."""

    def has_length(self, length: int) -> bool:
        """Tell whether there are examples of a length."""
        ...


class Stream(Protocol):
    """Training batches in an order of their own, with a position."""

    def read(self, size: int) -> Batch:
        """Return the next `size` sequences."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after what was read, as JSON-able values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position."""
        ...

    def close(self) -> None:
        """End what reads ahead."""
        ...


@runtime_checkable
class Streamed(Protocol):
    """A task whose training batches are read and not drawn."""

    def open_stream(self, seed: int) -> Stream:
        """Return the training data from its beginning, in the order of a seed."""
        ...


@runtime_checkable
class HeldOut(Protocol):
    """A task with a fixed text to measure on, whatever the seed."""

    def held_out(self, split: str, length: int, batch_size: int) -> Iterator[Batch]:
        """Yield all of the split `validation` or `test`, in sequences of `length`."""
        ...

    def count_bytes(self, counts: Tensor) -> int:
        """Return how many bytes of text the tokens stand for, given how often each of them is there (V,)."""
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
    """A prompted task whose answer is written after the prompt, up to `stop_token` where there is one."""

    stop_token: int | None


@runtime_checkable
class Answered(Protocol):
    """A generating task with right answers, so that what a model writes has an accuracy."""

    stop_token: int | None
    generated_samples: int
    """How many answers a length of the curve are written; 0 for none."""

    def sample_prompts(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw prompts (size, P) of examples of `length` and their answers (size, A), which end in the stop token."""
        ...


@runtime_checkable
class KnownAnswer(Protocol):
    """A generating task that can say what is right after a prompt."""

    def answer(self, prompt: Tensor) -> Tensor:
        """Return the tokens (A,), A >= 1, that are right after a prompt (T,)."""
        ...
