"""Documents of one local file, in order, from any of them on: Parquet, JSON lines, text.

The files are read here and not by `datasets`, which guesses types: it makes dates of a column of dates, and strings of
the one number in a column of text, without a word.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

from fpexp.errors import FpexpError, UserError, first_line

TextUnit = Literal["file", "paragraph", "line"]

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
JSON_LINES = (".jsonl", ".ndjson", ".json")
ENDS = 2**16  # bytes at either end of a file that tell it from another
ROWS = 256  # of a Parquet file at once: enough to be fast, little to hold


def read_documents(path: Path, row: int, column: str, text_unit: TextUnit) -> Iterator[str]:
    """Yield the file's documents from number `row` on.

    `.parquet` and JSON lines (`.jsonl`, `.ndjson`, `.json`, which may also be one list) hold one in each row's
    `column`; anything else is UTF-8 text, cut by `text_unit`. The last two may be compressed (.gz, .bz2, .zst). A
    `UserError` names the file and the row that holds no text, an `FpexpError` a file that is broken.
    """
    kind = _kind(path)
    with _explained(path):
        if kind == ".parquet":
            yield from _read_parquet(path, row, column)
        elif kind in JSON_LINES:
            yield from _read_json(path, row, column)
        else:
            with _open_text(path) as lines:
                yield from islice(_cut(lines, text_unit), row, None)


def check_file(path: Path, column: str, text_unit: TextUnit) -> None:
    """Raise now what would be raised when the file's turn comes, as far as that can be seen without reading it all."""
    kind = _kind(path)
    whole_text = kind not in (".parquet", *JSON_LINES) and text_unit == "file"  # an empty document is one
    if path.stat().st_size == 0 and not whole_text:
        raise UserError(f"{path} is empty; remove it, or leave it out of task.files")
    if kind == ".parquet":
        with _explained(path):
            _open_parquet(path, column).close()
    elif kind in JSON_LINES:
        next(read_documents(path, 0, column, text_unit), None)


def fingerprint(path: Path) -> list[Any]:
    """Return a file's name, its size and a hash of how it begins and ends, which is read as fast as it is opened."""
    with _explained(path), open(path, "rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        digest = hashlib.sha256(handle.read(ENDS))
        handle.seek(max(size - ENDS, handle.tell()))
        digest.update(handle.read(ENDS))
    return [path.name, size, digest.hexdigest()]


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what readers raise into one line that names the file; `pyarrow.ArrowInvalid` is a ValueError."""
    try:
        yield
    except FpexpError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text; convert it, or leave it out of task.files") from error
    except (OSError, EOFError, ValueError, NotImplementedError, RecursionError) as error:
        raise FpexpError(
            f"cannot read {path}: {first_line(error)}; replace the file, or leave it out of task.files"
        ) from error


def _open_parquet(path: Path, column: str) -> Any:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    check_column(file.schema_arrow, column, str(path))
    return file


def _read_parquet(path: Path, row: int, column: str) -> Iterator[str]:
    file = _open_parquet(path, column)
    start = 0
    with file:
        for group in range(file.num_row_groups):
            end = start + file.metadata.row_group(group).num_rows
            if row < end:
                for batch in file.iter_batches(ROWS, row_groups=[group], columns=[column]):
                    yield from check_texts(batch.column(0), start, row, column, str(path))
                    start += len(batch)
            start = end


def check_column(schema: Any, column: str, where: str) -> None:
    """Raise a `UserError` unless an Arrow schema has the column and it holds text."""
    import pyarrow

    if column not in schema.names:
        raise UserError(f"{where} has no column '{column}'; use task.column=<name> ({', '.join(schema.names)})")
    kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(test(kind) for test in text):
        raise UserError(f"column '{column}' of {where} holds {kind}, not text; use task.column=<name>")


def check_texts(values: Any, start: int, row: int, column: str, where: str) -> Iterator[str]:
    """Yield an Arrow array's texts from row `row` on, where `start` is the row of its first."""
    skipped = max(row - start, 0)
    for number, text in enumerate(values.slice(skipped).to_pylist(), start + skipped):
        yield _check_text(text, column, f"row {number + 1} of {where}")


def _check_text(text: Any, column: str, where: str) -> str:
    if isinstance(text, str):
        return text
    kind = "null" if text is None else type(text).__name__
    raise UserError(f"'{column}' in {where} is {kind}, not text; mend the row or use task.column=<name>")


def _read_json(path: Path, row: int, column: str) -> Iterator[str]:
    with _open_text(path) as lines:
        filled = ((number, line) for number, line in enumerate(lines, 1) if not line.isspace())
        first = next(filled, None)
        if first is None:
            return
        if first[1].lstrip().startswith("["):
            yield from islice(_read_list(path, first[1] + lines.read(), column), row, None)
            return
        if row == 0:
            yield _field(path, *first, column)
        for number, line in islice(filled, max(row - 1, 0), None):
            yield _field(path, number, line, column)


def _read_list(path: Path, text: str, column: str) -> Iterator[str]:
    for number, item in enumerate(json.loads(text), 1):
        yield _pick(item, column, f"entry {number} of {path}")


def _field(path: Path, number: int, line: str, column: str) -> str:
    where = f"line {number} of {path}"
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FpexpError(f"{where} is not JSON ({error}); replace the file, or mend the line") from error
    return _pick(item, column, where)


def _pick(item: Any, column: str, where: str) -> str:
    if not isinstance(item, dict):
        raise UserError(f"{where} is no JSON object with the text under '{column}'")
    if column not in item:
        raise UserError(f"{where} has no column '{column}'; use task.column=<name> ({', '.join(item)})")
    text = _check_text(item[column], column, where)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of \ud... escapes stands for no character
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@contextmanager
def _open_text(path: Path) -> Iterator[IO[str]]:
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        raw: Any = path.open("rb")
    else:
        import pyarrow

        raw = io.BufferedReader(pyarrow.input_stream(path, compression=compression))
    with io.TextIOWrapper(raw, encoding="utf-8-sig") as text:
        yield text


def _cut(lines: IO[str], unit: TextUnit) -> Iterator[str]:
    if unit == "file":
        yield lines.read()
    elif unit == "line":
        for line in lines:
            yield line.removesuffix("\n")
    else:
        paragraph: list[str] = []
        for line in lines:
            if not line.isspace():
                paragraph.append(line)
            elif paragraph:
                yield "".join(paragraph).removesuffix("\n")
                paragraph = []
        if paragraph:
            yield "".join(paragraph).removesuffix("\n")
