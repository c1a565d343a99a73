"""`fpexp data prepare`, from its words to the files, with a task of the tests' own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from corpora import documents, local, write_files
from runs import CommandLine

import fpexp.commands.data as command
from fpexp.cli import main
from fpexp.config.compose import compose, parse_overrides
from fpexp.data import prepare
from fpexp.data.shards import Shards
from fpexp.data.stream import TokenStream
from fpexp.data.tokenizer import Tokens

TASK = """\
from typing import Any

class Text:
    def __init__(
        self, *, source: str, files: str | None = None, tokenizer: str = "bytes", column: str = "text",
        context: int = 8, validation_tokens: int = 100, shuffle_buffer: int = 32, lengths: Any = None,
    ) -> None:
        raise AssertionError("a command that prepares data builds no task")
"""

YAML = """\
# @package _global_
defaults:
  - /protocol/word_problem: ${scale}
task:
  _target_: own_text.Text
  source: local
"""


@pytest.fixture
def words(cli: CommandLine, tmp_path: Path) -> list[str]:
    """A task in the folder where the command runs, and the words that name it."""
    (tmp_path / "own_text.py").write_text(TASK)
    (tmp_path / "conf" / "task").mkdir(parents=True)
    (tmp_path / "conf" / "task" / "own.yaml").write_text(YAML)
    (tmp_path / "texts").mkdir()
    write_files(tmp_path / "texts", documents(300), 3)
    sys.modules.pop("own_text", None)
    return ["prepare", f"hydra.searchpath=[file://{tmp_path}/conf]", "task=own", "task.files='texts/*.jsonl'"]


def test_prepare(cli: CommandLine, words: list[str], tmp_path: Path) -> None:
    answer = cli("data", *words, "data.tokens=2e3", "data.shard_tokens=1e3", "data.output=out", "seed=3")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == [
        "2,000 tokens in 2 shards: out",
        "train on them with: fpexp train model=<model> task=own task.source=shards task.files=out task.tokenizer=bytes "
        "task.validation_tokens=100",
    ]
    expected = local(tmp_path / "texts/*.jsonl", validation_tokens=100, shuffle_buffer=32)
    assert Shards(Path("out")).slice(0, 2000).tolist() == expected.token_stream(seed=3).take(2000).tolist()
    again = cli("data", *words, "data.tokens=2e3", "data.shard_tokens=1e3", "data.output=out", "seed=3")
    assert again == answer


@pytest.mark.parametrize(
    "name",
    ["plain", "my,data", "./~x", "a[1]", "a b ", "it's", "$HOME", "${x}", "{a:1}", "é=(1)", '"', "\\", "a\\'", "12"],
)
def test_the_words_to_go_on_with_are_read_back(cli: CommandLine, words: list[str], name: str) -> None:
    """By a shell, by Hydra's grammar, and by the whole configuration."""
    answer = cli("data", *words, "data.tokens=2e3", f"data.output={name}")
    assert answer.code == 0, answer.err
    command_line = answer.out.splitlines()[-1].partition(": ")[2]
    shell = subprocess.run(
        ["sh", "-c", f'fpexp() {{ printf "%s\\n" "$@"; }}; {command_line.replace("<model>", "lstm")}'],
        capture_output=True,
        text=True,
        check=True,
    )
    printed = shell.stdout.splitlines()[1:]
    assert printed == shlex.split(command_line.replace("<model>", "lstm"))[2:]
    if name != "${x}":
        assert {o.key_or_group: o.value() for o in parse_overrides(printed)}["task.files"] == name
    config = compose([words[1], *printed])
    assert config.task.settings["files"] == name
    assert (f" task.files={name} " in command_line) == (name == "plain")


def test_prepare_where_nothing_else_is_said(cli: CommandLine, words: list[str]) -> None:
    answer = cli("data", *words, "data.tokens=1e9", "results_dir=elsewhere", "model=mamba")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("the documents end after ")
    manifest = json.loads(Path("elsewhere/data/own-bytes/manifest.json").read_text())
    assert len(manifest["shards"]) == 1
    assert manifest["order"]["shard_tokens"] == 100_000_000


