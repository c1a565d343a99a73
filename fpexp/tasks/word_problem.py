"""Word problems: track the running product of group elements (paper sec. 5.1).

Over A3 = {0, 1, 2} (rotations), one example of length 4 and its labels:

    input   1 1 2 0
    target  1 2 1 1        y_t = y_{t-1} x_t from the identity; tagging, no label shift

With `bos` the input is `B 1 1 2 0` and the target of `B` is not scored.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero
from fpexp.tasks.groups import parse_group
from fpexp.tasks.lengths import LengthPolicy, too_long
from fpexp.tasks.overlap import expected_overlap
from fpexp.tasks.task import IGNORE, Batch


class WordProblem:
    """The word problem of a finite group, elements drawn uniformly and independently."""

    decoding = "tagging"
    prefixes_are_samples = True
    length_key = "task.lengths.max"
    mastered_by = "last_token_accuracy"

    def __init__(
        self, *, group: str, bos: bool, lengths: LengthPolicy, context: Count, table_limit: CountOrZero
    ) -> None:
        try:
            self.group = parse_group(group, table_limit)
        except UserError as error:
            raise UserError(f"task.group: {error}") from error
        self.bos, self.lengths, self.context = bos, lengths, context
        self.vocabulary_size = self.group.order + int(bos)
        self.chance = 1 / self.group.order
        self.check_length(lengths.max, "task.lengths.max")

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `size` sequences of `length` elements; (size, length), or one longer with `bos`."""
        inputs = torch.randint(self.group.order, (size, length), generator=generator)
        if self.bos:
            inputs = torch.cat([torch.full((size, 1), self.group.order), inputs], dim=1)
        return Batch(inputs, self.tag(inputs))

    def tag(self, inputs: Tensor) -> Tensor:
        """Return the running products of inputs (B, T); the begin-of-sequence token is not scored."""
        if not self.bos:
            return self.group.running_products(inputs)
        return torch.cat([torch.full_like(inputs[:, :1], IGNORE), self.group.running_products(inputs[:, 1:])], dim=1)

    def read_prompt(self, text: str) -> Tensor:
        """Read element numbers, such as '3 17 5'; with `bos` its token comes first."""
        words = text.replace(",", " ").split()
        if not words:
            raise UserError(f"the prompt is empty; write element numbers below {self.group.order}, such as '1 2 0'")
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word) < self.group.order):
                shown = word if len(word) < 20 else f"{word[:16]}..."
                raise UserError(
                    f"the prompt has '{shown}', which is no element of {self.group.name}; "
                    f"elements are the numbers 0 to {self.group.order - 1}"
                )
        return torch.tensor([self.group.order] * self.bos + [int(word) for word in words])

    def write(self, tokens: Tensor) -> str:
        """Return element numbers, as `read_prompt` takes them."""
        return " ".join("bos" if token == self.group.order else str(token) for token in tokens.tolist())

    def input_length(self, length: int) -> int:
        """Return the number of input tokens: one more with `bos`."""
        return length + int(self.bos)

    def check_length(self, length: int, key: str) -> None:
        """Refuse a length that does not fit the context."""
        needed = self.input_length(length)
        if needed > self.context:
            raise too_long(key, length, needed, self.context, self.context - self.input_length(0))

    def expected_overlap(self, length: int, drawn: int) -> float:
        """1 - (1 - 1/|G|^length)^drawn: the chance that a fresh sequence was drawn in training."""
        return expected_overlap(length * math.log(self.group.order), drawn)
