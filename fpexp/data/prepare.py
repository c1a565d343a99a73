"""Writes shards: one pass over the documents, whole shard by whole shard, so that any stop can be gone on from."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from fpexp.data.held_out import HeldOutText
from fpexp.data.shards import TOKENIZER, Manifest, TokenFile, hash_start
from fpexp.data.stream import TokenStream, check_same
from fpexp.data.tokenizer import Tokenizer
from fpexp.errors import FpexpError, UserError

FULL = {
    errno.ENOSPC: ("the disk of '{}' is full", "make room"),
    errno.EDQUOT: ("the quota of '{}' is used up", "make room"),
    errno.EFBIG: ("a file in '{}' may grow no larger (ulimit -f)", "raise the limit"),
}
PIECE = 2**18  # tokens written at once
VALIDATION, TEST = "validation.bin", "test.bin"


def prepare(
    stream: TokenStream,
    held_out: HeldOutText,
    folder: Path,
    *,
    corpus: Mapping[str, Any],
    order: Mapping[str, Any],
    tokenizer: Tokenizer,
    tokens: int,
    shard_tokens: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Manifest:
    """Write the stream's first `tokens` tokens (fewer where it ends) into `folder`; return the manifest.

    Whole shards of an earlier call are kept and gone on from; the result is that of one call. `progress` is told how
    many tokens are written. A `UserError` refuses a folder of another corpus or order; on a full disk an `FpexpError`
    says what is whole.
    """
    try:
        with _locked(folder):
            manifest = _open(folder, held_out, corpus, {**order, "shard_tokens": shard_tokens}, tokenizer)
            manifest.check_files(folder)
            if manifest.tokens >= tokens or manifest.ended:
                return manifest
            if manifest.full:
                stream.load_state_dict({**stream.state_dict(), **(manifest.full[-1].state or {})})
            return _write_shards(stream, folder, manifest, tokens, shard_tokens, progress)
    except OSError as error:
        if error.errno not in FULL:
            raise
        whole = Manifest.read(folder)
        count, kept = (len(whole.shards), whole.tokens) if whole else (0, 0)
        what, mend = FULL[error.errno]
        raise FpexpError(
            f"{what.format(folder)}; {count} whole shards ({kept:,} tokens) are kept: {mend} and run the same command "
            "again"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"cannot write to '{folder}' ({error.strerror}); name a folder by data.output=<folder>"
        ) from error
    with lock as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process writes to '{folder}'; wait, or use data.output=<folder>") from error
        yield


def _open(
    folder: Path, held_out: HeldOutText, corpus: Mapping[str, Any], order: Mapping[str, Any], tokenizer: Tokenizer
) -> Manifest:
    """Return the manifest of an earlier call, or begin one."""
    manifest = Manifest.read(folder)
    if manifest is not None:
        another = (f"'{folder}' holds other tokens", "name another folder by data.output=<folder>")
        check_same(manifest.corpus, corpus, *another)
        check_same(manifest.order, order, *another)
        return manifest
    foreign = [path.name for path in folder.iterdir() if not path.name.startswith(".") and not _is_ours(path.name)]
    if foreign:
        raise UserError(f"'{folder}' holds other files, such as {min(foreign)}; name another by data.output=<folder>")
    dtype = np.dtype("<u2" if tokenizer.vocabulary_size <= 2**16 else "<u4")
    content = tokenizer.content()
    if content is not None:
        (folder / TOKENIZER).write_bytes(content)
    tokenizer_sha256 = None if content is None else hashlib.sha256(content).hexdigest()
    validation = _write(folder / VALIDATION, [held_out.validation.numpy()], dtype)
    test = _write(folder / TEST, [held_out.test.numpy()], dtype)
    manifest = Manifest(corpus, order, dtype.str, validation, test, tokenizer_sha256=tokenizer_sha256)
    manifest.write(folder)
    return manifest


def _is_ours(name: str) -> bool:
    return name.removesuffix(".partial") in (VALIDATION, TEST, TOKENIZER) or name.startswith("shard_")


def _write_shards(
    stream: TokenStream,
    folder: Path,
    manifest: Manifest,
    tokens: int,
    shard_tokens: int,
    progress: Callable[[int], None],
) -> Manifest:
    """Go on behind the full shards. A short last one is written anew, and claimed until the new one is whole."""
    while manifest.tokens < tokens:
        full, short = manifest.full, manifest.shards[len(manifest.full) :]
        before = sum(shard.tokens for shard in full)
        count = min(shard_tokens, tokens - before)
        path = folder / f"shard_{len(full):05}.bin"
        file = _write(path, _pieces(stream, count, before, progress), np.dtype(manifest.dtype), *short)
        if file.tokens:
            state = {key: value for key, value in stream.state_dict().items() if key != "corpus"}
            manifest = dataclasses.replace(manifest, shards=[*full, dataclasses.replace(file, state=state)])
            manifest.write(folder)
        else:
            path.unlink()
        if file.tokens < count:
            manifest = dataclasses.replace(manifest, ended=True)
            manifest.write(folder)
            break
    return manifest


def _pieces(stream: TokenStream, count: int, before: int, progress: Callable[[int], None]) -> Iterator[np.ndarray]:
    done = 0
    while done < count:
        piece = stream.take(min(PIECE, count - done))
        if not len(piece):
            return
        done += len(piece)
        yield piece
        progress(before + done)


def _write(
    path: Path, pieces: Iterable[np.ndarray], dtype: np.dtype[Any], beginning: TokenFile | None = None
) -> TokenFile:
    """Write tokens; the file has its name only when it is whole. A `UserError` where they don't begin as before."""
    partial = path.with_name(f"{path.name}.partial")
    digest, tokens = hashlib.sha256(), 0
    try:
        with open(partial, "wb") as handle:
            for piece in pieces:
                content = piece.astype(dtype).tobytes()
                handle.write(content)
                digest.update(content)
                tokens += len(piece)
            handle.flush()
            os.fsync(handle.fileno())
        if beginning and hash_start(partial, beginning.tokens * dtype.itemsize) != beginning.sha256:
            raise UserError(
                f"the documents have changed: {path} would begin with other tokens; name another folder by "
                "data.output=<folder>"
            )
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    return TokenFile(path.name, tokens, digest.hexdigest())
