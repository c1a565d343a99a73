"""The token stream against plain lists: packing, epochs, shuffling, exact positions, threads."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import documents, flat, joined, local, make_tokenizer, split_documents, windows, write_files, write_jsonl

import fpexp
from fpexp.data import Corpus
from fpexp.data.order import Order
from fpexp.data.stream import TokenStream
from fpexp.errors import FpexpError, UserError

TEXTS = documents(400)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    write_files(tmp_path, TEXTS, 5)
    return local(tmp_path / "*.jsonl")


def with_(corpus: Corpus, **settings: Any) -> Corpus:
    return local(corpus.files or "", **settings)


def epoch_tokens() -> int:
    return len(flat(TEXTS))


@pytest.mark.parametrize("context", [1, 2, 7, 64, 1000])
def test_packing_is_that_of_plain_lists(corpus: Corpus, context: int) -> None:
    """In the files' own order, through documents and epochs; every token but the first is a target once."""
    rows = 2 * epoch_tokens() // context
    stream = with_(corpus, shuffle_buffer=0).stream(context, seed=0)
    found = torch.cat([stream.read(n) for n in (1, 2, rows - 3)])
    assert found.dtype == torch.int64
    expected = windows(flat(TEXTS * 3), context)[:rows]
    assert found.tolist() == expected
    assert found[:, 1:].flatten().tolist() == flat(TEXTS * 3)[1 : rows * context + 1]


def test_three_documents_one_empty(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["ab", "", "c"])
    stream = local(tmp_path / "a.jsonl", shuffle_buffer=0).token_stream(epochs=1)
    assert stream.take(100).tolist() == [97, 98, 256, 256, 99, 256]
    assert stream.take(1).tolist() == []


def test_documents_of_nothing_but_separators_end(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["", ""])
    stream = local(tmp_path / "a.jsonl").stream(3, seed=0)
    assert stream.read(2).tolist() == [[256] * 4] * 2


@pytest.mark.parametrize("buffer", [1, 16, 1000])
def test_an_epoch_has_every_document_once_and_the_next_another_order(corpus: Corpus, buffer: int) -> None:
    stream = with_(corpus, shuffle_buffer=buffer).token_stream()
    first, second = (split_documents(stream.take(epoch_tokens()).tolist()) for _ in range(2))
    assert Counter(first) == Counter(second) == Counter(TEXTS)
    assert first != second
    assert first != TEXTS
    assert second != TEXTS


def test_the_seed_decides_the_order(corpus: Corpus) -> None:
    def read(seed: int) -> list[int]:
        return corpus.token_stream(seed=seed).take(epoch_tokens()).tolist()

    assert read(0) == read(0)
    assert read(0) != read(1)


def test_blocks_differ_from_each_other(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [str(i % 8) for i in range(64)])
    found = split_documents(local(tmp_path / "a.jsonl", shuffle_buffer=8).token_stream(epochs=1).take(1000).tolist())
    blocks = [tuple(found[i : i + 8]) for i in range(0, 64, 8)]
    assert {tuple(sorted(block)) for block in blocks} == {tuple("01234567")}
    assert len(set(blocks)) > 4


