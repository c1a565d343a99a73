"""The documents that training never sees, for validation and test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fpexp.data.order import Start
from fpexp.data.sources import Source
from fpexp.data.tokenizer import Tokenizer
from fpexp.errors import UserError


@dataclass(frozen=True)
class HeldOutText:
    """Tokens of validation and test, each (`validation_tokens`,) int64; the two share no document."""

    validation: Tensor
    test: Tensor


def hold_out(source: Source, tokenizer: Tokenizer, tokens: int) -> tuple[HeldOutText, Start]:
    """Return the held-out tokens, and where training may start.

    The first documents of the source's own order whose tokens, separators included, reach `tokens` are validation, the
    next that reach it are test; what is over of the last document of each is dropped. So they depend on no seed or
    epoch, and "training never sees them" is one comparison: it begins behind them, in every epoch.
    """
    documents = _documents(source)
    parts = []
    for _ in range(2):
        pieces: list[np.ndarray] = []
        missing = tokens
        while missing > 0:
            _, text = _next(documents, tokens)
            pieces += [tokenizer.encode(text), np.array([tokenizer.separator], np.int32)]
            missing -= len(pieces[-2]) + 1
        joined = np.concatenate(pieces)[:tokens] if pieces else np.empty(0)
        parts.append(torch.from_numpy(joined.astype(np.int64)))
    start, _ = _next(documents, tokens)
    return HeldOutText(*parts), start


def _documents(source: Source) -> Iterator[tuple[Start, str]]:
    found = False
    for part in range(source.parts):
        for row, text in enumerate(source.read(part, 0)):
            found = True
            yield Start(part, row), text
    if not found:
        raise UserError("there is no document at all; give files that hold some, by task.files='<pattern>'")


def _next(documents: Iterator[tuple[Start, str]], tokens: int) -> tuple[Start, str]:
    found = next(documents, None)
    if found is None:
        raise UserError(
            f"the documents are too few to leave any for training after {tokens} tokens each of validation and test; "
            "lower task.validation_tokens, or give more files"
        )
    return found
