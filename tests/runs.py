"""Tiny runs, sittings of a run and command lines, for the system tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fpexp.build import Experiment, build
from fpexp.cli import main
from fpexp.config.compose import compose
from fpexp.config.run import RunConfig
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tracking.jsonl import JsonlTracker
from fpexp.tracking.tracker import RunStart
from fpexp.training import checkpoint
from fpexp.training.interruption import Interruption
from fpexp.training.loop import Trainer

TINY = [
    "training.steps=6",
    "training.batch_size=4",
    "training.log_every=1",
    "model.d_model=16",
    "task.lengths.max=4",
    "evaluation.lengths=[2,4]",
    "evaluation.samples=8",
    "evaluation.validation_samples=8",
    "evaluation.batch_size=8",
]
"""Overrides that make any run take a fraction of a second."""


def tiny(results_dir: Path, *words: str, task: str = "a4", model: str = "lstm") -> RunConfig:
    """Compose a tiny run; `words` come last, so that they win."""
    heads = ["model.head_size=16"] if model.startswith("fp_mamba2") else []
    return compose([f"task={task}", f"model={model}", *TINY, *heads, f"results_dir={results_dir}", *words])


class Recorder(JsonlTracker):
    """The run's own JSONL files, the rows in memory too, and something to do when a step is done or a row comes."""

    def __init__(
        self, at_step: Callable[[int], None] | None = None, at_row: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        super().__init__()
        self.rows: list[dict[str, Any]] = []
        self.at_step, self.at_row = at_step, at_row

    def log(self, row: Any) -> None:
        super().log(row)
        self.rows.append(dict(row))
        if self.at_row:
            self.at_row(dict(row))

    def progress(self, step: int) -> None:
        if self.at_step:
            self.at_step(step)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


class Killed(BaseException):
    """Stands for SIGKILL inside a process: nothing of ours may catch it and tidy up."""


def kill_at(step: int) -> Callable[[int], None]:
    """Return an `at_step` that ends the sitting without any of its endings."""

    def at_step(done: int) -> None:
        if done == step:
            raise Killed

    return at_step


def stop_at(step: int, signum: signal.Signals = signal.SIGTERM) -> Callable[[int], None]:
    """Return an `at_step` that sends this process a signal."""

    def at_step(done: int) -> None:
        if done == step:
            signal.raise_signal(signum)

    return at_step


def sit(run: RunFolder, experiment: Experiment, tracker: Recorder, *, resume: bool = False) -> Trainer:
    """Train in `run`'s folder without measuring the curve; an exception of `tracker` goes through."""
    with Interruption() as interruption:
        trainer = Trainer(experiment, run, tracker, interruption)
        if resume:
            trainer.restore(checkpoint.load_newest(run.checkpoints, []))
        tracker.start(
            RunStart(run, experiment.config, 0, resumed_from=trainer.progress.step if resume else None, notes=())
        )
        trainer.fit()
    return trainer


def train_tiny(results_dir: Path, *words: str, **choices: str) -> tuple[Trainer, Recorder]:
    """Train a fresh tiny run to its end, without a curve."""
    config = tiny(results_dir, *words, **choices)
    tracker = Recorder()
    return sit(RunFolder.create(config), build(config), tracker), tracker


def without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows without what differs from sitting to sitting."""
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """To the bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def assert_steps_stand_once(run: RunFolder) -> None:
    """Every row of metrics.jsonl has its own (kind, step), in order."""
    for kind in ("train", "validation"):
        steps = [row["step"] for row in read_rows(run.metrics) if row["kind"] == kind]
        assert steps == sorted(set(steps)), f"{kind}: {steps}"


@dataclass(frozen=True)
class Answer:
    """What a command line gave back."""

    code: int
    out: str
    err: str

    def refused(self, *words: str, code: int = 2) -> None:
        """Check that it ended with `code` and one line on stderr that has all of `words`."""
        assert self.code == code, self
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("fpexp: error: "), self.err
        assert "Traceback" not in self.out + self.err
        missing = [word for word in words if word not in lines[0]]
        assert not missing, lines[0]


class CommandLine:
    """`fpexp` in this process, in a folder of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def __call__(self, *words: str) -> Answer:
        self.capsys.readouterr()
        code = main(list(words))
        out, err = self.capsys.readouterr()
        return Answer(code, out, err)

    def runs(self) -> list[RunFolder]:
        """Return the runs under results/, oldest first."""
        from fpexp.run_folder import all_runs

        return all_runs(self.folder / "results")

    def train(self, *words: str, task: str = "a4", model: str = "lstm") -> RunFolder:
        """Train a tiny run that must succeed and return its folder."""
        answer = self("train", f"task={task}", f"model={model}", *TINY, *words)
        assert answer.code == 0, answer.err
        return self.runs()[-1]


def start(*words: str, cwd: Path, python: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    """Start `fpexp` as a process of its own; `cwd` is importable there, beside what is so here."""
    importable = [str(cwd), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, *python, "-m", "fpexp", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(importable), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> Answer:
    """Wait for the end of a process."""
    out, err = process.communicate(timeout=timeout)
    return Answer(process.returncode, out, err)


def run_python(code: str, cwd: Path, *flags: str, **environment: str) -> Answer:
    """Run Python code in a fresh interpreter."""
    process = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Answer(process.returncode, process.stdout, process.stderr)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], timeout: float = 60) -> None:
    """Wait until `condition` holds; fail when the process ends or the time is up."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise AssertionError(f"it did not come to it: {finish(process)}")
        time.sleep(0.02)
