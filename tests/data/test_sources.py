"""Local files and the hub's streams: order, positions, bounded tries. No test reaches the network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpora import documents, write_files, write_jsonl, write_parquet

from fpexp.data import sources
from fpexp.data.sources import FIRST_WAIT, OPEN_TRIES, READ_TRIES, Hub, LocalFiles
from fpexp.errors import FpexpError, UserError


def test_files_are_sorted_and_read_from_any_row(tmp_path: Path) -> None:
    parts = write_files(tmp_path, documents(100), 4)
    source = LocalFiles(str(tmp_path / "*.jsonl"))
    assert source.parts == 4
    for part, texts in enumerate(parts):
        assert list(source.read(part, 0)) == texts
        assert list(source.read(part, 7)) == texts[7:]


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x.jsonl", "a/y.jsonl", "a/b/z.jsonl", "a/other.txt"):
        write_jsonl(tmp_path / name, ["text"])
    monkeypatch.chdir(tmp_path)
    assert LocalFiles("**/*.jsonl").parts == 3
    assert LocalFiles("a/*").parts == 2, "folders are no files"
    with pytest.raises(UserError, match=r"^no file matches 'b/\*.jsonl'; use task.files="):
        LocalFiles("b/*.jsonl")


def test_broken_files_are_found_before_their_turn(tmp_path: Path) -> None:
    content = write_parquet(tmp_path / "a.parquet", documents(10)).read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-100])
    with pytest.raises(FpexpError, match=r"cannot read .*b\.parquet"):
        LocalFiles(str(tmp_path / "*.parquet"))
    (tmp_path / "b.parquet").unlink()
    write_parquet(tmp_path / "b.parquet", ["x"], column="body")
    with pytest.raises(UserError, match=r"b\.parquet has no column 'text'; use task.column=<name> \(id, body\)"):
        LocalFiles(str(tmp_path / "*.parquet"))


def test_other_files_are_another_source(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one"])
    before = LocalFiles(str(path)).describe()
    assert LocalFiles(str(path)).describe() == before
    write_jsonl(path, ["other"])
    assert LocalFiles(str(path)).describe() != before


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_changed_to_the_same_size_is_another_source(tmp_path: Path, name: str) -> None:
    write_jsonl(tmp_path / name, ["x" * 2**18])
    before = LocalFiles(str(tmp_path / name)).describe()
    content = (tmp_path / name).read_bytes()
    for at in (30, -10):
        changed = bytearray(content)
        changed[at] = ord("y")
        (tmp_path / name).write_bytes(changed)
        assert LocalFiles(str(tmp_path / name)).describe()["content"] != before["content"]


def test_thousands_of_files_are_described_fast(tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"{i}.txt").write_text("text")
    source = LocalFiles(str(tmp_path / "*.txt"))
    began = time.perf_counter()
    assert source.describe() == source.describe()
    assert time.perf_counter() - began < 2


def test_nobodys_home_folder() -> None:
    with pytest.raises(UserError, match=r"^task.files=~nouser/\*: '~nouser' is nobody's home folder; write the whole"):
        LocalFiles("~nouser/*")


def test_local_files_leave_nothing_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    list(LocalFiles(str(write_parquet(tmp_path / "a.parquet", ["one"]))).read(0, 0))
    assert not os.path.exists(tmp_path / "cache")


PARTS = [documents(700), documents(300, 700), ["last"]]


class FakeHub:
    """Stands for `datasets.load_dataset`: Parquet files of ours, and failures where they are asked for."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache"))
        self._load = datasets.load_dataset
        self.files = [str(write_parquet(folder / f"{i}.parquet", texts)) for i, texts in enumerate(PARTS)]
        self.calls = 0
        self.waits: list[float] = []
        self.opening: Callable[[int], None] = lambda call: None
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr(sources.time, "sleep", self.waits.append)

    def load(self, dataset: str, *, name: str | None, split: str, streaming: bool) -> Any:
        assert (dataset, name, split, streaming) == ("owner/set", "sample", "train", True)
        self.calls += 1
        self.opening(self.calls)
        return self._load("parquet", data_files=self.files, split="train", streaming=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return FakeHub(tmp_path, monkeypatch)


def open_hub(column: str = "text") -> Hub:
    return Hub("owner/set", "sample", "train", column)


def test_a_file_of_the_hub_is_a_part(hub: FakeHub) -> None:
    source = open_hub()
    assert source.parts == 3
    for part, texts in enumerate(PARTS):
        for row in (0, 1, 99, 100, 256, 299, 300):
            assert list(source.read(part, row)) == texts[row:]
    assert hub.waits == []


def test_a_column_that_the_hub_has_not(hub: FakeHub) -> None:
    with pytest.raises(UserError, match=r"^owner/set has no column 'body'; use task.column=<name> \(id, text\)"):
        open_hub("body")
    with pytest.raises(UserError, match="holds int64, not text"):
        next(open_hub("id").read(0, 0))


def always(error: Exception) -> Callable[[int], None]:
    def fail(call: int) -> None:
        raise error

    return fail


def network_errors() -> list[Exception]:
    import httpx

    return [ConnectionError("no\nroute"), TimeoutError("slow"), httpx.ConnectError("name"), OSError(113, "no route")]


@pytest.mark.parametrize("error", network_errors(), ids=lambda error: type(error).__name__)
def test_without_a_network_tries_are_bounded(hub: FakeHub, error: Exception) -> None:
    hub.opening = always(error)
    with pytest.raises(FpexpError, match=r"^cannot fetch owner/set .*task.source=local task.files=") as raised:
        open_hub()
    assert raised.value.exit_code == 1
    assert "\n" not in str(raised.value)
    assert hub.calls == OPEN_TRIES
    assert hub.waits == [FIRST_WAIT * 2**i for i in range(OPEN_TRIES - 1)]


def test_offline_is_not_tried_again(hub: FakeHub) -> None:
    from huggingface_hub.errors import OfflineModeIsEnabled

    for error in (OfflineModeIsEnabled("it is set"), ConnectionError("Couldn't reach 'a/b' (OfflineModeIsEnabled)")):
        hub.opening = always(error)
        with pytest.raises(FpexpError, match=r"^cannot fetch owner/set"):
            open_hub()
    assert hub.calls == 2


def test_a_network_that_comes_back(hub: FakeHub) -> None:
    def fail_once(call: int) -> None:
        if call == 1:
            raise ConnectionError("away")

    hub.opening = fail_once
    assert list(open_hub().read(2, 0)) == ["last"]
    assert hub.calls == 2


@pytest.mark.parametrize("error", [FileNotFoundError("owner/set is not there"), ValueError("Bad split: tran")])
def test_what_is_not_on_the_hub_is_a_mistake(hub: FakeHub, error: Exception) -> None:
    hub.opening = always(error)
    with pytest.raises(UserError, match=rf"^task.dataset=owner/set task.name=sample task.split=train: {error}"):
        open_hub()
    assert hub.calls == 1


def test_other_failures_of_the_library_are_one_line(hub: FakeHub) -> None:
    hub.opening = always(RuntimeError("Dataset scripts are no longer supported\nat all"))
    with pytest.raises(
        FpexpError, match=r"^cannot read owner/set .* RuntimeError: Dataset scripts .* supported; try a copy"
    ):
        open_hub()
    assert hub.calls == 1


def break_reading(source: Hub, monkeypatch: pytest.MonkeyPatch, failures: list[int], error: Exception) -> list[int]:
    """Make reading fail at the rows in `failures`, one after the other; return the rows it was begun from."""
    begun: list[int] = []
    original = source._read

    def read(part: int, row: int, where: str) -> Any:
        begun.append(row)
        for number, text in enumerate(original(part, row, where), row):
            if failures and number == failures[0]:
                failures.pop(0)
                raise error
            yield text

    monkeypatch.setattr(source, "_read", read)
    return begun


def test_a_fetch_that_fails_goes_on_from_the_same_row(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_hub()
    rows = [5, 300, 300, 300, 301, 699]
    begun = break_reading(source, monkeypatch, list(rows), ConnectionError("cut"))
    assert list(source.read(0, 0)) == PARTS[0]
    assert begun == [0, *rows]
    assert hub.waits == [2.0, 2.0, 4.0, 8.0, 2.0, 2.0], "the count begins anew where a document came"


def test_a_fetch_that_fails_for_good(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_hub()
    begun = break_reading(source, monkeypatch, [300] * 99, ConnectionError("cut"))
    found: list[str] = []
    with pytest.raises(FpexpError, match=r"^cannot fetch owner/set from the hub \(cut\)"):
        found.extend(source.read(0, 0))
    assert found == PARTS[0][:300]
    assert len(begun) == READ_TRIES


def test_a_broken_file_of_the_hub_is_not_tried_again(hub: FakeHub) -> None:
    content = bytearray(Path(hub.files[0]).read_bytes())
    content[200:900] = bytes(700)
    Path(hub.files[0]).write_bytes(content)
    with pytest.raises(FpexpError, match=r"^cannot read owner/set from the hub: "):
        list(open_hub().read(0, 0))
    assert hub.waits == []
