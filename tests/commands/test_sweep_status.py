"""`fpexp sweep status`, what counts as done, and what an experiment has measured after training."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from runs import TINY, CommandLine, Recorder, stop_at, tiny
from test_sweep import jobs, sweeps

from fpexp.config.schema import Component
from fpexp.errors import Interrupted, UserError
from fpexp.measurement import Measurement
from fpexp.run import start_run
from fpexp.run_folder import RunFolder, read_rows

HEAD = "# @package _global_\ndefaults:\n  - override /task: a4\n  - override /model: lstm\n"


def experiment(text: str) -> list[str]:
    """Write an experiment outside the package and return the words that choose it, tiny."""
    folder = Path("conf/experiment")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.yaml").write_text(HEAD + text)
    return [f"hydra.searchpath=[file://{Path('conf').absolute()}]", "experiment=mine", *TINY]


def test_every_state_is_told_and_the_commands_make_what_is_not_done(cli: CommandLine) -> None:
    words = ["task=a4", "model=lstm", "seed=0,1,2,3", *TINY]
    assert cli("train", "-m", *words[:2], "seed=0", *TINY).code == 0
    finished = cli.runs()[-1]
    with pytest.raises(Interrupted):
        start_run(tiny(Path("results"), "seed=1"), Recorder(at_step=stop_at(3)))
    interrupted = cli.runs()[-1]
    shutil.copytree(finished.path, Path("results/runs/failed"))
    failed = RunFolder(Path("results/runs/failed"))
    config = (failed.path / "config.yaml").read_text()
    (failed.path / "config.yaml").write_text(config.replace("\nseed: 0\n", "\nseed: 2\n"))
    failed.write_status("failed", reason="the reason")

    answer = cli("sweep", "status", *words)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert any("seed=0" in line and "finished" in line and finished.id in line for line in lines)
    assert any("seed=1" in line and "interrupted" in line and f"{interrupted.id}: step 3/6" in line for line in lines)
    assert any("seed=2" in line and "failed" in line and "the reason" in line for line in lines)
    assert any(line.split()[:2] == ["3", "seed=3"] and "missing" in line for line in lines)
    assert "4 jobs: 1 finished, 1 interrupted, 1 failed, 1 missing" in answer.out
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("  fpexp train ")]
    assert [words for words in commands if "-m" not in words and "seed=3" in words]

    one = next(words for words in commands if "-m" not in words and "seed=3" in words)
    assert cli(*one).code == 0
    assert len(cli.runs()) == 4
    (begun,) = [words for words in commands if "-m" in words and "seed=1" in words]
    assert cli(*begun).code == 0
    assert interrupted.status()["state"] == "finished"  # gone on with, and not begun anew
    every = next(words for words in commands if "-m" in words and "seed=0,1,2,3" in words)
    assert cli(*every).code == 0
    answer = cli("sweep", "status", *words)
    assert "4 jobs: 4 finished" in answer.out
    assert "fpexp train" not in answer.out


def test_a_run_of_another_process_is_running(cli: CommandLine) -> None:
    run = cli.train()
    run.write_status("running")
    words = ["task=a4", "model=lstm", *TINY]
    assert "1 job: 1 lost" in cli("sweep", "status", *words).out
    with run.lock():
        assert "1 job: 1 running" in cli("sweep", "status", *words).out
        answer = cli("train", "-m", *words)
        assert answer.code == 1
        assert jobs(sweeps()[-1])[0]["state"] == "running elsewhere"
        assert len(cli.runs()) == 1
    assert cli("train", "-m", *words).code == 0
    assert [found.id for found in cli.runs()] == [run.id]


def test_what_is_recorded_counts_as_done_if_it_is_the_same(cli: CommandLine) -> None:
    run = cli.train()
    Path("kept/runs").mkdir(parents=True)
    shutil.move(run.path, Path("kept/runs") / run.id)
    words = ["task=a4", "model=lstm", *TINY, "sweep.recorded=kept"]
    assert "1 recorded" in cli("sweep", "status", *words).out
    answer = cli("train", "-m", *words)
    assert answer.code == 0
    assert f"recorded: {run.id}" in answer.out
    assert "1 of 1 jobs are done" in answer.out
    assert (sweeps()[-1] / "curves.png").exists()
    assert cli.runs() == []
    assert "1 missing" in cli("sweep", "status", *words, "sweep.recorded=null").out
    assert "1 missing" in cli("sweep", "status", *words, "training.lr=0.5").out
    assert cli("train", "-m", *words, "sweep.rerun=true").code == 0
    assert len(cli.runs()) == 1


def test_status_is_asked_for_by_name(cli: CommandLine) -> None:
    cli("sweep").refused("fpexp sweep status experiment=<name>")
    cli("sweep", "status").refused("experiment=<name>, or task=<name> model=<name>", "fig4_state_tracking, ")
    cli("sweep", "status", "seed=0,1").refused("sweep status of what?")
    cli("sweep", "status", "task=a4").refused("which model? write model=<name>")
    cli("sweep", "statsu").refused("unknown 'statsu'", "did you mean 'status'?")
    cli("sweep", "status", "experiment=fig4_state_trackin").refused("did you mean 'fig4_state_tracking'?")
    cli("sweep", "status", "task=a4", "model=lstm", "training.lrr=1").refused("did you mean 'training.lr'?")


MEASURED = """
sweep:
  grid:
    - model: lstm,fp_mamba_h
  evaluate:
    - {solver: picard, max_iterations: [1, 4]}
    - {solver: picard, against: sequential, samples: 4}
