"""Language modelling: predict the next token of real text (paper sec. 5.4).

Documents are joined by one separator each and cut into windows of `context`, across their borders. With the bytes of
two documents "ab" and "c", `|` the separator and a context of 4:

    input   a b | c
    target  b | c |        y_t = x_{t+1}: shifted by one, every token of the text but its first is a target once
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.data import Corpus, WindowStream
from fpexp.data.formats import TextUnit
from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero
from fpexp.tasks.lengths import LengthPolicy
from fpexp.tasks.task import IGNORE, Batch


class Language:
    """Text of the hub, of local files or of prepared shards; validation and test are held out by whole documents."""

    decoding = "teacher-forced"
    prefixes_are_samples = False
    mastered_by = "last_token_accuracy"
    length_key = "task.context"

    def __init__(
        self,
        *,
        source: Literal["hub", "local", "shards"],
        dataset: str,
        name: str | None,
        split: str,
        files: str | None,
        column: str,
        text_unit: TextUnit,
        tokenizer: str,
        vocabulary_size: Count | None,
        context: Count,
        validation_tokens: Count,
        shuffle_buffer: CountOrZero,
        workers: CountOrZero,
    ) -> None:
        self.corpus = Corpus(
            source=source,
            dataset=dataset,
            name=name,
            split=split,
            files=files,
            column=column,
            text_unit=text_unit,
            tokenizer=tokenizer,
            validation_tokens=validation_tokens,
            shuffle_buffer=shuffle_buffer,
            workers=workers,
        )
        self.context, self.validation_tokens = context, validation_tokens
        self.lengths = LengthPolicy("fixed", context, context, 1.0)
        self.tokenizer = self.corpus.open_tokenizer()
        self.stop_token = self.tokenizer.separator
        self.vocabulary_size = vocabulary_size or self.tokenizer.vocabulary_size
        if self.vocabulary_size < self.tokenizer.vocabulary_size:
            raise UserError(
                f"task.vocabulary_size={vocabulary_size} is less than the {self.tokenizer.vocabulary_size} tokens of "
                f"task.tokenizer={tokenizer}; raise it, or leave it null"
            )
        self.chance = 1 / self.vocabulary_size
        self.check_length(context, "task.context")

    def open_stream(self, seed: int) -> TextStream:
        """Return the training windows, in the order of a seed."""
        return TextStream(self.corpus.stream(self.context, seed))

    def held_out(self, split: str, length: int, batch_size: int) -> Iterator[Batch]:
        """Yield the windows of a held-out text in order; the last one is shorter, with padding behind it.

        So the same tokens are scored whatever the length: all of the text but its first.
        """
        text = self._text(split)
        inputs, targets = text[:-1], text[1:]
        missing = -len(inputs) % length
        mask = torch.arange(len(inputs) + missing) < len(inputs)
        parts = [functional.pad(part, (0, missing), value=fill) for part, fill in ((inputs, 0), (targets, IGNORE))]
        whole = Batch(*(part.view(-1, length) for part in (*parts, mask)))
        for start in range(0, len(whole.inputs), batch_size):
            rows = whole.rows(slice(start, start + batch_size))
            padded = start + batch_size >= len(whole.inputs) and missing
            yield rows if padded else Batch(rows.inputs, rows.targets)

    def count_bytes(self, counts: Tensor) -> int:
        """Return the bytes of so many of each token (V,): a separator and what pads the vocabulary stand for none."""
        lengths = torch.from_numpy(self.tokenizer.byte_lengths)
        return int((counts[: len(lengths)] * lengths).sum())

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        """Draw windows of the validation text, each from anywhere in it."""
        self.check_length(length, "length")
        text = self._text("validation")
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        return Batch(windows[:, :-1], windows[:, 1:])

    def read_prompt(self, text: str) -> Tensor:
        """Return the tokens of a text behind a separator, as at the beginning of a document."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError("the prompt is not UTF-8 text; write it in that encoding") from error
        tokens = self.tokenizer.encode(text)
        return torch.tensor([self.tokenizer.separator, *tokens.tolist()])

    def write(self, tokens: Tensor) -> str:
        """Return tokens as text, without the separator at the beginning and what only pads the vocabulary."""
        numbers = [token for token in tokens.tolist() if token < self.tokenizer.vocabulary_size]
        return self.tokenizer.decode(numbers[1:] if numbers[:1] == [self.tokenizer.separator] else numbers)

    def input_length(self, length: int) -> int:
        """Return `length` itself: targets need one token more, inputs do not."""
        return length

    def check_length(self, length: int, key: str) -> None:
        """Refuse a length that the held-out text does not fill."""
        longest = self.validation_tokens - 1
        if length > longest:
            possible = f"at most {longest} here, or " if longest > 0 else ""
            raise UserError(
                f"{key}={length} needs more than the task.validation_tokens={self.validation_tokens} of held-out text; "
                f"{possible}raise task.validation_tokens for a new run"
            )

    def expected_overlap(self, length: int, drawn: int) -> None:
        """No document is in training and held out; what documents have in common nobody knows."""

    def _text(self, split: str) -> Tensor:
        texts = self.corpus.held_out()
        return {"validation": texts.validation, "test": texts.test}[split]


class TextStream:
    """Windows of text as batches."""

    def __init__(self, windows: WindowStream) -> None:
        self._windows = windows

    def read(self, size: int) -> Batch:
        """Return the next `size` windows."""
        tokens = self._windows.read(size)
        return Batch(tokens[:, :-1], tokens[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return self._windows.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self._windows.load_state_dict(state)

    def close(self) -> None:
        """End what reads ahead."""
        self._windows.close()
