"""Shards on disk: what they hold, how a stopped `prepare` goes on, what is refused, and how they are read."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import documents, flat, joined, local, make_gpt2, make_tokenizer, write_files, write_jsonl

from fpexp.data import Corpus, prepare
from fpexp.data.shards import Manifest, Shards, ShardStream
from fpexp.errors import FpexpError, UserError

TEXTS = documents(600)
HELD_OUT = 150


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "texts").mkdir()
    write_files(tmp_path / "texts", TEXTS, 4)
    return local(tmp_path / "texts" / "*.jsonl", validation_tokens=HELD_OUT)


def make(
    corpus: Corpus,
    folder: Path,
    tokens: int = 5000,
    shard_tokens: int = 1200,
    seed: int = 0,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Manifest:
    return prepare.prepare(
        corpus.token_stream(seed=seed, epochs=1),
        corpus.held_out(),
        folder,
        corpus=corpus.describe(),
        order={"seed": seed, "shuffle_buffer": corpus.shuffle_buffer},
        tokenizer=corpus.open_tokenizer(),
        tokens=tokens,
        shard_tokens=shard_tokens,
        progress=progress,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


def read_all(folder: Path) -> list[int]:
    shards = Shards(folder)
    return shards.slice(0, len(shards)).tolist()


def test_shards_hold_the_stream(corpus: Corpus, tmp_path: Path) -> None:
    seen: list[int] = []
    manifest = make(corpus, tmp_path / "out", progress=seen.append)
    assert [shard.tokens for shard in manifest.shards] == [1200, 1200, 1200, 1200, 200]
    assert seen == [1200, 2400, 3600, 4800, 5000]
    assert read_all(tmp_path / "out") == corpus.token_stream(epochs=1).take(5000).tolist()
    raw = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert raw["dtype"] == "<u2"
    assert raw["tokens"] == 5000
    assert raw["corpus"]["tokenizer"] == {
        "name": "bytes",
        "identity": "bytes",
        "vocabulary_size": 257,
        "separator": 256,
    }
    for shard in raw["shards"]:
        content = (tmp_path / "out" / shard["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (2 * shard["tokens"], shard["sha256"])
    held_out = Shards(tmp_path / "out").held_out(HELD_OUT)
    assert torch.equal(held_out.validation, corpus.held_out().validation)
    assert torch.equal(held_out.test, corpus.held_out().test)


def test_a_large_vocabulary_takes_four_bytes(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.open_tokenizer(), "vocabulary_size", 2**16 + 1, raising=True)
    assert make(corpus, tmp_path / "out").dtype == "<u4"
    assert read_all(tmp_path / "out") == corpus.token_stream(epochs=1).take(5000).tolist()


def test_documents_that_end_before(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is whole is not read again: without the documents the same command gives the same."""
    manifest = make(corpus, tmp_path / "out", tokens=10**6)
    assert read_all(tmp_path / "out") == corpus.token_stream(epochs=1).take(10**6).tolist()
    assert manifest.tokens < len(flat(TEXTS)) - 2 * HELD_OUT
    before = contents(tmp_path / "out")
    monkeypatch.delattr("fpexp.data.stream.TokenStream.take")
    assert make(corpus, tmp_path / "out", tokens=10**6) == manifest
    assert contents(tmp_path / "out") == before


def test_a_shard_more_is_not_begun_where_the_documents_end(corpus: Corpus, tmp_path: Path) -> None:
    whole = len(corpus.token_stream(epochs=1).take(10**6))
    manifest = make(corpus, tmp_path / "out", tokens=10**6, shard_tokens=whole)
    assert len(manifest.shards) == 1
    assert sorted(contents(tmp_path / "out")) == ["manifest.json", "shard_00000.bin", "test.bin", "validation.bin"]


class Stop(BaseException):
    """Stands for a signal."""


def stop_at(tokens: int) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done >= tokens:
            raise Stop

    return progress


