"""Word problems: track the running product of group elements (paper sec. 5.1).

Over A3 = {0, 1, 2} (rotations), one example of length 4 and its labels:

    input   1 1 2 0
    target  1 2 1 1        y_t = y_{t-1} x_t from the identity; tagging, no label shift

With `bos` the input is `B 1 1 2 0` and the target of `B` is not scored.
"""

from __future__ import annotations

import math

import torch

from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero
from fpexp.tasks.groups import parse_group
from fpexp.tasks.lengths import LengthPolicy
from fpexp.tasks.task import IGNORE, Batch


class WordProblem:
    """The word problem of a finite group, elements drawn uniformly and independently."""

    decoding = "tagging"
    prefixes_are_samples = True

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
        targets = self.group.running_products(inputs)
        if self.bos:
            inputs = torch.cat([torch.full((size, 1), self.group.order), inputs], dim=1)
            targets = torch.cat([torch.full((size, 1), IGNORE), targets], dim=1)
        return Batch(inputs, targets)

    def input_length(self, length: int) -> int:
        """Return the number of input tokens: one more with `bos`."""
        return length + int(self.bos)

    def check_length(self, length: int, key: str) -> None:
        """Refuse a length that does not fit the context."""
        needed = self.input_length(length)
        if needed > self.context:
            raise UserError(
                f"{key}={length} needs {needed} tokens, more than task.context={self.context}; raise task.context"
            )

    def expected_overlap(self, length: int, drawn: int) -> float:
        """1 - (1 - 1/|G|^length)^drawn: the chance that a fresh sequence was drawn in training."""
        log_space = length * math.log(self.group.order)
        if log_space > 700:
            return 0.0
        return -math.expm1(drawn * math.log1p(-math.exp(-log_space))) if drawn else 0.0
