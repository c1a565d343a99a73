"""Modular arithmetic: read an expression, answer with its value (paper sec. 5.3).

Modulo 5, one example of length 8, the tokens before `=`, and its labels; `.` is not scored:

    input   ( 1 + 2 ) * - 3 =
    target  . . . . . . . . 1      (1 + 2) * (-3) = -9 = 1, at `=`
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.ranges import Range
from fpexp.tasks.expressions import OPERATORS, Expressions
from fpexp.tasks.lengths import LengthPolicy, too_long
from fpexp.tasks.overlap import expected_overlap
from fpexp.tasks.task import IGNORE, Batch


class ModularArithmetic:
    """Expressions of one length a batch, uniform among all of that length (`fpexp.tasks.expressions`).

    Tokens are the residues, the operators and brackets that are used, `=`, and padding, which no batch has.
    Without `unary_minus` some lengths have no expression; training passes over them.
    """

    decoding = "answer token"
    prefixes_are_samples = False
    length_key = "task.lengths.max"
    mastered_by = "last_token_accuracy"
    stop_token = None  # an answer is one token

    def __init__(
        self,
        *,
        modulus: Annotated[int, Range(2, 1000)],
        operators: str,
        brackets: bool,
        unary_minus: bool,
        lengths: LengthPolicy,
        context: Annotated[int, Range(2, 1024)],
    ) -> None:
        if not operators or any(operators.count(sign) > 1 or sign not in OPERATORS for sign in operators):
            raise UserError(f"task.operators='{operators}' must be some of '{OPERATORS}', each once")
        self.expressions = Expressions(modulus, operators, brackets, unary_minus)
        self.lengths, self.context = lengths, context
        self.vocabulary_size = len(self.expressions.symbols) + 1
        self.chance = 1 / modulus
        self.check_length(lengths.max, "task.lengths.max")

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `size` expressions of `length` tokens and `=`; (size, length + 1)."""
        expressions = self.expressions.draw(size, length, generator)
        inputs = torch.cat([expressions, torch.full((size, 1), self.expressions.index["="])], dim=1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = self.expressions.evaluate(expressions)
        return Batch(inputs, targets)

    def read_prompt(self, text: str) -> Tensor:
        """Read an expression and `=`, such as '(1+2)*3='."""
        tokens = self.expressions.read(text)
        if len(tokens) > self.context:
            raise UserError(f"the prompt has {len(tokens)} tokens, more than task.context={self.context}")
        return tokens

    def write(self, tokens: Tensor) -> str:
        """Return tokens as `read_prompt` takes them; `_` is padding."""
        return "".join([*self.expressions.symbols, "_"][token] for token in tokens.tolist())

    def answer(self, prompt: Tensor) -> Tensor:
        """Return the value of the expression before `=`."""
        return self.expressions.evaluate(prompt[None, :-1])

    def has_length(self, length: int) -> bool:
        """Tell whether there are expressions of `length` tokens."""
        return self.expressions.log_count(length) >= 0

    def input_length(self, length: int) -> int:
        """Return the number of tokens, `=` included."""
        return length + 1

    def check_length(self, length: int, key: str) -> None:
        """Refuse a length that does not fit the context, or of which there is no expression."""
        if length + 1 > self.context:
            longest = next((n for n in range(self.context - 1, 0, -1) if self.has_length(n)), 0)
            raise too_long(key, length, length + 1, self.context, longest)
        if not self.has_length(length):
            raise UserError(
                f"{key}={length}: no expression has {length} tokens without a sign; use an odd length, or "
                "task.unary_minus=true for a new run"
            )

    def expected_overlap(self, length: int, drawn: int) -> float:
        """Of all expressions of this length."""
        return expected_overlap(self.expressions.log_count(length), drawn)
