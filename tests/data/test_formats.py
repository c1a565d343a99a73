"""Reading one file: every format, from any document on, and what is wrong with a file in one line."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from corpora import documents, write_jsonl, write_parquet

from fpexp.data.formats import check_file, read_documents
from fpexp.errors import FpexpError, UserError

TEXTS = ["one", "", "three\nlines\n", "ä 北京", "2024-01-01", "5", "a<|endoftext|>b"]


def read(path: Path, row: int = 0, column: str = "text", unit: Any = "file") -> list[str]:
    check_file(path, column, unit)
    return list(read_documents(path, row, column, unit))


def write_list(path: Path, texts: list[str]) -> Path:
    path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
    return path


def compressed(path: Path, texts: list[str]) -> Path:
    content = write_jsonl(path.with_name("plain.jsonl"), texts).read_bytes()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".bz2":
        path.write_bytes(bz2.compress(content))
    else:
        import pyarrow

        half = len(content) // 2
        path.write_bytes(b"".join(pyarrow.compress(c, "zstd", asbytes=True) for c in (content[:half], content[half:])))
    return path


FORMATS = {
    "a.parquet": lambda path, texts: write_parquet(path, texts, row_group_size=3),
    "a.jsonl": write_jsonl,
    "a.ndjson": write_jsonl,
    "a.json": write_jsonl,
    "list.json": write_list,
    "a.jsonl.gz": compressed,
    "a.jsonl.bz2": compressed,
    "a.JSONL.zst": compressed,
}


@pytest.mark.parametrize("name", FORMATS)
def test_documents_from_any_row_on(tmp_path: Path, name: str) -> None:
    """Dates, numbers as text and empty strings stay what they are."""
    path = FORMATS[name](tmp_path / name, TEXTS)
    for row in range(len(TEXTS) + 1):
        assert read(path, row) == TEXTS[row:]


def test_row_groups_and_batches(tmp_path: Path) -> None:
    texts = documents(1000)
    path = write_parquet(tmp_path / "a.parquet", texts, row_group_size=400)
    for row in (0, 1, 255, 256, 399, 400, 401, 700, 800, 999, 1000):
        assert read(path, row) == texts[row:]


@pytest.mark.parametrize("suffix", [".txt", ".md", ""])
def test_text_is_cut_by_its_unit(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n \n\nthree\n")
    assert read(path) == ["one\ntwo\n\n \n\nthree\n"]
    assert read(path, 1) == []
    assert read(path, unit="line") == ["one", "two", "", " ", "", "three"]
    assert read(path, 4, unit="line") == ["", "three"]
    assert read(path, unit="paragraph") == ["one\ntwo", "three"]
    assert read(path, 1, unit="paragraph") == ["three"]


def test_blank_lines_between_json_lines_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a"}\n\n \n{"text": "b"}\n{"text": "c"}')
    assert read(path) == ["a", "b", "c"]
    assert read(path, 1) == ["b", "c"]
    assert read(path, 2) == ["c"]


def test_half_a_surrogate_pair_is_no_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d \\ud83d\\ude42"}\n')
    assert read(path) == ["a\ufffd 🙂"]


def test_an_empty_text_file_is_an_empty_document_and_other_empty_files_are_refused(tmp_path: Path) -> None:
    for name in ("a.txt", "a.jsonl", "a.parquet"):
        (tmp_path / name).touch()
    assert read(tmp_path / "a.txt") == [""]
    for name, unit in (("a.txt", "line"), ("a.jsonl", "file"), ("a.parquet", "file")):
        with pytest.raises(UserError, match=rf"{name} is empty; remove it"):
            read(tmp_path / name, unit=unit)


def one_line(path: Path, kind: type[FpexpError], match: str, column: str = "text") -> None:
    with pytest.raises(kind, match=match) as error:
        read(path, column=column)
    assert type(error.value) is kind
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    one_line(write_parquet(tmp_path / "a.parquet", TEXTS), UserError, r"has no column 'body'.* \(id, text\)$", "body")
    one_line(write_jsonl(tmp_path / "a.jsonl", TEXTS), UserError, r"^line 1 .*no column 'body'.* \(id, text\)$", "body")
    with pytest.raises(UserError, match="has no column 'body'"):
        check_file(tmp_path / "a.parquet", "body", "file")


def test_what_is_not_text_is_refused_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for value, name in (("5", "int"), ("null", "null"), ("[]", "list"), ("2.5", "float"), ("{}", "dict")):
        path.write_text('{"text": "a"}\n{"text": ' + value + "}\n")
        one_line(path, UserError, rf"'text' in line 2 of .* is {name}, not text")
    path.write_text('{"text": "a"}\n"b"\n')
    one_line(path, UserError, r"^line 2 of .* is no JSON object")
    one_line(write_parquet(tmp_path / "n.parquet", ["a", None]), UserError, r"'text' in row 2 of .* is null")
    one_line(tmp_path / "n.parquet", UserError, r"column 'id' of .* holds int64, not text", "id")


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "whole.parquet", documents(3000)).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    one_line(tmp_path / "cut.parquet", FpexpError, "^cannot read .*cut.parquet: Parquet magic bytes")
    garbled = bytearray(whole)
    garbled[200:900] = bytes(700)
    (tmp_path / "garbled.parquet").write_bytes(garbled)
    one_line(tmp_path / "garbled.parquet", FpexpError, "^cannot read .*garbled.parquet: ")
    (tmp_path / "cut.jsonl").write_text('{"text": "a"}\n{"text": "b')
    one_line(tmp_path / "cut.jsonl", FpexpError, "^line 2 of .*cut.jsonl is not JSON")
    (tmp_path / "cut.json").write_text('[{"text": "a"}, {"text"')
    one_line(tmp_path / "cut.json", FpexpError, "^cannot read .*cut.json: ")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 1000)[:-12])
    one_line(tmp_path / "cut.jsonl.gz", FpexpError, "^cannot read .*cut.jsonl.gz: ")
    (tmp_path / "binary.bin").write_bytes(b"\x00\xff\xfe\x80")
    one_line(tmp_path / "binary.bin", UserError, "binary.bin is not UTF-8 text")
