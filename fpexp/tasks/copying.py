"""Copying: read letters, then write them again (paper sec. 5.2).

One example of length 3 over `a` to `e`, and its labels; `-` is not scored:

    input   $ d a e | d a e .
    target  - - - - d a e . -      the answer and its `.`, each at the position before it

With `packing` a row of `context` tokens holds several whole examples, one after another; what is left is padding.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero, Range
from fpexp.tasks.lengths import LengthPolicy, too_long
from fpexp.tasks.overlap import expected_overlap
from fpexp.tasks.task import IGNORE, Batch

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Copy:
    """Copying of letters drawn uniformly and independently; a length is a number of letters.

    Tokens are the letters, `$`, `|`, `.` and padding. `sample` makes examples of exactly its length, with packing as
    many as fit a row. In training lengths are uniform over `lengths.min` to the longest. With packing they are one
    stream for the whole batch, in which the example that does not fit a row begins the next one: only that which does
    not fit the last row is lost, so that the lengths of a batch are uniform but for that one. (Were it drawn anew,
    each row would prefer short examples.)

    `chance` is a uniform guess among what an answer is made of, the letters and `.`.
    """

    decoding = "teacher-forced"
    prefixes_are_samples = False
    mastered_by = "sequence_accuracy"

    def __init__(
        self,
        *,
        alphabet: Annotated[int, Range(1, len(LETTERS))],
        packing: bool,
        lengths: LengthPolicy,
        context: Count,
        generated_samples: CountOrZero,
    ) -> None:
        self.alphabet, self.packing, self.lengths, self.context = alphabet, packing, lengths, context
        self.generated_samples = generated_samples
        self.length_key = "task.context" if packing else "task.lengths.max"
        self.begin_token, self.copy_token, self.stop_token, self.pad_token = range(alphabet, alphabet + 4)
        self.symbols = LETTERS[:alphabet] + "$|._"
        self.vocabulary_size = alphabet + 4
        self.chance = 1 / (alphabet + 1)
        self.check_length(lengths.max, "task.lengths.max")

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw `size` rows of examples of exactly `length` letters."""
        tokens = _tokens(length)
        in_a_row = self.context // tokens if self.packing else 1
        width = self.context if self.packing else tokens
        numbers = torch.arange(in_a_row).repeat(size)
        starts = torch.arange(size).repeat_interleave(in_a_row) * width + numbers * tokens
        return self._write(torch.full_like(starts, length), starts, numbers, (size, width), generator)

    def sample_mixed(self, size: int, longest: int, generator: torch.Generator) -> tuple[Batch, Tensor]:
        """Draw `size` rows of examples of `lengths.min` to `longest` letters; also return their lengths (E,)."""
        shortest = min(self.lengths.min, longest)
        most = size * (self.context // _tokens(shortest)) + 1 if self.packing else size
        lengths = torch.randint(shortest, longest + 1, (most,), generator=generator)
        if not self.packing:
            width = _tokens(int(lengths.max()))
            numbers = torch.zeros_like(lengths)
            return self._write(lengths, torch.arange(size) * width, numbers, (size, width), generator), lengths
        rows, numbers, offsets = _pack(_tokens(lengths), size, self.context)
        lengths = lengths[: len(rows)]
        shape = (size, self.context)
        return self._write(lengths, rows * self.context + offsets, numbers, shape, generator), lengths

    def sample_prompts(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw `$ letters |` (size, length + 2) and `letters .` (size, length + 1)."""
        letters = torch.randint(self.alphabet, (size, length), generator=generator)
        begin, copy, stop = (
            torch.full((size, 1), token) for token in (self.begin_token, self.copy_token, self.stop_token)
        )
        return torch.cat([begin, letters, copy], dim=1), torch.cat([letters, stop], dim=1)

    def _write(
        self, lengths: Tensor, starts: Tensor, numbers: Tensor, shape: tuple[int, int], generator: torch.Generator
    ) -> Batch:
        """Return rows of a shape with examples, letters drawn here, at flat positions `starts`; all else is padding.

        `lengths`, `starts` and `numbers`, the place within the row, are (E,).
        """
        sizes = _tokens(lengths)
        within = _counting(sizes)
        length = lengths.repeat_interleave(sizes)
        letters = torch.randint(self.alphabet, (int(lengths.sum()),), generator=generator)
        first_letter = (lengths.cumsum(0) - lengths).repeat_interleave(sizes)
        second = within > length
        offset = (within - 1 - second * (length + 1)).clamp(min=0)
        tokens = letters[(first_letter + offset).clamp(max=len(letters) - 1)]
        tokens[within == 0] = self.begin_token
        tokens[within == length + 1] = self.copy_token
        stops = within == 2 * length + 2
        tokens[stops] = self.stop_token
        targets = tokens.roll(-1).masked_fill_(~second | stops, IGNORE)
        at = starts.repeat_interleave(sizes) + within

        def spread(values: Tensor, rest: int | bool) -> Tensor:
            whole = torch.full((shape[0] * shape[1],), rest, dtype=values.dtype)
            whole[at] = values
            return whole.view(shape)

        mask = None if len(at) == shape[0] * shape[1] else spread(torch.ones_like(second), False)
        examples = None
        if self.packing:
            after_the_last = int(numbers.max()) + 1  # no example has it
            examples = spread(numbers.repeat_interleave(sizes), after_the_last)
        return Batch(spread(tokens, self.pad_token), spread(targets, IGNORE), mask, examples)

    def read_prompt(self, text: str) -> Tensor:
        """Read `$letters|`, such as '$abcde|'."""
        form = f"write '$', letters from a to {LETTERS[self.alphabet - 1]} and '|', such as '${LETTERS[0]}|'"
        text = text.strip()
        if not text:
            raise UserError(f"the prompt is empty; {form}")
        if not text.startswith("$"):
            raise UserError(f"the prompt does not begin with '$'; {form}")
        if len(text) == 1 or not text.endswith("|"):
            raise UserError(f"the prompt does not end with '|'; {form}")
        letters = text[1:-1]
        if not letters:
            raise UserError(f"the prompt has no letters; {form}")
        for letter in letters:
            if letter not in LETTERS[: self.alphabet]:
                raise UserError(
                    f"the prompt has {letter!r}, which is no letter of task.alphabet={self.alphabet}; {form}"
                )
        if _tokens(len(letters)) > self.context:
            raise UserError(
                f"the prompt has {len(letters)} letters, which need {_tokens(len(letters))} tokens, more than "
                f"task.context={self.context}"
            )
        return torch.tensor([self.symbols.index(symbol) for symbol in text])

    def write(self, tokens: Tensor) -> str:
        """Return tokens as `read_prompt` takes them; `_` is padding."""
        return "".join(self.symbols[token] for token in tokens.tolist())

    def answer(self, prompt: Tensor) -> Tensor:
        """Return the letters of a prompt and `.`."""
        return torch.cat([prompt[1:-1], prompt.new_tensor([self.stop_token])])

    def input_length(self, length: int) -> int:
        """Return the number of tokens of a row."""
        return self.context if self.packing else _tokens(length)

    def check_length(self, length: int, key: str) -> None:
        """Refuse a length of which not one example fits the context."""
        needed = _tokens(length)
        if needed > self.context:
            raise too_long(key, length, needed, self.context, (self.context - _tokens(0)) // 2)

    def expected_overlap(self, length: int, drawn: int) -> float:
        """Of alphabet^length strings."""
        return expected_overlap(length * math.log(self.alphabet), drawn)


Letters = TypeVar("Letters", int, Tensor)


def _tokens(length: Letters) -> Letters:
    """Return the tokens of an example: the letters twice, `$`, `|` and `.`."""
    return 2 * length + 3


def _pack(sizes: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Put examples of these sizes (E,), in their order, into `rows` rows of `width`, a new one where one does not fit.

    Returns the row, the number within the row and the offset of those that are placed, (P,) each. Sizes that are too
    few for the rows are an error of the caller.
    """
    ends = sizes.cumsum(0)
    begins = ends - sizes
    following = torch.searchsorted(ends, begins + width, right=True)  # the first example of the next row
    firsts, jump = torch.zeros(1, dtype=torch.long), torch.cat([following, torch.tensor([len(sizes)])])
    while len(firsts) <= rows:  # firsts of 1, 2, 4, ... rows
        firsts = torch.cat([firsts, jump[firsts]])
        jump = jump[jump]
    firsts = firsts[: rows + 1]
    counts = firsts.diff()
    row = torch.arange(rows).repeat_interleave(counts)
    return row, _counting(counts), begins[: len(row)] - begins[firsts[row]]


def _counting(counts: Tensor) -> Tensor:
    """Return 0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1 and so on."""
    return torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts).repeat_interleave(counts)