def test_going_on_gives_what_one_call_gives(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    for tokens in (1200, 2400, 3600):
        with pytest.raises(Stop):
            make(corpus, tmp_path / "out", progress=stop_at(tokens))
        assert not list((tmp_path / "out").glob("*.partial"))
    manifest = Manifest.read(tmp_path / "out")
    assert manifest is not None
    assert len(manifest.shards) == 2
    make(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_more_tokens_than_before_and_fewer(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    for tokens in (700, 1300, 1300, 5000):
        assert make(corpus, tmp_path / "out", tokens=tokens).tokens == tokens
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert make(corpus, tmp_path / "out", tokens=100).tokens == 5000, "what is there is kept"


def test_a_short_shard_is_kept_until_the_new_one_is_whole(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out", tokens=1500)
    claimed: list[int] = []

    def look(done: int) -> None:
        manifest = Manifest.read(tmp_path / "out")
        assert manifest is not None
        manifest.check_files(tmp_path / "out")
        claimed.append(manifest.tokens)

    make(corpus, tmp_path / "out", progress=look)
    assert claimed == [1500, 2400, 3600, 4800]


def test_a_stop_keeps_a_short_shard(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "whole")
    make(corpus, tmp_path / "out", tokens=1500)
    before = contents(tmp_path / "out")
    with pytest.raises(Stop):
        make(corpus, tmp_path / "out", progress=stop_at(2400))
    assert contents(tmp_path / "out") == before
    make(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_stop_between_a_shard_and_the_manifest(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file then holds more than the manifest says: readers see its beginning, another call goes on."""

    def stop(*arguments: Any) -> None:
        raise Stop

    make(corpus, tmp_path / "whole")
    make(corpus, tmp_path / "out", tokens=1500)
    before = read_all(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", stop)
        with pytest.raises(Stop):
            make(corpus, tmp_path / "out")
    assert (tmp_path / "out" / "shard_00001.bin").stat().st_size == 2400
    assert read_all(tmp_path / "out") == before
    assert ShardStream(Shards(tmp_path / "out"), 100, seed=0).windows == 14
    assert make(corpus, tmp_path / "out", tokens=1500).tokens == 1500
    assert make(corpus, tmp_path / "out", tokens=1600).tokens == 1600
    make(corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    path = tmp_path / "out" / "shard_00001.bin"
    path.write_bytes(path.read_bytes() + b"xx")
    with pytest.raises(FpexpError, match="has 2402 bytes and should have 2400"):
        Shards(tmp_path / "out")


def test_documents_that_changed_unnoticed_do_not_replace_a_shard(corpus: Corpus, tmp_path: Path) -> None:
    """Such as those of the hub, of which no hash is known."""
    make(corpus, tmp_path / "out", tokens=700)
    before = contents(tmp_path / "out")
    stream = corpus.token_stream(epochs=1)
    stream.take(1)
    with pytest.raises(UserError, match=r"the documents have changed: .*shard_00000.bin would begin with other tokens"):
        prepare.prepare(
            stream,
            corpus.held_out(),
            tmp_path / "out",
            corpus=corpus.describe(),
            order={"seed": 0, "shuffle_buffer": corpus.shuffle_buffer},
            tokenizer=corpus.open_tokenizer(),
            tokens=5000,
            shard_tokens=1200,
        )
    assert contents(tmp_path / "out") == before


def test_a_whole_shard_that_was_lost_is_named(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out")
    (tmp_path / "out" / "shard_00001.bin").unlink()
    with pytest.raises(FpexpError, match=r"shard_00001.bin is missing; copy it again"):
        make(corpus, tmp_path / "out", tokens=6000)


def test_killed_at_any_time(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL, again and again, until a call comes to its end."""
    make(corpus, tmp_path / "whole", shard_tokens=500)
    monkeypatch.setattr(prepare, "PIECE", 100)
    waits = [0.02, 0.05, 0.1, 0.15, 0.2, 30.0]
    context, codes = multiprocessing.get_context("fork"), []
    for wait in waits:
        process = context.Process(
            target=make, args=(corpus, tmp_path / "out", 5000, 500, 0, lambda _: time.sleep(0.01))
        )
        process.start()
        process.join(wait)
        process.kill()
        process.join()
        codes.append(process.exitcode)
    assert codes[0] == -signal.SIGKILL
    assert codes[-1] == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_full_disk(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a shard is written, and while the manifest is."""
    make(corpus, tmp_path / "whole")

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = 0

    def full_at_third(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 + 3:  # validation and test come first
            full()

    monkeypatch.setattr(prepare.os, "fsync", full_at_third)
    with pytest.raises(FpexpError, match=r"disk of '.*out' is full; 2 whole shards \(2,400 tokens\) are kept") as error:
        make(corpus, tmp_path / "out")
    assert error.value.exit_code == 1
    assert not list((tmp_path / "out").glob("*.partial"))
    with monkeypatch.context() as patch:
        patch.setattr(Manifest, "write", full)
        with pytest.raises(FpexpError, match=r"2 whole shards"):
            make(corpus, tmp_path / "out")
        with pytest.raises(FpexpError, match=r"0 whole shards \(0 tokens\)"):
            make(corpus, tmp_path / "new")
    for name in ("out", "new"):
        make(corpus, tmp_path / name)
        assert contents(tmp_path / name) == contents(tmp_path / "whole")


def test_a_folder_is_of_one_corpus_in_one_order(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    tokenizer = str(make_tokenizer(tmp_path / "tok.json"))
    write_jsonl(tmp_path / "other.jsonl", TEXTS)
    for changes, arguments, message in (
        ({"tokenizer": tokenizer}, {}, "tokenizer was name=bytes, .* and is name=.*tok.json"),
        ({"files": str(tmp_path / "other.jsonl")}, {}, "files was .* and is "),
        ({"shuffle_buffer": 5}, {}, "shuffle_buffer was 64 and is 5"),
        ({"validation_tokens": 20}, {}, "validation_tokens was 150 and is 20"),
        ({}, {"seed": 1}, "seed was 0 and is 1"),
        ({}, {"shard_tokens": 7}, "shard_tokens was 1200 and is 7"),
    ):
        with pytest.raises(
            UserError, match=f"out' holds other tokens: {message}.*; name another folder by data.output=<folder>"
        ):
            make(dataclasses.replace(corpus, **changes), tmp_path / "out", **arguments)
    write_jsonl(tmp_path / "texts" / "part_000.jsonl", ["x" * 1000])
    with pytest.raises(UserError, match="holds other tokens: files were added, removed or changed; name another"):
        make(dataclasses.replace(corpus), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_a_tokenizer_file_may_be_moved(corpus: Corpus, tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "tok.json")
    make(dataclasses.replace(corpus, tokenizer=str(path)), tmp_path / "out", tokens=2000)
    path.rename(tmp_path / "moved.json")
    moved = dataclasses.replace(corpus, tokenizer=str(tmp_path / "moved.json"))
    assert make(moved, tmp_path / "out", tokens=4000).tokens > 2000


def test_a_folder_of_other_files_is_left_alone(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"texts' holds other files, such as part_000.jsonl; name another"):
        make(corpus, tmp_path / "texts")
    assert not list((tmp_path / "texts").glob("*.bin"))


def test_one_process_at_a_time(corpus: Corpus, tmp_path: Path) -> None:
    def second(done: int) -> None:
        with pytest.raises(UserError, match="another process writes to"):
            make(corpus, tmp_path / "out")

    make(corpus, tmp_path / "out", tokens=1200, progress=second)


def test_broken_folders(corpus: Corpus, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(UserError, match=r"^no prepared tokens in '.*out' \(it has no manifest.json\); make them with"):
        Shards(folder)
    make(corpus, folder)
    path = folder / "shard_00002.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-2])
    with pytest.raises(FpexpError, match=r"shard_00002.bin has 2398 bytes and should have 2400; copy it again"):
        Shards(folder)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(FpexpError, match=r"shard_00002.bin was changed"):
        Shards(folder)
    path.unlink()
    with pytest.raises(FpexpError, match=r"shard_00002.bin is missing"):
        Shards(folder)
    for text in ("{", "[]", '{"format": 1}', "{}"):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(FpexpError, match=r"manifest.json is broken .*; remove the folder"):
            Shards(folder)


CHANGES: list[dict[str, Any]] = [
    {"dtype": "foo"},
    {"dtype": []},
    {"corpus": None},
    {"corpus": {}},
    {"corpus": {"tokenizer": 5}},
    {"order": None},
    {"order": {"shard_tokens": "many"}},
    {"ended": "no"},
    {"tokenizer_sha256": 5},
    {"shards": None},
    {"shards": [5]},
    {"validation": {"name": "../validation.bin", "tokens": 150, "sha256": ""}},
    {"format": None},
    {"unknown": 1},
    {"shards.name": 5},
    {"shards.tokens": "5"},
    {"shards.tokens": -1},
    {"shards.sha256": None},
    {"shards.state": None},
    {"shards.state": {"place": {"epoch": 0}, "offset": 0}},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_broken_manifests(corpus: Corpus, tmp_path: Path, change: dict[str, Any]) -> None:
    make(corpus, tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    raw = json.loads(path.read_text())
    for key, value in change.items():
        of_shard = key.startswith("shards.")
        (raw["shards"][1] if of_shard else raw)[key.removeprefix("shards.")] = value
    path.write_text(json.dumps(raw))
    message = (
        "is of format None" if "format" in change else r"manifest.json is broken \(.*\); remove the folder and prepare"
    )
    for use in (lambda: Shards(tmp_path / "out"), lambda: make(corpus, tmp_path / "out", tokens=6000)):
        with pytest.raises(FpexpError, match=message):
            use()


def test_a_deeply_nested_manifest(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(FpexpError, match=r"manifest.json is broken"):
        Shards(tmp_path)


def test_a_file_size_limit(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(descriptor: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(prepare.os, "fsync", limited)
    with pytest.raises(
        FpexpError,
        match=r"out' may grow no larger \(ulimit -f\); 0 whole shards \(0 tokens\) are kept: raise the limit",
    ) as error:
        make(corpus, tmp_path / "out")
    assert error.value.exit_code == 1


def test_a_folder_that_cannot_be(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"^cannot write to '.*' \(.*\); name a folder by data.output=<folder>$"):
            make(corpus, folder)


def test_windows_are_those_of_the_stream_in_another_order(corpus: Corpus, tmp_path: Path) -> None:
    """Whatever the size of the shards; each once an epoch, across shards too."""
    tokens = corpus.token_stream(epochs=1).take(5000).tolist()
    context = 450
    expected = [tokens[i : i + context + 1] for i in range(0, 5000 - context, context)]
    found = []
    for shard_tokens in (1200, 200):
        make(corpus, tmp_path / str(shard_tokens), shard_tokens=shard_tokens)
        stream = ShardStream(Shards(tmp_path / str(shard_tokens)), context, seed=0)
        found.append(torch.cat([stream.read(n) for n in (1, len(expected) - 1, len(expected))]))
    assert torch.equal(found[0], found[1])
    first, second = found[0].split(len(expected))
    assert sorted(first.tolist()) == sorted(second.tolist()) == sorted(expected)
    assert first.tolist() != second.tolist()
    assert first.tolist() != expected


def test_a_shard_stream_is_resumed_exactly(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out")
    shards = Shards(tmp_path / "out")
    unbroken = ShardStream(shards, 50, seed=2).read(250)
    found, state = [], None
    for n in (70, 80, 100):
        stream = ShardStream(shards, 50, seed=2)
        if state is not None:
            stream.load_state_dict(json.loads(state))
        found.append(stream.read(n))
        state = json.dumps(stream.state_dict())
    assert torch.equal(torch.cat(found), unbroken)
    assert not torch.equal(ShardStream(shards, 50, seed=3).read(20), unbroken[:20])
    with pytest.raises(UserError, match="context was 50 and is 20"):
        ShardStream(shards, 20, seed=2).load_state_dict(json.loads(state or ""))
    with pytest.raises(UserError, match=r"holds 5000 tokens, fewer than one window of task.context=5000"):
        ShardStream(shards, 5000, seed=0)


def test_a_stream_is_resumed_in_a_folder_that_has_grown(corpus: Corpus, tmp_path: Path) -> None:
    """Also where the short shard that it was in was written anew; over epochs."""
    folder = tmp_path / "out"
    make(corpus, folder, tokens=3000)
    unbroken = ShardStream(Shards(folder), 50, seed=2).read(200)
    stream = ShardStream(Shards(folder), 50, seed=2)
    found = [stream.read(40)]
    for tokens in (3100, 5000):
        state = json.dumps(stream.state_dict())
        make(corpus, folder, tokens=tokens)
        stream = ShardStream(Shards(folder), 50, seed=2)
        stream.load_state_dict(json.loads(state))
        found.append(stream.read(80))
        assert stream.state_dict()["tokens"] == 3000
    assert torch.equal(torch.cat(found), unbroken)
    assert not torch.equal(ShardStream(Shards(folder), 50, seed=2).read(200), unbroken), "a new run uses all"


def test_a_stream_is_not_resumed_in_other_or_fewer_tokens(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out")
    state = json.loads(json.dumps(ShardStream(Shards(tmp_path / "out"), 50, seed=0).state_dict()))

    def refused(folder: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            ShardStream(Shards(tmp_path / folder), 50, seed=0).load_state_dict(state)

    make(corpus, tmp_path / "fewer", tokens=3000)
    refused("fewer", r"^the saved position is in 5000 tokens, but '.*fewer' holds 3000 of them; .*by data.tokens=5000")
    make(corpus, tmp_path / "seed", seed=1)
    refused("seed", r"^the saved position is in other data: order.seed was 0 and is 1; give back")
    make(dataclasses.replace(corpus, validation_tokens=20), tmp_path / "held")
    refused("held", r"in other data: corpus.validation_tokens was 150 and is 20")
    state["shards"] = "0"
    refused("out", r"in other data: '.*out' was prepared anew, from changed documents")
    state = json.loads(json.dumps(corpus.stream(50, seed=0).state_dict()))
    refused("out", r"in other data: source was local and is shards")
    write_jsonl(tmp_path / "texts" / "part_000.jsonl", TEXTS)
    state = ShardStream(Shards(tmp_path / "out"), 50, seed=0).state_dict()
    make(dataclasses.replace(corpus), tmp_path / "changed")
    refused("changed", r"in other data: files were added, removed or changed")


def test_windows_are_quick_to_come_by(tmp_path: Path, corpus: Corpus) -> None:
    """A million of them cost no list of Python numbers."""
    shards = Shards.__new__(Shards)
    shards.folder, shards._maps, shards._ends = tmp_path, [np.zeros(2**21 + 1, np.uint16)], np.array([2**21 + 1])
    shards.manifest = make(corpus, tmp_path / "out")
    shards.manifest = dataclasses.replace(
        shards.manifest, shards=[dataclasses.replace(shards.manifest.shards[0], tokens=2**21 + 1)]
    )
    began = time.perf_counter()
    ShardStream(shards, 2, seed=0).read(10)
    assert time.perf_counter() - began < 2


def test_the_corpus_reads_shards_as_it_reads_documents(corpus: Corpus, tmp_path: Path) -> None:
    make(corpus, tmp_path / "out")
    prepared = Corpus(source="shards", files=str(tmp_path / "out"), tokenizer="bytes", validation_tokens=100)
    assert torch.equal(prepared.held_out().test, corpus.held_out().test[:100])
    rows = prepared.stream(32, seed=0).read(5)
    assert rows.shape == (5, 33)
    assert joined(corpus.stream(32, seed=0).read(5))
    with pytest.raises(UserError, match=r"holds 150 tokens of validation and test; lower task.validation_tokens=151"):
        dataclasses.replace(prepared, validation_tokens=151).held_out()
    with pytest.raises(
        UserError,
        match=r"is of another tokenizer: tokenizer was name=bytes, .* and is name=gpt2.*; use task.tokenizer=bytes",
    ):
        dataclasses.replace(prepared, tokenizer="gpt2").stream(32, seed=0)
    with pytest.raises(UserError, match=r"^task.source=shards needs task.files=<folder of fpexp data prepare>"):
        dataclasses.replace(prepared, files=None).stream(32, seed=0)


def test_shards_bring_their_tokenizer(corpus: Corpus, tmp_path: Path) -> None:
    """So that prepared GPT-2 tokens are decoded and counted in bytes without a network."""
    path = make_tokenizer(tmp_path / "tok.json")
    make(dataclasses.replace(corpus, tokenizer=str(path)), tmp_path / "out", tokens=2000)
    kept = tmp_path / "out" / "tokenizer.json"
    assert kept.read_bytes() == path.read_bytes()
    path.unlink()
    prepared = Corpus(source="shards", files=str(tmp_path / "out"), tokenizer=str(kept), validation_tokens=10)
    assert prepared.stream(16, seed=0).read(1).shape == (1, 17)
    make_gpt2(kept)
    for name in ("manifest.json", "shard_00000.bin"):  # what tells another tokenizer
        (tmp_path / "out" / name).unlink()
    gpt2 = dataclasses.replace(prepared, tokenizer="gpt2").open_tokenizer()
    assert gpt2.decode(gpt2.encode("the cat").tolist()) == "the cat"


@pytest.fixture
def gpt2_shards(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Tokens that were prepared by what the hub gave, and no hub any more."""
    from tokenizers import Tokenizer

    path = str(make_gpt2(tmp_path / "hub.json"))
    with monkeypatch.context() as patch:
        library = {"from_pretrained": lambda name: Tokenizer.from_file(path), "from_str": Tokenizer.from_str}
        patch.setattr("tokenizers.Tokenizer", type("Hub", (), {k: staticmethod(v) for k, v in library.items()}))
        make(dataclasses.replace(corpus, tokenizer="gpt2"), tmp_path / "out", tokens=2000)
    return Corpus(source="shards", files=str(tmp_path / "out"), tokenizer="gpt2", validation_tokens=10)


def test_a_tokenizer_in_the_folder_is_the_one_that_was_written(gpt2_shards: Corpus, tmp_path: Path) -> None:
    """Whether the tokens are read first or a text is written."""
    kept = tmp_path / "out" / "tokenizer.json"
    content = kept.read_bytes()
    assert gpt2_shards.stream(16, seed=0).read(1).shape == (1, 17)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["tokenizer_sha256"]
    for changed in (content[:-100], content.replace(b"unused7", b"unused_"), b""):
        kept.write_bytes(changed)
        for use in (lambda c: c.stream(16, seed=0), lambda c: c.open_tokenizer().decode([0])):
            with pytest.raises(
                FpexpError, match=r"out/tokenizer.json was changed; copy it again, or remove it"
            ) as error:
                use(dataclasses.replace(gpt2_shards))
            assert error.value.exit_code == 1
    kept.unlink()
    assert dataclasses.replace(gpt2_shards).stream(16, seed=0).read(1).shape == (1, 17), "needs no tokenizer"


def test_a_tokenizer_in_the_folder_of_which_no_hash_is_known(gpt2_shards: Corpus, tmp_path: Path) -> None:
    """As in folders of earlier versions."""
    path, kept = tmp_path / "out" / "manifest.json", tmp_path / "out" / "tokenizer.json"
    raw = json.loads(path.read_text())
    del raw["tokenizer_sha256"]
    path.write_text(json.dumps(raw))
    assert dataclasses.replace(gpt2_shards).open_tokenizer().decode([0]) == "!"
    content = kept.read_bytes()
    for write, message in (
        (lambda: kept.write_bytes(content[:-100]), r"out/tokenizer.json is no tokenizer.json \(.*\); copy it again"),
        (lambda: make_tokenizer(kept), r"out/tokenizer.json is not the gpt2 tokenizer; copy it again"),
        (lambda: make_gpt2(kept, 50300), r"out/tokenizer.json is not the gpt2 tokenizer; copy it again"),
    ):
        write()
        with pytest.raises(FpexpError, match=message):
            dataclasses.replace(gpt2_shards).open_tokenizer().decode([0])


def test_nobodys_home_folder() -> None:
    prepared = Corpus(source="shards", files="~nouser/x", tokenizer="bytes")
    for use in (prepared.held_out, dataclasses.replace(prepared, tokenizer="gpt2").open_tokenizer):
        with pytest.raises(UserError, match=r"^task.files=~nouser/x: '~nouser' is nobody's home folder"):
            use()