@pytest.mark.parametrize("workers", [0, 2])
def test_stop_and_resume_gives_the_unbroken_sequence(tmp_path: Path, workers: int) -> None:
    """CASES 34: 5000 documents, two stops, past one epoch."""
    texts = documents(5000)
    write_files(tmp_path, texts, 7)
    corpus = local(tmp_path / "*.jsonl", shuffle_buffer=300, workers=workers)
    context, rows = 128, int(1.4 * len(flat(texts))) // 128
    unbroken = corpus.stream(context, seed=3).read(rows)
    found, state = [], None
    for part in (rows // 5, rows // 3, rows - rows // 5 - rows // 3):
        stream = local(corpus.files or "", shuffle_buffer=300, workers=workers).stream(context, seed=3)
        if state is not None:
            stream.load_state_dict(json.loads(state))
        for size in (part // 3, part - part // 3):
            found.append(stream.read(size))
        state = json.dumps(stream.state_dict())
        stream.close()
    assert torch.equal(torch.cat(found), unbroken)
    assert Counter(split_documents(joined(unbroken)[: len(flat(texts))])) == Counter(texts)


def test_every_position_can_be_resumed_from(tmp_path: Path) -> None:
    """At each boundary of documents, blocks, files and epochs; going back in one stream too."""
    write_files(tmp_path, ["a", "", "bcd", "e", "", "", "fgh", "i"], 2)
    corpus = local(tmp_path / "*.jsonl", shuffle_buffer=3)
    whole = joined(corpus.stream(1, seed=0).read(60))
    stream, states = corpus.stream(1, seed=0), []
    for _ in range(40):
        states.append(stream.state_dict())
        stream.read(1)
    for i, state in enumerate(states):
        stream.load_state_dict(state)
        assert joined(stream.read(20)) == whole[i : i + 21]


def test_the_tokens_do_not_depend_on_the_workers(corpus: Corpus, tmp_path: Path) -> None:
    """CASES 35: two epochs, no duplicates across workers, byte pairs as well as bytes."""
    for tokenizer in ("bytes", str(make_tokenizer(tmp_path / "tok.json"))):
        streams = [with_(corpus, workers=n, tokenizer=tokenizer).token_stream(seed=5, epochs=2) for n in (0, 2, 4)]
        found = [stream.take(10**6).tolist() for stream in streams]
        assert found[0] == found[1] == found[2]
        if tokenizer == "bytes":
            assert Counter(split_documents(found[1])) == Counter(TEXTS * 2)


def test_a_state_is_of_what_was_handed_out_not_of_what_was_read_ahead(corpus: Corpus) -> None:
    states = []
    for workers in (0, 4):
        stream = with_(corpus, workers=workers).stream(16, seed=0)
        stream.read(3)
        time.sleep(0.1)
        states.append(stream.state_dict())
        stream.close()
    assert states[0] == states[1]


def test_other_data_and_other_settings_refuse_a_state(corpus: Corpus, tmp_path: Path) -> None:
    stream = corpus.stream(8, seed=0)
    stream.read(2)
    state = json.loads(json.dumps(stream.state_dict()))
    for settings, seed, key in (
        ({"shuffle_buffer": 9}, 0, "shuffle_buffer was 64 and is 9"),
        ({}, 1, "seed was 0 and is 1"),
        ({"tokenizer": str(make_tokenizer(tmp_path / "tok.json"))}, 0, "tokenizer was name=bytes"),
        ({"validation_tokens": 5}, 0, "validation_tokens was 0 and is 5"),
    ):
        with pytest.raises(UserError, match=f"^the saved position is in other data: {key}"):
            with_(corpus, **settings).stream(8, seed=seed).load_state_dict(state)
    write_jsonl(tmp_path / "part_000.jsonl", ["changed"])
    with pytest.raises(UserError, match="in other data: files were added, removed or changed; give back the files"):
        with_(corpus).stream(8, seed=0).load_state_dict(state)


def test_documents_that_changed_under_the_same_size_are_noticed(tmp_path: Path) -> None:
    """At the ends of a file at once, elsewhere where the position shows it."""
    rest = ["x" * 2**17]
    for texts, changed in (
        (["abcdef", "g", *rest], ["a", "gbcdef", *rest]),
        ([*rest, "abcdef", "g"], [*rest, "a", "gbcdef"]),
    ):
        write_jsonl(tmp_path / "a.jsonl", texts)
        state = local(tmp_path / "a.jsonl", shuffle_buffer=0).stream(5, seed=0).state_dict()
        write_jsonl(tmp_path / "a.jsonl", changed)
        with pytest.raises(UserError, match="files were added, removed or changed"):
            local(tmp_path / "a.jsonl", shuffle_buffer=0).stream(5, seed=0).load_state_dict(state)
    write_jsonl(tmp_path / "a.jsonl", [*rest, "abcdef", "g", *rest])
    stream = local(tmp_path / "a.jsonl", shuffle_buffer=0).stream(2**17 + 6, seed=0)
    stream.read(1)
    state = stream.state_dict()
    write_jsonl(tmp_path / "a.jsonl", [*rest, "a", "gbcdef", *rest])
    again = local(tmp_path / "a.jsonl", shuffle_buffer=0).stream(2**17 + 6, seed=0)
    again.load_state_dict(state)
    with pytest.raises(FpexpError, match="the documents have changed"):
        again.read(1)


class Failing:
    """Documents whose reading fails at a row as often as it is told to."""

    parts = 1

    def __init__(self, row: int, times: int) -> None:
        self.row, self.times = row, times

    def describe(self) -> dict[str, Any]:
        return {"source": "failing"}

    def read(self, part: int, row: int) -> Iterator[str]:
        for number in range(row, len(TEXTS)):
            if number == self.row and self.times:
                self.times -= 1
                raise FpexpError("cut")
            yield TEXTS[number]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_leaves_the_position_where_it_was(workers: int) -> None:
    """So that the trainer can save a checkpoint; reading again goes on."""
    from fpexp.data.tokenizer import Bytes

    stream = TokenStream(Order(Failing(200, times=2)), Bytes(), 16, workers)
    expected = windows(flat(TEXTS), 16)
    found: list[list[int]] = []
    for fails in (True, True, False):
        with pytest.raises(FpexpError, match=r"^cut$") if fails else nullcontext():
            while len(found) < len(expected):
                before = stream.state_dict()
                found += stream.read(1).tolist()
        if fails:
            assert stream.state_dict() == before
    assert found == expected
    stream.close()


def wait_for_threads(before: int) -> int:
    for _ in range(100):
        if threading.active_count() <= before:
            break
        time.sleep(0.02)
    return threading.active_count()


def test_closing_ends_the_threads(corpus: Corpus) -> None:
    before = threading.active_count()
    stream = with_(corpus, workers=3).stream(16, seed=0)
    assert threading.active_count() == before, "nothing is started before it is needed"
    stream.read(1)
    assert threading.active_count() > before
    stream.close()
    stream.close()
    assert wait_for_threads(before) == before
    lost = with_(corpus, workers=3).stream(16, seed=0)
    lost.read(1)
    del lost
    gc.collect()
    assert wait_for_threads(before) == before


def test_a_stream_that_waits_for_the_network_ends_with_the_process(tmp_path: Path) -> None:
    """Ctrl-C while the reader sleeps ends the process at once, threads and all, without a second traceback."""
    code = """
import _thread, threading, time
from fpexp.data.order import Order
from fpexp.data.stream import TokenStream
from fpexp.data.tokenizer import Bytes

class Slow:
    parts = 1
    def read(self, part, row):
        yield "some text"
        time.sleep(1000)

threading.Timer(0.5, _thread.interrupt_main).start()
try:
    TokenStream(Order(Slow()), Bytes(), 8, workers=2).read(10)
except KeyboardInterrupt:
    print("interrupted")
kept = TokenStream(Order(Slow()), Bytes(), 8, workers=2)
threading.Timer(0.5, _thread.interrupt_main).start()
kept.read(10)
"""
    root = Path(fpexp.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=40, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
