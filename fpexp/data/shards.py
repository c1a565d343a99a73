"""Tokens in files: what `fpexp data prepare` writes and training reads without documents or tokenizer.

<folder>/manifest.json    what the tokens are of, and which shards are whole; replaced after every whole shard
<folder>/shard_00000.bin  tokens as little-endian uint16 where the vocabulary fits, else uint32
<folder>/validation.bin   held-out tokens, as in `fpexp.data.held_out`
<folder>/test.bin
<folder>/tokenizer.json   the tokenizer, unless it is `bytes`

The last shard may be short. Once more tokens are asked for it is written anew, and the file is replaced just before the
manifest: so its file may hold more than the manifest says, which is then its beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpexp.data.held_out import HeldOutText
from fpexp.data.order import Place
from fpexp.data.stream import OTHER_DATA, check_same
from fpexp.errors import FpexpError, UserError, first_line
from fpexp.randomness import generator
from fpexp.run_folder import write_json

FORMAT = 1
TOKENIZER = "tokenizer.json"
DTYPES = ("<u2", "<u4")
VERIFIED_BYTES = 2**26
"""Up to this size, a fraction of a second, hashes are compared whenever a folder is opened."""


@dataclass(frozen=True)
class TokenFile:
    """One file; `state` is the stream's position behind its last token, None for held-out tokens."""

    name: str
    tokens: int
    sha256: str
    state: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raise a ValueError for what no call has written."""
        _expect(isinstance(self.name, str) and self.name not in ("", ".", "..") and "/" not in self.name, "name")
        _expect(_is_count(self.tokens, 0), "tokens")
        _expect(isinstance(self.sha256, str), "sha256")
        if self.state is not None:
            place = _mapping(_mapping(self.state, "state").get("place"), "place")
            _expect(place.keys() == {item.name for item in fields(Place)}, "place")
            _expect(all(_is_count(number, 0) for number in (*place.values(), self.state.get("offset"))), "place")


@dataclass(frozen=True)
class Manifest:
    """`corpus` and `order` say what the tokens are of; `shards` are whole, in the order of the stream."""

    corpus: Mapping[str, Any]
    order: Mapping[str, Any]
    """seed, shuffle_buffer, shard_tokens."""
    dtype: str
    validation: TokenFile
    test: TokenFile
    shards: list[TokenFile] = field(default_factory=list)
    ended: bool = False
    """True where the documents gave no more."""
    tokenizer_sha256: str | None = None
    """Of tokenizer.json; None where there is none."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Raise a ValueError for what no call has written: manifests are copied and edited."""
        tokenizer = _mapping(self.corpus, "corpus").get("tokenizer")
        wanted = {"name": str, "identity": str, "vocabulary_size": int, "separator": int}
        _expect(all(type(_mapping(tokenizer, "tokenizer").get(k)) is kind for k, kind in wanted.items()), "tokenizer")
        _expect(_is_count(_mapping(self.order, "order").get("shard_tokens"), 1), "order")
        _expect(self.dtype in DTYPES, "dtype")
        _expect(isinstance(self.ended, bool), "ended")
        _expect(self.tokenizer_sha256 is None or isinstance(self.tokenizer_sha256, str), "tokenizer_sha256")
        _expect(all(shard.state is not None for shard in self.shards), "state")

    @property
    def tokens(self) -> int:
        """Tokens in whole shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def full(self) -> list[TokenFile]:
        """The shards that no later call writes anew: all but a short last one."""
        short = bool(self.shards) and self.shards[-1].tokens < self.order["shard_tokens"]
        return self.shards[:-1] if short else self.shards

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest."""
        write_json(folder / "manifest.json", {**asdict(self), "tokens": self.tokens})

    def check_files(self, folder: Path) -> None:
        """Raise an `FpexpError` that names a file which is missing or has another size than it was written with, or a
        tokenizer that was changed.
        """
        item = np.dtype(self.dtype).itemsize
        for file in (*self.shards, self.validation, self.test):
            path, wanted = folder / file.name, file.tokens * item
            size = path.stat().st_size if path.exists() else None
            most = wanted if file not in self.shards[len(self.full) :] else self.order["shard_tokens"] * item
            if size is None or not wanted <= size <= most:
                found = "is missing" if size is None else f"has {size} bytes and should have {wanted}"
                raise FpexpError(f"{path} {found}; copy it again, or remove the folder and prepare the tokens again")
        if (folder / TOKENIZER).is_file():
            self.check_tokenizer(folder, (folder / TOKENIZER).read_bytes())

    def check_tokenizer(self, folder: Path, content: bytes) -> None:
        """Raise an `FpexpError` where the content of tokenizer.json is not what was written."""
        if self.tokenizer_sha256 not in (None, hashlib.sha256(content).hexdigest()):
            raise FpexpError(
                f"{folder / TOKENIZER} was changed; copy it again, or remove it (task.tokenizer=gpt2 is then fetched)"
            )

    @classmethod
    def read(cls, folder: Path) -> Manifest | None:
        """Return the folder's manifest, None where there is none; an `FpexpError` says that it is broken."""
        path = folder / "manifest.json"
        if not path.exists():
            return None
        try:
            raw = json.loads(path.read_text())
            del raw["tokens"]
            if raw["format"] != FORMAT:
                raise UserError(f"{path} is of format {raw['format']}, not {FORMAT}; prepare the tokens again")
            files = {name: TokenFile(**raw[name]) for name in ("validation", "test")}
            return cls(**{**raw, **files, "shards": [TokenFile(**shard) for shard in raw["shards"]]})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise FpexpError(
                f"{path} is broken ({first_line(error)}); remove the folder and prepare the tokens again"
            ) from error