def test_mistakes_are_one_line(cli: CommandLine, words: list[str]) -> None:
    prepared = [*words, "data.tokens=10"]
    for arguments, message in (
        ([], "which action? write fpexp data prepare"),
        (["prepar"], "did you mean 'prepare'?"),
        (words, "how many tokens? write data.tokens=<number>"),
        ([*words, "data.tokens=many"], "data.tokens='many' must be an integer"),
        ([*words, "data.tokens=0"], "data.tokens=0 is out of range"),
        ([*words, "data.token=5"], "unknown key 'data.token'; did you mean 'data.tokens'?"),
        ([*prepared, "task.sourse=hub"], "unknown key 'task.sourse'; did you mean 'task.source'?"),
        ([*prepared, "task.source=disk"], "unknown task.source 'disk' (hub, local, shards)"),
        ([*prepared, "task.source=shards"], "task.source=shards is prepared already"),
        ([*prepared, "data.output=~nouser/x"], "data.output=~nouser/x: '~nouser' is nobody's home folder"),
        ([*prepared, "data.output=own_text.py"], "cannot write to 'own_text.py' (File exists); name a folder by data."),
        ([*prepared, "task.files='~nouser/x'"], "task.files=~nouser/x: '~nouser' is nobody's home folder"),
        ([*prepared, "task.files='*.jsonl'"], "no file matches '*.jsonl'"),
        ([*prepared, "task.validation_tokens=1000000"], "lower task.validation_tokens"),
        (["prepare", "task=a4", "data.tokens=10"], "task=a4 has no documents to prepare; use task=fineweb"),
        (["prepare", "data.tokens=10"], "which task? write task=<name>"),
    ):
        answer = cli("data", *arguments)
        assert answer.code == 2, (arguments, answer)
        assert message in answer.err
        assert len(answer.err.splitlines()) == 1


def test_help(cli: CommandLine) -> None:
    assert "data.tokens=<number>" in cli("data", "--help").out
    assert "prepare a text corpus" in cli("--help").out


@pytest.mark.parametrize(("signum", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_whole_shards(
    words: list[str], signum: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of its own, stopped while it writes its third shard."""
    take, here = TokenStream.take, os.pipe()
    calls = 0

    def slow(stream: TokenStream, count: int) -> Tokens:
        nonlocal calls
        calls += 1
        if calls == 25:
            os.write(here[1], b"x")
            time.sleep(60)
        return take(stream, count)

    monkeypatch.setattr(prepare, "PIECE", 100)
    monkeypatch.setattr(TokenStream, "take", slow)
    child = os.fork()
    if child == 0:
        with open("errors", "w") as sys.stderr:
            code = main(["data", *words, "data.tokens=4000", "data.shard_tokens=1000", "data.output=out"])
        os._exit(code)
    os.read(here[0], 1)
    os.kill(child, signum)
    _, status = os.waitpid(child, 0)
    errors = Path("errors").read_text()
    assert os.waitstatus_to_exitcode(status) == expected
    assert "2 whole shards (2,000 tokens) are kept, go on with the same command" in errors
    assert len(errors.splitlines()) == 1
    assert len(Shards(Path("out"))) == 2000
    assert not list(Path("out").glob("*.partial"))


def test_progress_without_a_terminal(cli: CommandLine, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "REPORT_EVERY", 0.0)
    answer = cli("data", *words, "data.tokens=2000", "data.shard_tokens=1000")
    assert answer.out.splitlines()[:2] == ["1,000 of 2,000 tokens", "2,000 of 2,000 tokens"]


def test_progress_on_a_terminal(cli: CommandLine, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fpexp.tracking.console.has_rich_terminal", lambda: True)
    answer = cli("data", *words, "data.tokens=2000")
    assert answer.code == 0
    assert "2000/2000" in answer.out
