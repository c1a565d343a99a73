"""A corpus by its settings: where its documents are and how they become tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from fpexp.data.formats import TextUnit
from fpexp.data.held_out import HeldOutText, hold_out
from fpexp.data.order import Order, Start
from fpexp.data.paths import expand
from fpexp.data.shards import TOKENIZER, Shards, ShardStream, check_tokenizer
from fpexp.data.sources import Hub, LocalFiles, Source
from fpexp.data.stream import TokenStream, WindowStream, check_same
from fpexp.data.tokenizer import GPT2, Tokenizer, describe, open_tokenizer
from fpexp.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """Documents of the hub or of local files, or tokens prepared from them; nothing is opened before it is needed.

    `files` is a glob pattern (local) or the folder of `fpexp data prepare` (shards), whose tokens must be of
    `tokenizer`; there dataset, name, split, column, text_unit, shuffle_buffer and workers have no meaning.
    """

    source: Literal["hub", "local", "shards"] = "hub"
    dataset: str = "HuggingFaceFW/fineweb"
    name: str | None = "sample-10BT"
    split: str = "train"
    files: str | None = None
    column: str = "text"
    text_unit: TextUnit = "file"
    tokenizer: str = "gpt2"
    validation_tokens: int = 200_000
    """Of validation, and as many of test."""
    shuffle_buffer: int = 10_000
    """Documents in a shuffled block; 0 shuffles nothing."""
    workers: int = 2
    """Threads that tokenise ahead of use; 0: none. The tokens do not depend on it."""

    def open_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, one object for all calls."""
        return self._tokenizer

    def held_out(self) -> HeldOutText:
        """Return the tokens of validation and test, which no stream gives."""
        if self.source == "shards":
            return self._shards.held_out(self.validation_tokens)
        return self._split[0]

    def stream(self, context: int, seed: int) -> WindowStream:
        """Return the training windows of `context` tokens and a target, endless, in an order drawn by `seed`."""
        if self.source == "shards":
            return ShardStream(self._shards, context, seed)
        return self.token_stream(context, seed)

    def token_stream(self, context: int = 1, seed: int = 0, epochs: int | None = None) -> TokenStream:
        """Return the tokens of documents as a stream, for `epochs` or without end."""
        order = Order(self._documents, seed, self.shuffle_buffer, self._split[1], epochs)
        corpus = {**self.describe(), "seed": seed, "shuffle_buffer": self.shuffle_buffer}
        return TokenStream(order, self._tokenizer, context, self.workers, corpus)

    def describe(self) -> dict[str, Any]:
        """Return what the tokens are of: source, tokenizer, and how much is held out."""
        tokenizer = describe(self._tokenizer)
        return {**self._documents.describe(), "tokenizer": tokenizer, "validation_tokens": self.validation_tokens}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.source == "shards" and self.tokenizer == "gpt2" and self.files:
            folder = Path(expand(self.files, "task.files"))
            if (folder / TOKENIZER).is_file():  # prepared tokens are read without a network
                return GPT2(folder / TOKENIZER, partial(check_tokenizer, folder))
        return open_tokenizer(self.tokenizer)

    @cached_property
    def _documents(self) -> Source:
        if self.source == "hub":
            return Hub(self.dataset, self.name, self.split, self.column)
        return LocalFiles(self._given_files("'<folder>/*.jsonl'"), self.column, self.text_unit)

    @cached_property
    def _split(self) -> tuple[HeldOutText, Start]:
        return hold_out(self._documents, self._tokenizer, self.validation_tokens)

    @cached_property
    def _shards(self) -> Shards:
        shards = Shards(Path(expand(self._given_files("<folder of fpexp data prepare>"), "task.files")))
        prepared = {"tokenizer": shards.manifest.corpus["tokenizer"]}
        asked = {"tokenizer": describe(self._tokenizer)}
        mend = f"use task.tokenizer={prepared['tokenizer']['name']}"
        check_same(prepared, asked, f"'{shards.folder}' is of another tokenizer", mend)
        return shards

    def _given_files(self, example: str) -> str:
        if not self.files:
            raise UserError(f"task.source={self.source} needs task.files={example}")
        return self.files
