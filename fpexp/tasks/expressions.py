"""Arithmetic expressions modulo m: uniform draws, values, and reading them from text. The sums of this grammar:

    sum     -> product | sum + product | sum - product
    product -> factor | product * factor
    factor  -> digit | - digit | ( sum ) | - ( sum )        a digit is a residue, one token

`*` binds more strongly than `+` and `-`, a sign more strongly than `*`; operators group to the left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fpexp.errors import UserError

OPERATORS = "+-*"

FACTOR, UNSIGNED, OPERATOR = range(3)
"""States, by what comes next: a factor, a factor without sign; or an operator, a closing bracket, the end."""

PLAIN, BRACKET, SIGN = range(3)
"""Ways to go on: a digit or an operator; a bracket, closing in the state OPERATOR; a sign."""

NEXT_STATE = np.array([OPERATOR, FACTOR, UNSIGNED, OPERATOR, FACTOR, FACTOR, FACTOR, OPERATOR, FACTOR])
NEXT_DEPTH = np.array([0, 1, 0, 0, 1, 0, 0, -1, 0])
"""The state after state * 3 + way, and the change in the number of open brackets."""


class Expressions:
    """The strings of the grammar with some of its operators, with or without brackets and signs.

    Tokens are the residues 0 to m - 1 and then `symbols[m:]`, of which the last is `=`.

    Such strings are read from left to right by the state and the number k of open brackets, each in one way only. So
    the number N(n, state, k) of ways to write n more tokens to the end is a sum over the next token, and a token drawn
    in proportion to the ways that are left after it makes every string of n tokens as likely as every other: to the
    rounding of float64, in which N is kept relative to the largest of its n.
    """

    def __init__(self, modulus: int, operators: str, brackets: bool, unary_minus: bool) -> None:
        self.modulus, self.operators, self.brackets, self.unary_minus = modulus, operators, brackets, unary_minus
        signs = [sign for sign in OPERATORS if sign in operators or (sign == "-" and unary_minus)]
        self.symbols = [*map(str, range(modulus)), *signs, *("()" if brackets else ""), "="]
        self.index = {symbol: number for number, symbol in enumerate(self.symbols)}
        self._counts: list[NDArray[np.float64]] = []  # N(n, state, k) / exp(_scales[n]), (3, n + 2)
        self._scales: list[float] = []
        self._bounds: list[NDArray[np.float64]] = []  # of the draw with n tokens left, (3 * (n + 2), 2)

    def log_count(self, length: int) -> float:
        """Return the logarithm of the number of expressions of `length` tokens; -inf where there is none."""
        self._count_to(length)
        count = float(self._counts[length][FACTOR, 0])
        return math.log(count) + self._scales[length] if count else -math.inf

    def draw(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Draw expressions (size, length), uniformly; ValueError where there is none of this length."""
        if self.log_count(length) == -math.inf:
            raise ValueError(f"there is no expression of {length} tokens")
        shape = (length, size)
        uniform = torch.rand(*shape, 1, dtype=torch.float64, generator=generator).numpy()
        digits = torch.randint(self.modulus, shape, generator=generator).numpy()
        operators = torch.randint(len(self.operators), shape, generator=generator).numpy()
        steps = np.empty(shape, np.int64)  # state * 3 + way
        state, depth = np.zeros(size, np.int64), np.zeros(size, np.int64)
        for t in range(length):
            left = length - t
            bounds = self._bounds[left].take(state * (left + 2) + depth, axis=0)
            step = steps[t]
            np.add(state * 3, (uniform[t] >= bounds).sum(axis=1), out=step)
            state = NEXT_STATE.take(step)
            depth += NEXT_DEPTH.take(step)
        of_step = np.array([self.index.get(symbol, 0) for symbol in "0(-0(-0)-"])
        tokens = of_step.take(steps)
        tokens = np.where((steps == FACTOR * 3) | (steps == UNSIGNED * 3), digits, tokens)
        numbers = np.array([self.index[operator] for operator in self.operators])
        return torch.from_numpy(np.where(steps == OPERATOR * 3, numbers.take(operators), tokens).T.copy())

    def evaluate(self, tokens: Tensor) -> Tensor:
        """Return the values (B,) of expressions (B, T), each from 0 to m - 1.

        Each level of open brackets has two numbers: the `total` of the products that are complete, and the `factor`
        that the next factor is to be multiplied by. Its value is their sum after a digit or a closing bracket.
        """
        rows = tokens.numpy().T
        opens, closes, minus = (rows == self.index.get(symbol, -1) for symbol in "()-")
        ends = (rows < self.modulus) | closes  # an operand ends here
        after_operand = np.zeros_like(ends)
        after_operand[1:] = ends[:-1]
        times, binary = rows == self.index.get("*", -1), minus & after_operand
        sums = (rows == self.index.get("+", -1)) | binary
        multiplier = np.where(rows < self.modulus, rows, times - 1 * (minus & ~after_operand))
        offset = 1 * (sums | opens) - 2 * binary
        depth = (1 * opens - closes).cumsum(axis=0)
        width = rows.shape[1]
        column = np.arange(width)
        to = depth * width + column  # where a token writes
        source = np.concatenate([column[None], to[:-1]])  # and reads: the level before it
        total, factor = np.zeros((depth.max() + 1) * width, np.int64), np.ones((depth.max() + 1) * width, np.int64)
        for t in range(len(rows)):
            inner_total, inner_factor = total.take(source[t]), factor.take(source[t])
            inner = multiplier[t] + closes[t] * (inner_total + inner_factor)
            total[to[t]] = (total.take(to[t]) * ~opens[t] + sums[t] * inner_factor) % self.modulus
            factor[to[t]] = (factor.take(to[t]) * inner + offset[t]) % self.modulus
        return torch.from_numpy((total[:width] + factor[:width]) % self.modulus)

    def read(self, text: str) -> Tensor:
        """Return the tokens (T,) of an expression and the `=` after it; a `UserError` says where it goes wrong."""
        words = re.findall(r"\d+|\S", text)
        if not words:
            raise UserError(f"the prompt is empty; write an expression and '=', such as '{self.example()}'")
        state, depth = FACTOR, 0
        for place, word in enumerate(words):
            so_far = "".join(words[:place])
            expected = self._expected(state, depth)
            if word.isdigit() and word not in self.index and state != OPERATOR:
                shown = word if len(word) < 20 else f"{word[:16]}..."
                raise UserError(f"the prompt has '{shown}', which is no residue; they are 0 to {self.modulus - 1}")
            kind = "digit" if word in self.index and word.isdigit() else word
            if kind not in expected:
                after = f"after '{so_far[-40:]}'" if so_far else "at its beginning"
                raise UserError(f"the prompt has '{word[:20]}' {after}; there it may have {_listed(expected)}")
            if word == "=":
                if place + 1 < len(words):
                    raise UserError(f"the prompt goes on after '=' with '{words[place + 1][:20]}'; it ends with '='")
                return torch.tensor([self.index[word] for word in words])
            way = BRACKET if word in "()" else SIGN if word == "-" and state == FACTOR else PLAIN
            state, depth = int(NEXT_STATE[state * 3 + way]), depth + int(NEXT_DEPTH[state * 3 + way])
        raise UserError(f"the prompt ends too early: after it may come {_listed(self._expected(state, depth))}")

    def example(self) -> str:
        """Return an expression with every kind of token that there is, and `=`."""
        one = f"1{self.operators[0]}{'-' * self.unary_minus}1"
        return f"({one})=" if self.brackets else f"{one}="

    def _expected(self, state: int, depth: int) -> Sequence[str]:
        if state == OPERATOR:
            return [*self.operators, *((")",) if depth else ("=",))]
        return ["digit", *("(" * self.brackets), *("-" * (self.unary_minus and state == FACTOR))]

    def _count_to(self, length: int) -> None:
        """Find N(n, ...) from N(n - 1, ...) up to `length`."""
        if not self._counts:
            end = np.zeros((3, 2))
            end[OPERATOR, 0] = 1
            self._counts, self._scales, self._bounds = [end], [0.0], [np.zeros((6, 2))]
        for n in range(len(self._counts), length + 1):
            before = np.zeros((3, n + 3))
            before[:, : n + 1] = self._counts[-1]
            ways = np.zeros((3, 3, n + 2))  # way, state, depth
            ways[PLAIN, : UNSIGNED + 1] = self.modulus * before[OPERATOR, :-1]
            ways[PLAIN, OPERATOR] = len(self.operators) * before[FACTOR, :-1]
            if self.brackets:
                ways[BRACKET, : UNSIGNED + 1] = before[FACTOR, 1:]
                ways[BRACKET, OPERATOR, 1:] = before[OPERATOR, :-2]
            if self.unary_minus:
                ways[SIGN, FACTOR] = before[UNSIGNED, :-1]
            whole = ways[PLAIN] + ways[BRACKET] + ways[SIGN]
            scale = float(whole.max()) or 1.0
            self._counts.append(whole / scale)
            self._scales.append(self._scales[-1] + math.log(scale))
            divisor = np.where(whole > 0, whole, 1.0)
            # The second bound of what has no sign is exactly 1, above all draws, so that no way of weight 0 is taken.
            bounds = np.stack([ways[PLAIN] / divisor, (ways[PLAIN] + ways[BRACKET]) / divisor], axis=-1)
            self._bounds.append(bounds.reshape(-1, 2))


def _listed(expected: Sequence[str]) -> str:
    return ", ".join("a digit" if word == "digit" else f"'{word}'" for word in expected)
