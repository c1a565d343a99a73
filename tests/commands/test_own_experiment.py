"""An experiment outside the package: the word that trains it makes every other command know it."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import TINY, CommandLine

EXPERIMENT = """# @package _global_
# Two seeds of the LSTM (-m)
defaults:
  - override /task: a4
  - override /model: lstm

hydra:
  sweeper:
    params: {seed: '0,1'}

report: {title: an experiment of one's own, at: [4]}
"""


@pytest.fixture
def word(cli: CommandLine) -> str:
    """Write the experiment `mine` beside the work; return the word that makes it known."""
    folder = Path("conf/experiment")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(EXPERIMENT)
    return "hydra.searchpath=[file://conf]"


def test_one_word_makes_it_known_to_every_command(cli: CommandLine, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "mine             Two seeds of the LSTM (-m)" in cli("list", "experiments", word).out
    assert "Two seeds of the LSTM (-m)" in cli("train", "--help", word).out
    answer = cli("train", "-m", "experiment=mine", word, *TINY)
    assert answer.code == 0, answer.err
    assert "2 jobs: 2 finished" in cli("sweep", "status", "experiment=mine", word, *TINY).out
    monkeypatch.setattr("fpexp.config.catalogue.conf_dir", lambda: Path("conf"))  # of all experiments, but none of ours
    for named in (["experiment=mine"], []):
        answer = cli("report", *named, word, *TINY)
        assert answer.code == 0, answer.err
        (row,) = [line for line in answer.out.splitlines() if line.startswith("mine")]
        assert "2 of 2" in row
        assert "an experiment of one's own" in Path("results/report/report.md").read_text()


def test_what_is_missing_of_it_is_made_by_the_command_that_the_report_names(cli: CommandLine, word: str) -> None:
    assert cli("report", "experiment=mine", word, *TINY).code == 0
    text = Path("results/report/report.md").read_text()
    assert f"fpexp train -m experiment=mine '{word}'" in text


@pytest.mark.parametrize("command", [["sweep", "status"], ["report"], ["train", "-m"], ["train"]])
def test_without_the_word_it_is_refused_and_the_word_named(cli: CommandLine, word: str, command: list[str]) -> None:
    cli(*command, "experiment=mine").refused("unknown experiment 'mine'", word)
    cli(*command, "experiment=mein", word).refused("unknown experiment 'mein'", "did you mean 'mine'?")


def test_of_two_files_with_one_name_ours_is_meant(cli: CommandLine, word: str) -> None:
    Path("conf/experiment/demo_a5.yaml").write_text(EXPERIMENT)
    assert cli("list", "experiments", word).out.count("demo_a5") == 1
    assert "Two seeds" not in next(x for x in cli("list", "experiments", word).out.splitlines() if "demo_a5" in x)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("[file:///nowhere]", ["hydra.searchpath: there is no folder /nowhere"]),
        ("[pkg://nowhere.conf]", ["there is no package nowhere.conf"]),
        ("[s3://bucket]", ["'s3://bucket' is neither file://<folder> nor pkg://<package>"]),
        ("conf", ["must be a list of folders", "hydra.searchpath=[file:///path/to/my/conf]"]),
    ],
)
def test_a_place_that_is_none_is_refused(cli: CommandLine, value: str, parts: list[str]) -> None:
    for command in (["list", "experiments"], ["train", "task=a4", "model=lstm"], ["report"]):
        cli(*command, f"hydra.searchpath={value}").refused(*parts)


def test_a_package_is_a_place_too(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my_experiments" / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder.parents[1] / "__init__.py").touch()
    (folder / "mine.yaml").write_text(EXPERIMENT)
    monkeypatch.syspath_prepend(tmp_path)
    word = "hydra.searchpath=[pkg://my_experiments.conf]"
    assert "Two seeds of the LSTM" in cli("list", "experiments", word).out
    assert "2 jobs: 2 missing" in cli("sweep", "status", "experiment=mine", word, *TINY).out
