"""How long a sweep takes is said from finished runs of its kind alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import SMALL, record, small, write_rows
from runs import CommandLine

from fpexp.build import settle
from fpexp.commands.duration import Paces, say_duration
from fpexp.config.compose import compose
from fpexp.config.run import RunConfig


def fixed_point(*words: str) -> RunConfig:
    return settle(compose(["task=a4", "model=fp_mamba_h", "model.channel_mixer.rank=2", *SMALL, *words]))[0]


def test_a_run_tells_of_its_kind_alone(tmp_path: Path) -> None:
    """The recorded run has taken 90 seconds for six steps."""
    paces = Paces([record(tmp_path, "run", fixed_point())])
    for word in ("seed=3", "training.lr=0.5", "training.steps=7", "evaluation.samples=9", "threads=2"):
        assert paces.seconds(fixed_point(word), 10) == 150.0, word
    others = ["task=a5", "model=fp_mamba_dplr", "model.channel_mixer.rank=1", "model.d_model=32", "solver=picard"]
    for word in (*others, "training.batch_size=8", "gradient=unrolled", "precision=float64", "task.lengths.max=8"):
        assert paces.seconds(fixed_point(word), 10) is None, word


def test_a_solver_means_nothing_to_a_model_without_one(tmp_path: Path) -> None:
    paces = Paces([record(tmp_path, "run", small("task=a4", "model=lstm"))])
    assert paces.seconds(small("task=a4", "model=lstm", "solver=picard"), 1) == 15.0


def test_what_is_not_finished_or_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    config = small("task=a4", "model=lstm")
    failed = record(tmp_path, "failed", config, state="failed")
    assert Paces([failed]).seconds(config, 1) is None
    broken = [record(tmp_path, f"broken{n}", config) for n in range(4)]
    write_rows(broken[0].metrics, [])
    write_rows(broken[1].metrics, [{"kind": "train", "step": 6}])
    broken[2].metrics.write_text("{\n{}\n")
    broken[3].metrics.write_bytes(b"\xff\n")
    for run in broken:
        assert Paces([run]).seconds(config, 1) is None
    (broken[0].path / "config.yaml").write_text("task: 1\n")
    assert Paces([broken[0]]).seconds(config, 1) is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([10.0], "1 job to run: about 10 s of training at the speed of earlier runs, one at a time"),
        ([600.0, 900.0], "2 jobs to run: about 25 min of training at the speed of earlier runs, one at a time"),
        ([3600.0, 5400.0, None], "3 jobs to run: about 2.5 h of training at the speed of earlier runs, one at a time, "
         "and 1 of unknown duration"),
        ([0.0], "1 job to run, only to be measured: nothing to train"),
        ([0.0, None], "2 jobs to run: about 0 s of training at the speed of earlier runs, one at a time, "
         "and 1 of unknown duration"),
        ([None, None], "2 jobs to run; no finished run of their kind tells how long"),
    ],
)  # fmt: skip
def test_what_is_said(seconds: list[float | None], said: str) -> None:
    assert say_duration(seconds) == said


def test_status_and_the_start_of_a_sweep_say_it(cli: CommandLine) -> None:
    words = ["task=a4", "model=lstm,gdn", "seed=0,1", *SMALL]
    lstm = small("task=a4", "model=lstm", "seed=7")
    record(Path("kept"), "kept-run", lstm, place="runs")
    record(Path("results"), "begun", lstm.replace(seed=1), state="interrupted")
    rows = [{"kind": "train", "step": 4, "seconds": 1.0}]
    write_rows(Path("results/runs/begun/metrics.jsonl"), rows)
    answer = cli("sweep", "status", *words, "sweep.recorded=kept")
    assert "4 jobs to run: about 2 min of training" in answer.out  # 90 s, and 30 s of the one that was interrupted
    assert "and 2 of unknown duration" in answer.out
    assert "4 jobs to run; no finished run of their kind tells" in cli("sweep", "status", *words).out
    answer = cli("train", "-m", "task=a4", "model=lstm", *SMALL, "sweep.recorded=kept")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("1 job to run: about 2 min of training")


def test_what_will_be_trained_anew_is_counted_whole(cli: CommandLine) -> None:
    """A curve that is damaged, and measurements of a run that is recorded elsewhere and has no weights."""
    lstm, other = (small("task=a4", "model=lstm", f"seed={seed}") for seed in (0, 1))
    run = record(Path("results"), "damaged", lstm)
    words = ["task=a4", "model=lstm", *SMALL]
    record(Path("kept"), "kept-run", other)
    assert "to run" not in cli("sweep", "status", *words).out
    run.curve.write_text("")
    assert "1 job to run: about 2 min" in cli("sweep", "status", *words, "sweep.recorded=kept").out
    measured = "sweep.evaluate=[{lengths:[2],samples:4}]"
    answer = cli("sweep", "status", *words, "seed=1", "sweep.recorded=kept", measured)
    assert "1 recorded, not measured" in answer.out
    assert "1 job to run: about 2 min" in answer.out


def test_a_run_whose_steps_cannot_be_read_ends_no_sweep(cli: CommandLine) -> None:
    run = record(Path("results"), "begun", small("task=a4", "model=lstm"), state="interrupted")
    words = ["task=a4", "model=lstm", "seed=0,1", *SMALL]
    for broken in (b"{\n{}\n", b"\xff\n", b"3\n"):
        run.metrics.write_bytes(broken)
        answer = cli("sweep", "status", *words)
        assert answer.code == 0, answer.err
        assert "begun: step 0/6" in answer.out
