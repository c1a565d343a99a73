"""fpexp generate, on recorded runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import CommandLine, Recorder, tiny

import fpexp
from fpexp.run import start_run
from fpexp.run_folder import RunFolder
from fpexp.tasks import WordProblem
from fpexp.tasks.groups import parse_group


@pytest.fixture
def run(cli: CommandLine) -> RunFolder:
    return start_run(tiny(Path("results"), model="lstm"), Recorder())


def test_a_tagging_task_answers_under_each_token(cli: CommandLine, run: RunFolder) -> None:
    answer = cli("generate", f"run={run.id}", "prompt=3 11, 5 0")
    assert answer.code == 0, answer.err
    rows = {line.split()[0]: line.split()[1:] for line in answer.out.splitlines()[:3]}
    assert rows["prompt"] == ["3", "11", "5", "0"]
    assert len(rows["model"]) == 4
    products = parse_group("A4").running_products(torch.tensor([[3, 11, 5, 0]]))[0].tolist()
    assert rows["target"] == [str(product) for product in products]
    right = sum(a == b for a, b in zip(rows["model"], rows["target"], strict=True))
    assert answer.out.splitlines()[3].split() == ["right", str(right), "of", "4"]
    assert "the same after the last" in answer.out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["which run?", "fpexp runs"]),
        (["run=nope"], ["which prompt?"]),
        (["run=nope", "prompt=1"], ["nope"]),
        (["run=nope", "promt=1"], ["did you mean 'prompt'?"]),
        (["run=nope", "prompt=1", "limit=0"], ["limit=0"]),
    ],
)
def test_a_mistake_is_one_line(cli: CommandLine, words: list[str], parts: list[str]) -> None:
    answer = cli("generate", *words)
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1
    assert all(part in answer.err for part in parts)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [("", "empty"), ("12", "0 to 11"), ("-1", "'-1'"), ("one", "'one'"), ("9" * 5000, "0 to 11"), ("²", "'²'")],
)
def test_a_prompt_that_cannot_be_read_is_one_line(cli: CommandLine, run: RunFolder, prompt: str, part: str) -> None:
    answer = cli("generate", f"run={run.id}", f"prompt={prompt}")
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1
    assert part in answer.err
    assert len(answer.err) < 300


def test_a_limit_without_a_meaning_is_refused(cli: CommandLine, run: RunFolder) -> None:
    answer = cli("generate", f"run={run.id}", "prompt=1", "limit=3")
    assert answer.code == 2
    assert "limit=3 has no meaning here" in answer.err


def test_with_bos_its_token_is_read_and_not_scored(cli: CommandLine) -> None:
    run = start_run(tiny(Path("results"), "task.bos=true", model="lstm"), Recorder())
    answer = cli("generate", f"run={run.id}", "prompt=3 4")
    assert answer.out.splitlines()[0].split() == ["prompt", "3", "4"]
    assert answer.out.splitlines()[3].split()[2:] == ["of", "2"]


def test_a_task_that_writes_shows_prompt_and_continuation(
    cli: CommandLine, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task with a stop token: what the model's own greedy continuation is, up to it or the limit."""
    monkeypatch.setattr(WordProblem, "stop_token", 12, raising=False)
    answer = cli("generate", f"run={run.id}", "prompt=3 11", "limit=5")
    model = fpexp.load(run.id)
    tokens = [3, 11]
    for _ in range(5):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer.out.splitlines()[0] == " ".join(map(str, tokens[:2])) + " " + " ".join(map(str, tokens[2:]))


def test_a_copy_stands_above_the_right_one(cli: CommandLine) -> None:
    run = start_run(tiny(Path("results"), task="copy", model="lstm"), Recorder())
    answer = cli("generate", f"run={run.id}", "prompt=$abcde|")
    assert answer.code == 0, answer.err
    rows = dict(line.split(None, 1) for line in answer.out.splitlines())
    assert (rows["prompt"], rows["target"]) == ("$abcde|", "abcde.")
    assert 1 <= len(rows["model"]) <= 6
    right = sum(a == b for a, b in zip(rows["model"], rows["target"], strict=False))
    assert rows["right"] == f"{right} of 6"
    refused = cli("generate", f"run={run.id}", "prompt=$ab1|")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
    assert "has '1'" in refused.err


def test_the_value_of_an_expression_stands_below_the_models(cli: CommandLine) -> None:
    run = start_run(tiny(Path("results"), task="modular_arithmetic", model="lstm"), Recorder())
    answer = cli("generate", f"run={run.id}", "prompt=(1+2)*3=")
    assert answer.code == 0, answer.err
    rows = dict(line.split(None, 1) for line in answer.out.splitlines())
    assert (rows["prompt"], rows["target"]) == ("(1+2)*3=", "4")
    assert rows["right"] == f"{int(rows['model'] == '4')} of 1"
    refused = cli("generate", f"run={run.id}", "prompt=(1+2")
    assert (refused.code, len(refused.err.splitlines())) == (2, 1)
