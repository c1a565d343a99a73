"""README.md says what is so: its commands are accepted, and its numbers are those of the recorded runs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from fpexp.build import check
from fpexp.cli import COMMANDS, main
from fpexp.config.compose import compose, compose_jobs, expand

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", README, flags=re.M | re.S)
STARTERS = (r"torchrun --nproc-per-node=(\d) -m ", r"sbatch .*scripts/slurm/train.sbatch ", r"scripts/slurm/sweep.sh ")
"""What starts `fpexp` otherwise than by its name; of the first, the number of processes."""
LINES = [
    line
    for block in BLOCKS
    for line in block.splitlines()
    if line.startswith("fpexp ") or any(re.match(starter, line) for starter in STARTERS)
]
HARD = re.findall(
    r"^\| (a5|s5) \| (\w+)(?:, r=(\d+))? \| (\d) \| [^|]* \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|",
    README,
    re.M,
)
ROWS = re.findall(r"^\| (fp_mamba_\w+|lstm) \| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", README, flags=re.M)


@pytest.mark.parametrize("line", LINES)
def test_every_command_is_accepted(line: str) -> None:
    started = re.match(STARTERS[0], line)
    processes = int(started[1]) if started else 1
    line = re.sub(STARTERS[0], "", line)
    line = re.sub(STARTERS[1], "fpexp train ", line)
    line = re.sub(STARTERS[2], "fpexp train -m ", line)
    _, command, *words = shlex.split(line, comments=True)
    assert command in COMMANDS
    if command != "train" or any(word.startswith(("resume=", "hydra.searchpath=")) for word in words):
        return
    configs = compose_jobs(words[1:]) if words[0] == "-m" else [compose(words)]
    for config in configs:
        check(config, processes)


def test_there_are_numbers() -> None:
    assert {(model, seed) for model, seed, *_ in ROWS} == {
        (model, str(seed)) for model in ("fp_mamba_k", "fp_mamba_h", "lstm") for seed in range(3)
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}")
def test_numbers_are_those_recorded(row: tuple[str, ...]) -> None:
    model, seed, *shown = row
    (run,) = (ROOT / "results/reference/runs").glob(f"a4-{model}-seed{seed}-*")
    curve = {r["length"]: r["token_accuracy"] for r in map(json.loads, (run / "curve.jsonl").read_text().splitlines())}
    assert shown == [f"{curve[length]:.3f}" for length in (16, 32, 64)]


def test_the_rows_of_a5_and_s5_are_recorded_runs() -> None:
    """All that are recorded stand in the report."""
    recorded = set()
    for run in (ROOT / "results/reference/runs").glob("[as]5-*"):
        config = yaml.safe_load((run / "config.yaml").read_text())
        curve = {r["length"]: r for r in map(json.loads, (run / "curve.jsonl").read_text().splitlines())}
        rank = config["model"].get("channel_mixer", {}).get("rank", "")
        shown = [f"{curve[length]['token_accuracy']:.3f}" for length in (16, 32, 64)]
        shown.append(f"{curve[64]['sequence_accuracy']:.3f}")
        choices = config["choices"]
        recorded.add((choices["task"], choices["model"], str(rank), str(config["seed"]), *shown))
    assert set(HARD) <= recorded
    assert {row[3] for row in HARD if row[:3] == ("a5", "fp_mamba_h", "2")} == {"0", "1", "2"}


def rows_of(task: str) -> list[list[str]]:
    """The cells of the table whose first column is headed `task`, its header first."""
    (table,) = re.findall(rf"^\| {task} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.M)
    header = next(line for line in README.splitlines() if line.startswith(f"| {task} |"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *table.splitlines())]


@pytest.mark.parametrize(
    ("task", "key", "more"),
    [
        ("copy", "token_accuracy", [(12, "sequence_accuracy"), (12, "generated_sequence_accuracy")]),
        ("modular_arithmetic", "scaled_accuracy", []),
        ("fineweb", "perplexity", []),
    ],
)
def test_the_rows_of_other_tasks_are_recorded_runs(task: str, key: str, more: list[tuple[int, str]]) -> None:
    """All that are recorded stand in the report."""
    header, *rows = rows_of(task)
    lengths = [int(name) for name in header if name.isdigit()]
    recorded = set()
    for run in (ROOT / "results/reference/runs").glob(f"{task}-*"):
        curve = {r["length"]: r for r in map(json.loads, (run / "curve.jsonl").read_text().splitlines())}
        model = yaml.safe_load((run / "config.yaml").read_text())["choices"]["model"]
        wanted = [*((length, key) for length in lengths), *more]
        recorded.add((model, *(f"{curve[length][name]:.3f}" for length, name in wanted)))
    assert {(name, *cells[-len(lengths) - len(more) :]) for name, *cells in rows} <= recorded


def test_the_model_and_the_experiment_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    model, experiment = re.findall(r"^```yaml\n(.*?)^```", README, flags=re.M | re.S)
    (tmp_path / "my_package.py").write_text(code)
    for group, name, config in (("model", "mine", model), ("experiment", "depth", experiment)):
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / f"{name}.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = [line for line in LINES if "hydra.searchpath" in line]
    words = shlex.split(line.replace("/path/to/my/conf", str(tmp_path / "conf")))[1:]
    small = ["training.steps=2", "training.batch_size=4", "evaluation.samples=4", "evaluation.validation_samples=4"]
    assert main([*words, *small]) == 0
    (search,) = [word for word in words if "hydra.searchpath" in word]
    assert len(expand(["experiment=depth", search])) == 4
