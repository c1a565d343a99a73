"""Tokens in files: what `fpexp data prepare` writes and training reads without documents or tokenizer.

<folder>/manifest.json    what the tokens are of, and which shards are whole; replaced after every whole shard
<folder>/shard_00000.bin  tokens as little-endian uint16 where the vocabulary fits, else uint32
<folder>/validation.bin   held-out tokens, as in `fpexp.data.held_out`
<folder>/test.bin
<folder>/tokenizer.json   the tokenizer, unless it is `bytes`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fpexp.data.held_out import HeldOutText
from fpexp.data.stream import OTHER_DATA, check_same
from fpexp.errors import FpexpError, UserError
from fpexp.randomness import generator
from fpexp.run_folder import write_json

FORMAT = 1
TOKENIZER = "tokenizer.json"
VERIFIED_BYTES = 2**26
"""Up to this size, a fraction of a second, hashes are compared whenever a folder is opened."""


@dataclass(frozen=True)
class TokenFile:
    """One file; `state` is the stream's position behind its last token, None for held-out tokens."""

    name: str
    tokens: int
    sha256: str
    state: Mapping[str, Any] | None = None


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
    format: int = FORMAT

    @property
    def tokens(self) -> int:
        """Tokens in whole shards."""
        return sum(shard.tokens for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Replace the folder's manifest."""
        write_json(folder / "manifest.json", {**asdict(self), "tokens": self.tokens})

    def check_files(self, folder: Path) -> None:
        """Raise an `FpexpError` that names a file which is missing or has another size than it was written with."""
        for file in (*self.shards, self.validation, self.test):
            path, wanted = folder / file.name, file.tokens * np.dtype(self.dtype).itemsize
            size = path.stat().st_size if path.exists() else None
            if size != wanted:
                found = "is missing" if size is None else f"has {size} bytes and should have {wanted}"
                raise FpexpError(f"{path} {found}; copy it again, or remove the folder and prepare the tokens again")

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
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FpexpError(f"{path} is broken ({error}); remove the folder and prepare the tokens again") from error


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
            with open(self.folder / file.name, "rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != file.sha256:
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
        return np.memmap(self.folder / file.name, self._dtype, mode="r")


class ShardStream:
    """The windows of prepared tokens in a random order without replacement, another in each epoch, for ever.

    Window k is tokens [k c, k c + c], whatever the shards' size; the few tokens behind the last whole window are not
    used.
    """

    def __init__(self, shards: Shards, context: int, seed: int) -> None:
        self.context = context
        self.windows = (len(shards) - 1) // context
        if self.windows < 1:
            raise UserError(
                f"'{shards.folder}' holds {len(shards)} tokens, fewer than one window of task.context={context} and a "
                "target; lower task.context or prepare more"
            )
        self._shards, self._seed = shards, seed
        self._go_to(0, 0)

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
        """Return epoch and number of the next window in it."""
        return {"corpus": self._describe(), "epoch": self._epoch, "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position of a `state_dict`."""
        check_same(state["corpus"], self._describe(), *OTHER_DATA)
        self._go_to(state["epoch"], state["index"])

    def close(self) -> None:
        """Nothing is open but memory maps, which end with the last reference."""

    def _go_to(self, epoch: int, index: int) -> None:
        self._epoch, self._index = epoch, index
        self._order = torch.randperm(self.windows, generator=generator(self._seed, "data/windows", epoch))

    def _describe(self) -> dict[str, Any]:
        hashes = "".join(shard.sha256 for shard in self._shards.manifest.shards)
        content = hashlib.sha256(hashes.encode()).hexdigest()
        return {"source": "shards", "content": content, "context": self.context, "seed": self._seed}