class Shards:
    """The tokens in a folder, checked: a file that is missing, short or (when small) changed is an `FpexpError`."""

    def __init__(self, folder: Path) -> None:
        manifest = Manifest.read(folder)
        if manifest is None:
            raise UserError(
                f"no prepared tokens in '{folder}' (it has no manifest.json); make them with `fpexp data prepare`, or "
                "name their folder by task.files=<folder>"
            )
        if not manifest.shards:
            raise UserError(f"'{folder}' has no whole shard yet; run the same `fpexp data prepare` again")
        self.folder, self.manifest = folder, manifest
        self._dtype = np.dtype(manifest.dtype)
        manifest.check_files(folder)
        held_out = manifest.validation.tokens + manifest.test.tokens
        if (manifest.tokens + held_out) * self._dtype.itemsize <= VERIFIED_BYTES:
            self.verify()
        self._maps = [self._map(shard) for shard in manifest.shards]
        self._ends = np.cumsum([shard.tokens for shard in manifest.shards])

    def __len__(self) -> int:
        return self.manifest.tokens

    def verify(self) -> None:
        """Compare every file with its recorded hash."""
        for file in (*self.manifest.shards, self.manifest.validation, self.manifest.test):
            if hash_start(self.folder / file.name, file.tokens * self._dtype.itemsize) != file.sha256:
                raise FpexpError(f"{self.folder / file.name} was changed; remove the folder and prepare it again")

    def held_out(self, tokens: int) -> HeldOutText:
        """Return the first `tokens` tokens of validation and of test."""
        for file in (self.manifest.validation, self.manifest.test):
            if file.tokens < tokens:
                raise UserError(
                    f"'{self.folder}' holds {file.tokens} tokens of validation and test; lower "
                    f"task.validation_tokens={tokens} to that"
                )
        files = (self._map(file)[:tokens].astype(np.int64) for file in (self.manifest.validation, self.manifest.test))
        return HeldOutText(*map(torch.from_numpy, files))

    def slice(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens from `start` on, of one shard or several."""
        shard = int(np.searchsorted(self._ends, start, side="right"))
        offset = start - (int(self._ends[shard - 1]) if shard else 0)
        found = self._maps[shard][offset : offset + count]
        if len(found) == count:
            return found
        return np.concatenate((found, self.slice(start + len(found), count - len(found))))

    def _map(self, file: TokenFile) -> np.ndarray:
        if file.tokens == 0:
            return np.empty(0, self._dtype)
        return np.memmap(self.folder / file.name, self._dtype, mode="r", shape=(file.tokens,))


class ShardStream:
    """The windows of prepared tokens in a random order without replacement, another in each epoch, for ever.

    Window k is tokens [k c, k c + c], whatever the shards' size; the few tokens behind the last whole window are not
    used. The position keeps how many tokens there are, so that a folder which has grown is gone on with as it was.
    """

    def __init__(self, shards: Shards, context: int, seed: int) -> None:
        self.context = context
        self._tokens = len(shards)
        if self.windows < 1:
            raise UserError(
                f"'{shards.folder}' holds {len(shards)} tokens, fewer than one window of task.context={context} and a "
                "target; lower task.context or prepare more"
            )
        self._shards, self._seed = shards, seed
        self._go_to(0, 0)

    @property
    def windows(self) -> int:
        """Of an epoch."""
        return (self._tokens - 1) // self.context

    def read(self, n: int) -> Tensor:
        """Return the next `n` windows, (n, context + 1) int64."""
        rows = np.empty((n, self.context + 1), np.int64)
        for row in rows:
            if self._index == self.windows:
                self._go_to(self._epoch + 1, 0)
            row[:] = self._shards.slice(int(self._order[self._index]) * self.context, self.context + 1)
            self._index += 1
        return torch.from_numpy(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and number of the next window in it, of what corpus and of how many of its tokens."""
        return {
            "corpus": self._describe(),
            "tokens": self._tokens,
            "shards": self._hash_shards(self._tokens),
            "epoch": self._epoch,
            "index": self._index,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`, in the tokens that there were then."""
        check_same(state["corpus"], self._describe(), *OTHER_DATA)
        tokens, folder = state["tokens"], self._shards.folder
        if tokens > len(self._shards):
            raise UserError(
                f"the saved position is in {tokens} tokens, but '{folder}' holds {len(self._shards)} of them; prepare "
                f"the rest into it by data.tokens={tokens}, or start a new run"
            )
        if state["shards"] != self._hash_shards(tokens):
            raise UserError(f"{OTHER_DATA[0]}: '{folder}' was prepared anew, from changed documents; {OTHER_DATA[1]}")
        self._tokens = tokens
        self._go_to(state["epoch"], state["index"])

    def close(self) -> None:
        """Nothing is open but memory maps, which end with the last reference."""

    def _go_to(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = torch.randperm(self.windows, generator=generator(self._seed, "data/windows", epoch))

    def _describe(self) -> dict[str, Any]:
        manifest = self._shards.manifest
        corpus = {f"corpus.{key}": value for key, value in manifest.corpus.items()}
        order = {f"order.{key}": value for key, value in manifest.order.items()}
        return {"source": "shards", "context": self.context, "seed": self._seed, **corpus, **order}

    def _hash_shards(self, tokens: int) -> str:
        """Return a hash of the full shards among the first `tokens` tokens; a short one may be written anew."""
        manifest = self._shards.manifest
        full = manifest.full[: tokens // manifest.order["shard_tokens"]]
        return hashlib.sha256("".join(shard.sha256 for shard in full).encode()).hexdigest()


def check_tokenizer(folder: Path, content: bytes) -> None:
    """Raise an `FpexpError` where the content of the folder's tokenizer.json is not what was written."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        manifest.check_tokenizer(folder, content)


def hash_start(path: Path, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while size > 0 and (content := handle.read(min(size, 2**20))):
            digest.update(content)
            size -= len(content)
    return digest.hexdigest()


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    _expect(isinstance(value, Mapping), what)
    return value


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _expect(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"{what} is wrong")
