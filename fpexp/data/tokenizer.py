"""Text -> token numbers and back: bytes, GPT-2's byte pairs, or a local tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fpexp.data.paths import expand
from fpexp.errors import FpexpError, UserError, first_line

if TYPE_CHECKING:
    import tokenizers

Tokens = np.ndarray[Any, np.dtype[np.int32]]

END_OF_TEXT = "<|endoftext|>"
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
"""What tokenizer.json files call the token that ends a text, the most usual first."""


class Tokenizer(Protocol):
    """Ordinary text never gives `separator`: what looks like a special token in a document is text like the rest."""

    name: str
    """As it is asked for: `bytes`, `gpt2` or a path."""
    vocabulary_size: int
    separator: int
    """The token that follows each document."""

    @property
    def identity(self) -> str:
        """What tells two tokenizers apart: the name of a built-in one, the content's SHA-256 of a file."""
        ...

    @property
    def byte_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Number of UTF-8 bytes that each token stands for (V,); 0 for special tokens, the separator among them."""
        ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text, without separators; a `UserError` where it has none for some of it."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the tokens of each text; may be called by several threads at once."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text; bytes that are no UTF-8 become U+FFFD."""
        ...

    def content(self) -> bytes | None:
        """Return the tokenizer.json that it is; None for one that needs none."""
        ...


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `bytes` or `gpt2`, or the one in a file; a `UserError` names the alternatives."""
    if name == "bytes":
        return Bytes()
    if name == "gpt2":
        return GPT2()
    path = Path(expand(name, "task.tokenizer"))
    if path.is_file():
        return TokenizerFile(path)
    if path.suffix == ".json":
        raise UserError(f"no tokenizer file '{name}'; use task.tokenizer=bytes, gpt2 or the path of a tokenizer.json")
    raise UserError(f"unknown tokenizer '{name}' (bytes, gpt2, or the path of a tokenizer.json)")


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what is recorded of a tokenizer."""
    return {
        "name": tokenizer.name,
        "identity": tokenizer.identity,
        "vocabulary_size": tokenizer.vocabulary_size,
        "separator": tokenizer.separator,
    }


class Bytes:
    """UTF-8 bytes, 0-255, and the separator 256. Nothing to fetch."""

    name = identity = "bytes"
    vocabulary_size = 257
    separator = 256

    @cached_property
    def byte_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """One byte each; the separator none."""
        return np.array([1] * 256 + [0], np.int64)

    def encode(self, text: str) -> Tokens:
        """Return the text's bytes."""
        with _explained(self.name):
            return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return each text's bytes."""
        return [self.encode(text) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; a separator is written as <|endoftext|>."""
        end = END_OF_TEXT.encode()
        return b"".join(end if token == self.separator else bytes([token]) for token in tokens).decode(errors="replace")

    def content(self) -> None:
        """Nothing is to be kept."""


class _Library(ABC):
    """A tokenizer of the `tokenizers` library."""

    name: str
    separator: int
    vocabulary_size: int

    @abstractmethod
    def _load(self) -> tokenizers.Tokenizer: ...

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:
        tokenizer = self._load()
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # a document that spells a special token out means the letters
        return tokenizer

    @cached_property
    def byte_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Exact for byte-level vocabularies, GPT-2's kind; elsewhere the bytes of the token as it is written."""
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])
        lengths = np.zeros(self.vocabulary_size, np.int64)
        for token, i in self._tokenizer.get_vocab().items():
            if i not in special:
                lengths[i] = len(token) if byte_level else _written_bytes(token)
        return lengths

    def encode(self, text: str) -> Tokens:
        """Return the text's tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Return each text's tokens; the library uses several threads unless TOKENIZERS_PARALLELISM=false."""
        tokenizer = self._tokenizer
        with _explained(self.name):
            encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, special tokens written out."""
        return self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def content(self) -> bytes:
        """Return the tokenizer.json."""
        return self._load().to_str().encode()


class GPT2(_Library):
    """GPT-2's byte pairs; its sizes are known before it is fetched, which is when it is first used.

    `kept` is a tokenizer.json to take instead of the hub's; `check` is given its content and raises if that is not it.
    """

    name = identity = "gpt2"
    vocabulary_size = 50257
    separator = 50256

    def __init__(self, kept: Path | None = None, check: Callable[[bytes], None] = lambda content: None) -> None:
        self._kept, self._check = kept, check

    def _load(self) -> tokenizers.Tokenizer:
        return self._fetch() if self._kept is None else self._read(self._kept)

    def _fetch(self) -> tokenizers.Tokenizer:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_pretrained("gpt2")  # tries several times by itself
        except Exception as error:  # the library raises plain exceptions beside those of the hub
            raise FpexpError(
                f"cannot fetch the gpt2 tokenizer ({first_line(error)}); without a network give its tokenizer.json: "
                "task.tokenizer=<tokenizer.json>"
            ) from error
        if not self._is_ours(tokenizer):
            raise FpexpError("what the hub gave as the gpt2 tokenizer is another; use task.tokenizer=<tokenizer.json>")
        return tokenizer

    def _read(self, path: Path) -> tokenizers.Tokenizer:
        import tokenizers

        mend = "copy it again, or remove it and task.tokenizer=gpt2 is fetched"
        try:
            content = path.read_bytes()
            self._check(content)
            tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except FpexpError:
            raise
        except Exception as error:  # the library's own are plain exceptions
            raise FpexpError(f"{path} is no tokenizer.json ({first_line(error)}); {mend}") from error
        if not self._is_ours(tokenizer):
            raise FpexpError(f"{path} is not the gpt2 tokenizer; {mend}")
        return tokenizer

    def _is_ours(self, tokenizer: tokenizers.Tokenizer) -> bool:
        sizes = tokenizer.token_to_id(END_OF_TEXT), tokenizer.get_vocab_size()
        return sizes == (self.separator, self.vocabulary_size)


class TokenizerFile(_Library):
    """A tokenizer.json; its separator is the first of `SEPARATORS` that it has, or its only special token."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from error
        self.identity = hashlib.sha256(content).hexdigest()
        self._content = content
        self.vocabulary_size = max(self._tokenizer.get_vocab().values()) + 1  # numbers may have gaps
        self.separator = self._find_separator()

    def _load(self) -> tokenizers.Tokenizer:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_str(self._content.decode())
        except Exception as error:  # the library's own are plain exceptions
            raise UserError(f"{self.name} is no tokenizer.json: {first_line(error)}") from error
        if not tokenizer.get_vocab():
            raise UserError(f"the tokenizer {self.name} has no tokens; train it first")
        return tokenizer

    def content(self) -> bytes:
        """Return the file's content, so that a copy has the same identity."""
        return self._content

    def _find_separator(self) -> int:
        special = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special}
        for token in SEPARATORS:
            if token in special:
                return special[token]
        if len(special) == 1:
            return next(iter(special.values()))
        raise UserError(
            f"the tokenizer {self.name} needs a special token that ends a document: {', '.join(SEPARATORS)}, or "
            f"any single one (it has: {', '.join(special) or 'none'})"
        )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn what encoding raises into one line: the library raises plain exceptions where it has no unknown token."""
    try:
        yield
    except Exception as error:
        reason = "it is not Unicode text" if isinstance(error, (TypeError, UnicodeEncodeError)) else first_line(error)
        raise UserError(
            f"the tokenizer {name} cannot encode this text ({reason}); use another by task.tokenizer=<path>, or leave "
            "the text out"
        ) from error


def _written_bytes(token: str) -> int:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1  # a byte that the vocabulary has no character for
    return len(token.removeprefix("##").replace("\u2581", " ").encode())