"""


def test_an_experiment_measures_after_training_what_is_not_yet_measured(cli: CommandLine) -> None:
    words = experiment(MEASURED)
    assert cli("train", *words, "model=fp_mamba_h").code == 0
    assert "1 missing" in (out := cli("sweep", "status", *words).out)
    assert "1 finished, not measured" in out
    answer = cli("train", "-m", *words)
    assert answer.code == 0, answer.err
    assert [run.config().choices.model for run in cli.runs()] == ["fp_mamba_h", "lstm"]
    (run, lstm) = cli.runs()
    assert not (lstm.path / "evaluations").exists()
    found = {path.name: read_rows(path) for path in (run.path / "evaluations").glob("*/*.jsonl")}
    assert [(row["max_iterations"], row["length"]) for row in found["iterations.jsonl"]] == [
        (1, 2), (1, 4), (4, 2), (4, 4)
    ]  # fmt: skip
    assert {row["iterations_max"] for row in found["iterations.jsonl"]} == {1, 4}
    assert [(row["length"], row["n"]) for row in found["agreement.jsonl"]] == [(2, 4), (4, 4)]
    assert "2 jobs: 2 finished" in cli("sweep", "status", *words).out
    assert cli("train", "-m", *words).code == 0
    assert {job["state"] for job in jobs(sweeps()[-1]).values()} == {"done before"}
    assert len(list((run.path / "evaluations").iterdir())) == 2


def test_a_typo_in_what_is_measured_names_the_key(cli: CommandLine) -> None:
    words = experiment("sweep:\n  evaluate:\n    - {solver: picard, max_iteration: [1]}\n")
    cli("train", "-m", *words).refused("'sweep.evaluate[0].max_iteration'", "max_iterations'?")
    words = experiment("sweep:\n  evaluate:\n    - {solver: pickard}\n")
    cli("train", "-m", *words).refused("unknown sweep.evaluate[0].solver 'pickard'", "'picard'?")


def test_evaluate_by_another_solver_under_a_cap_and_against_another(cli: CommandLine) -> None:
    run = cli.train(model="fp_mamba_h")
    words = ["evaluate", f"run={run.id}"]
    cli(*words, "max_iterations=[4]").refused("max_iterations= caps whole-sequence", "solver=picard")
    cli(*words, "against=picard").refused("against= compares two solvers", "solver=picard")
    cli(*words, "solver=picard", "against=sequential", "max_iterations=[1]").refused("ask for one")
    cli(*words, "solver=pickard").refused("unknown solver 'pickard'", "did you mean 'picard'?")
    cli(*words, "max_iterations=[]").refused("max_iterations=[] is empty")
    lstm = cli.train(model="lstm")
    cli("evaluate", f"run={lstm.id}", "solver=picard").refused("model=lstm, which solves no fixed point")
    assert not (run.path / "evaluations").exists()
    assert cli(*words, "solver=sequential", "against=sequential").code == 0
    (folder,) = (run.path / "evaluations").iterdir()
    assert json.loads((folder / "settings.json").read_text()) == {"solver": "sequential", "against": "sequential"}
    for row in read_rows(folder / "agreement.jsonl"):
        assert row["distance_max"] == 0.0
        assert row["answers_alike"] == 1.0
        assert row["token_accuracy"] == row["token_accuracy_against"]


def test_solvers_agree_as_far_as_the_tolerance_that_is_asked_for(cli: CommandLine) -> None:
    run = cli.train("model.channel_mixer.a_max=0.5", model="fp_mamba_h")  # a map that contracts
    words = ["evaluate", f"run={run.id}"]
    for tolerance in ("tolerance=0.1", "tolerance=1e-5"):
        assert cli(*words, "solver=picard", "against=sequential", tolerance).code == 0
    assert cli(*words, "tolerance=1e-5").code == 0
    folders = sorted((run.path / "evaluations").iterdir())
    loose, tight = ({row["length"]: row for row in read_rows(folder / "agreement.jsonl")} for folder in folders[:2])
    assert json.loads((folders[1] / "settings.json").read_text())["tolerance"] == 1e-5
    for length, row in tight.items():
        assert row["distance_max"] < 1e-3 < loose[length]["distance_max"]
        assert row["iterations_mean"] > loose[length]["iterations_mean"]
        assert row["iterations_mean_against"] > loose[length]["iterations_mean_against"]
    own = {row["length"]: row for row in read_rows(run.curve)}
    for row in read_rows(folders[2] / "curve.jsonl"):  # its own solver, only more exact
        assert row["iterations_mean"] > own[row["length"]]["iterations_mean"]
    cli(*words, "tolerance=0").refused("tolerance=0 is out of range")
    lstm = cli.train(model="lstm")
    cli("evaluate", f"run={lstm.id}", "tolerance=0.01").refused("tolerance= has no meaning for model=lstm")


def test_the_run_s_own_solver_is_the_one_that_another_is_held_against(cli: CommandLine) -> None:
    run = cli.train("solver=sequential", "solver.inner_max_iterations=2", model="fp_mamba_h")
    assert cli("evaluate", f"run={run.id}", "solver=picard", "against=sequential", "tolerance=1e-6").code == 0
    (file,) = (run.path / "evaluations").glob("*/agreement.jsonl")
    assert {row["iterations_mean_against"] for row in read_rows(file)} == {2.0}


def test_a_tolerance_is_refused_of_a_solver_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_solver.py").write_text("def exact() -> None: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = tiny(tmp_path, model="fp_mamba_h").replace(solver=Component("own_solver.exact", {}))
    with pytest.raises(UserError, match=r"tolerance= has no meaning for own_solver\.exact"):
        Measurement(tolerance=0.1).check(config)
    Measurement(tolerance=0.1, solver="picard").check(config)


def test_what_is_measured_and_not_trained_is_refused(cli: CommandLine) -> None:
    for command in (["train", "-m"], ["sweep", "status"]):
        answer = cli(*command, "experiment=table2_complexity")
        assert answer.code == 2
        assert "experiment=table2_complexity is not trained but measured: fpexp bench complexity" in answer.err


def test_a_job_that_is_measured_afterwards_is_made_by_a_sweep_of_one(cli: CommandLine) -> None:
    answer = cli("sweep", "status", "experiment=fig12_sequential_parallel", "sweep.recorded=null")
    assert "fpexp train -m experiment=fig12_sequential_parallel sweep.recorded=null solver=auto" in answer.out
