"""Where documents come from: local files, or a data set of the Hugging Face hub as a stream."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fpexp.data.formats import TextUnit, check_column, check_file, check_texts, fingerprint, read_documents
from fpexp.data.paths import expand
from fpexp.errors import FpexpError, UserError, first_line

log = logging.getLogger(__name__)

OPEN_TRIES = 2  # each is some twenty seconds of tries by the hub's library, and nothing is lost yet
READ_TRIES = 4  # at one row
FIRST_WAIT = 2.0  # seconds, doubled for each further try
ROWS = 256

NETWORK_PACKAGES = {"aiohttp", "fsspec", "httpcore", "httpx", "huggingface_hub", "requests", "urllib3"}


class Source(Protocol):
    """Documents in parts (files), numbered in an order of the source's own that does not change."""

    parts: int

    def describe(self) -> dict[str, Any]:
        """Return what tells this source from others, as JSON."""
        ...

    def read(self, part: int, row: int) -> Iterator[str]:
        """Yield the documents of a part from number `row` on."""
        ...


class LocalFiles:
    """The files that match a glob pattern, sorted by their paths."""

    def __init__(self, files: str, column: str = "text", text_unit: TextUnit = "file") -> None:
        self.pattern, self.column, self.text_unit = files, column, text_unit
        found = glob.glob(expand(files, "task.files"), recursive=True)
        self.paths = [Path(path) for path in sorted(found) if Path(path).is_file()]
        if not self.paths:
            raise UserError(f"no file matches '{files}'; use task.files='<folder>/*.jsonl' (.parquet, .json, .txt)")
        for path in self.paths:
            check_file(path, column, text_unit)
        self.parts = len(self.paths)

    def describe(self) -> dict[str, Any]:
        """Return pattern and column, and as `content` a hash of the files' names, sizes, beginnings and ends."""
        return {
            "source": "local",
            "files": self.pattern,
            "column": self.column,
            "text_unit": self.text_unit,
            "content": self._content,
        }

    @cached_property
    def _content(self) -> str:
        files = [fingerprint(path) for path in self.paths]
        return hashlib.sha256(json.dumps(files).encode()).hexdigest()

    def read(self, part: int, row: int) -> Iterator[str]:
        """Yield the documents of a file."""
        return read_documents(self.paths[part], row, self.column, self.text_unit)


class Hub:
    """A split of a data set of the hub, streamed: nothing is kept on disk. A part is one of its files.

    What cannot be fetched is tried again from the same row, so many times; then an `FpexpError` says what to do
    without a network.
    """

    def __init__(self, dataset: str, name: str | None, split: str, column: str = "text") -> None:
        self.dataset, self.name, self.split, self.column = dataset, name, split, column
        self._stream = self._open()
        self.parts: int = self._stream.num_shards

    def describe(self) -> dict[str, Any]:
        """Return data set, configuration, split and column."""
        return {
            "source": "hub",
            "dataset": self.dataset,
            "name": self.name,
            "split": self.split,
            "column": self.column,
            "parts": self.parts,
        }

    def read(self, part: int, row: int) -> Iterator[str]:
        """Yield the documents of a file of the data set."""
        where = f"{self.dataset}, file {part + 1} of {self.parts}"
        failures = 0
        while True:
            try:
                for text in self._read(part, row, where):
                    failures = 0
                    row += 1
                    yield text
                return
            except FpexpError:
                raise
            except Exception as error:  # whatever the libraries below raise
                failures += 1
                self._wait(error, failures, READ_TRIES)

    def _read(self, part: int, row: int, where: str) -> Iterator[str]:
        start = 0
        for table in self._stream.shard(self.parts, part).with_format("arrow").iter(ROWS):
            check_column(table.schema, self.column, where)
            if row < start + len(table):
                yield from check_texts(table.column(self.column), start, row, self.column, where)
            start += len(table)

    def _open(self) -> Any:
        import datasets

        failures = 0
        while True:
            try:
                stream = datasets.load_dataset(self.dataset, name=self.name, split=self.split, streaming=True)
                break
            except (FileNotFoundError, ValueError) as error:  # no such data set; no such configuration or split
                words = f"task.dataset={self.dataset} task.name={self.name} task.split={self.split}"
                raise UserError(f"{words}: {first_line(error)}") from error
            except Exception as error:  # whatever the libraries below raise
                failures += 1
                self._wait(error, failures, OPEN_TRIES)
        if stream.column_names is not None and self.column not in stream.column_names:
            known = ", ".join(stream.column_names)
            raise UserError(f"{self.dataset} has no column '{self.column}'; use task.column=<name> ({known})")
        return stream

    def _wait(self, error: Exception, failures: int, tries: int) -> None:
        """Sleep before the next of `tries`; raise when there is none."""
        if not _is_network(error):
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise FpexpError(
                f"cannot read {self.dataset} from the hub: {reason}; try a copy of its files: task.source=local"
            ) from error
        if failures == tries or "OfflineModeIsEnabled" in f"{type(error).__name__} {error}":
            raise FpexpError(
                f"cannot fetch {self.dataset} from the hub ({first_line(error)}); without a network use "
                "task.source=local task.files='<pattern>', or shards made by `fpexp data prepare`: "
                "task.source=shards task.files=<folder>"
            ) from error
        seconds = FIRST_WAIT * 2 ** (failures - 1)
        log.warning("%s: %s; try %d of %d in %.0f s", self.dataset, first_line(error), failures + 1, tries, seconds)
        time.sleep(seconds)


def _is_network(error: BaseException) -> bool:
    """Tell whether a later try may succeed."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and error.errno is not None:
        return True  # broken files come without a number
    packages = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(packages & NETWORK_PACKAGES)
