"""`fpexp train -m`: jobs that fail alone, what is run again, and components from outside the package (CASES 33)."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import TINY, CommandLine, Recorder, assert_steps_stand_once, finish, start, stop_at, tiny, wait_for

from fpexp.build import settle
from fpexp.claims import claim
from fpexp.errors import Interrupted
from fpexp.run import start_run
from fpexp.run_folder import read_rows

TRAP = '''
"""An LSTM from outside the package, that behaves as it is told to when it trains."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Literal

from fpexp.models import LanguageModel, lstm
from fpexp.ranges import Count, Probability

mended = False


def trap(
    vocabulary_size: int,
    *,
    behaviour: Literal["fine", "good", "fail", "exit", "wait"],
    d_model: Count,
    dropout: Probability = 0.0,
) -> LanguageModel:
    model = lstm(vocabulary_size, d_model=d_model, layers=1, expand=1, dropout=dropout)
    forward, calls = model.forward, 0

    def misbehaving(*inputs):
        nonlocal calls
        calls += 1
        if calls == 3 and not mended:
            if behaviour == "fail":
                raise ValueError("the trap has shut")
            if behaviour == "exit":
                sys.exit(0)
        if calls >= 3 and behaviour == "wait" and Path("may-wait").exists():
            Path("waiting").touch()
            time.sleep(2)  # long enough for a signal to find it waiting, on a loaded machine too
        return forward(*inputs)

    model.forward = misbehaving
    return model
'''

TRAP_YAML = """
# An LSTM from outside
_target_: outside_trap.trap
behaviour: fine
d_model: ???
dropout: 0.0
"""


@pytest.fixture
def outside(cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that choose a model whose file and yaml are not ours."""
    (tmp_path / "outside_trap.py").write_text(TRAP)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "trap.yaml").write_text(TRAP_YAML)
    monkeypatch.syspath_prepend(tmp_path)
    return ["task=a4", "model=trap", f"hydra.searchpath=[file://{tmp_path / 'conf'}]", *TINY]


@pytest.fixture(autouse=True)
def _forget_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "outside_trap", raising=False)


def jobs(folder: Path) -> dict[int, dict[str, Any]]:
    """Return job.json of each job of a sweep."""
    return {int(path.parent.name): json.loads(path.read_text()) for path in folder.glob("*/job.json")}


def sweeps() -> list[Path]:
    return sorted(Path("results/sweeps").iterdir(), key=lambda path: path.stat().st_mtime_ns)


# Components from outside


def test_an_outside_model_by_search_path(cli: CommandLine, outside: list[str]) -> None:
    answer = cli("train", *outside, "model.dropout=0.1")
    assert answer.code == 0, answer.err
    (run,) = cli.runs()
    assert run.config().model.target == "outside_trap.trap"
    assert run.config().choices.model == "trap"
    cli("train", *outside, "model.behavior=fine").refused("'model.behavior'", "did you mean 'model.behaviour'?")
    cli("train", *outside, "model.behaviour=fin").refused("unknown model.behaviour 'fin'", "did you mean 'fine'?")
    cli("train", *outside, "model=trip").refused("trip", "did you mean 'trap'?", "lstm")


def test_an_outside_model_by_target(cli: CommandLine, outside: list[str]) -> None:
    words = ["task=a4", "model=lstm", *TINY, "model._target_=outside_trap.trap", "~model.layers", "~model.expand"]
    answer = cli("train", *words, "model.behaviour=good")
    assert answer.code == 0, answer.err
    assert cli.runs()[0].config().model.settings["behaviour"] == "good"


def test_an_outside_run_is_measured_loaded_and_trained_again(cli: CommandLine, outside: list[str]) -> None:
    assert cli("train", *outside).code == 0
    (run,) = cli.runs()
    assert cli("evaluate", f"run={run.id}", "lengths=[3]").code == 0
    assert cli("train", f"config={run.path / 'config.yaml'}").code == 0
    assert "trap" in cli("runs").out


def test_a_run_of_an_earlier_version_is_not_run_again(cli: CommandLine) -> None:
    """Its config is read as this version reads it: before the gradient was a group, it had none."""
    words = ["train", "-m", "task=a4", "model=lstm", *TINY]
    assert cli(*words).code == 0
    (run,) = cli.runs()
    tree = yaml.safe_load((run.path / "config.yaml").read_text())
    del tree["gradient"], tree["choices"]["gradient"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(tree))
    sittings = json.loads((run.path / "environment.json").read_text())
    sittings["sittings"][0]["fingerprint"] = "as it was then"
    (run.path / "environment.json").write_text(json.dumps(sittings))
    assert f"done before: {run.id}" in cli(*words).out
    assert len(cli.runs()) == 1


# CASES 33


@pytest.mark.parametrize("live", [False, True])
def test_jobs_fail_alone_and_are_run_again(
    cli: CommandLine, outside: list[str], monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    for module in ("commands.multirun.launching", "tracking.jobs"):
        monkeypatch.setattr(f"fpexp.{module}.has_rich_terminal", lambda: live)
    words = ["train", "-m", *outside, "model.behaviour=fine,fail,exit,good"]
    answer = cli(*words)
    assert answer.code == 1
    assert "Traceback" not in answer.out + answer.err
    assert "2 of 4 jobs are done" in answer.out
    (sweep,) = sweeps()
    told = "".join((sweep / str(n) / "log.txt").read_text() for n in range(4)) if live else answer.err
    assert [line[:14] for line in told.splitlines() if "error" in line] == ["fpexp: error: "] * 2
    assert "the trap has shut" in told
    assert live is ("step 6/6" not in answer.out)
    first = jobs(sweep)
    assert {number: job["state"] for number, job in first.items()} == {
        0: "finished", 1: "failed", 2: "failed", 3: "finished"
    }  # fmt: skip
    assert "the trap has shut" in (sweep / "1" / "traceback.txt").read_text()
    assert "SystemExit" in (sweep / "2" / "traceback.txt").read_text()
    assert (sweep / "curves.png").read_bytes().startswith(b"\x89PNG")
    by_behaviour = {run.config().model.settings["behaviour"]: run for run in cli.runs()}
    states = {behaviour: run.status() for behaviour, run in by_behaviour.items()}
    assert {behaviour: status["state"] for behaviour, status in states.items()} == {
        "fine": "finished", "fail": "failed", "exit": "failed", "good": "finished"
    }  # fmt: skip
    assert "ValueError: the trap has shut" in states["fail"]["reason"]
    assert "exit code 0" in states["exit"]["reason"]
    for behaviour in ("fail", "exit"):
        assert (by_behaviour[behaviour].path / "traceback.txt").exists()
        assert not by_behaviour[behaviour].curve.exists()

    import outside_trap

    monkeypatch.setattr(outside_trap, "mended", True)
    before = {run.id for run in cli.runs()}
    answer = cli(*words)
    assert answer.code == 0, answer.err
    assert "4 of 4 jobs are done" in answer.out
    second = jobs(sweeps()[-1])
    assert [second[number]["state"] for number in range(4)] == ["done before", "finished", "finished", "done before"]
    assert [second[number]["run"] for number in (0, 3)] == [first[number]["run"] for number in (0, 3)]
    assert len({run.id for run in cli.runs()} - before) == 2

    answer = cli(*words, "sweep.rerun=true")
    assert answer.code == 0
    assert {job["state"] for job in jobs(sweeps()[-1]).values()} == {"finished"}


def test_fail_fast_stops_at_the_first_failure(cli: CommandLine, outside: list[str]) -> None:
    answer = cli("train", "-m", *outside, "model.behaviour=fine,fail,exit,good", "sweep.fail_fast=true")
    assert answer.code == 1
    assert "1 of 4 jobs are done" in answer.out
    (sweep,) = sweeps()
    assert [job["state"] for job in jobs(sweep).values()].count("failed") == 1
    assert {jobs(sweep)[number]["state"] for number in (2, 3)} == {"not started"}
    assert len(cli.runs()) == 2


def test_a_sweep_without_failure(cli: CommandLine) -> None:
    """The issue's multirun: models and seeds, a table and a picture of all."""
    answer = cli("train", "-m", "task=a4", "model=fp_mamba_k,lstm", "seed=0,1", *TINY)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    assert "4 of 4 jobs are done" in answer.out
    found = [(run.config().choices.model, run.config().seed) for run in cli.runs()]
    assert found == [("fp_mamba_k", 0), ("fp_mamba_k", 1), ("lstm", 0), ("lstm", 1)]
    assert [line.split()[:4] for line in answer.out.splitlines() if " seed " in line] == [
        ["a4", model, "seed", seed] for model in ("fp_mamba_k", "lstm") for seed in "01"
    ]
    (sweep,) = sweeps()
    assert (sweep / "curves.png").exists()
    assert set(Path().iterdir()) == {Path("results")}


def test_curves_that_differ_in_a_setting_are_named_by_it(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        "fpexp.commands.multirun.summary.draw_curves", lambda curves, path: drawn.extend(c.model for c in curves)
    )
    answer = cli("train", "-m", "task=a4", "model=lstm", *TINY, "model.layers=1,2", "model.dropout=0.1,1e-1,0.2")
    assert answer.code == 0, answer.err
    expected = [f"lstm model.layers={layers} model.dropout={dropout}" for layers in (1, 2) for dropout in (0.1, 0.2)]
    assert drawn == expected
    for name in expected:
        assert f"a4 {name} seed 0" in answer.out


def test_an_experiment_sweeps_what_it_names(cli: CommandLine) -> None:
    answer = cli("train", "-m", "experiment=demo_a4", *TINY)
    assert answer.code == 0, answer.err
    assert [run.config().choices.model for run in cli.runs()] == ["fp_mamba_k", "lstm"]
    assert {run.config().choices.experiment for run in cli.runs()} == {"demo_a4"}


@pytest.mark.parametrize("word", ["+training.lr=1e-3", "++model.layers=1", "training.steps=2e0"])
def test_a_word_that_a_single_run_takes_a_sweep_takes_too(cli: CommandLine, word: str) -> None:
    for words in (["train"], ["train", "-m", "seed=1"]):
        answer = cli(*words, "task=a4", "model=lstm", *TINY, word)
        assert answer.code == 0, answer.err


def test_a_job_that_would_not_build_is_refused_before_the_first_starts(cli: CommandLine) -> None:
    words = ["train", "-m", "task=a4", "model=fp_mamba_k", *TINY]
    cli(*words, "model.expand=2,1.0625").refused("Kronecker", "17")
    cli(*words, "evaluation.lengths=[2],[5000]").refused("evaluation.lengths[0]=5000")
    assert not Path("results/runs").exists()


def test_a_sweep_goes_on_with_an_interrupted_run(cli: CommandLine) -> None:
    words = ["task=a4", "model=lstm", *TINY, "results_dir=results"]
    with pytest.raises(Interrupted):
        start_run(tiny(Path("results")), Recorder(at_step=stop_at(3)))
    (run,) = cli.runs()
    answer = cli("train", "-m", *words, "seed=0,1")
    assert answer.code == 0, answer.err
    assert [found.config().seed for found in cli.runs()] == [0, 1]
    assert cli.runs()[0].id == run.id
    assert run.status()["state"] == "finished"
    assert_steps_stand_once(run)


def test_two_sweeps_at_one_moment_share_the_jobs(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins when the first has found that the run is missing, and has not made its folder yet."""
    import fpexp.run

    words = ["train", "-m", "task=a4", "model=lstm", "seed=0,1", *TINY]
    answers = []

    def slow(*arguments: Any) -> Any:
        if not answers:
            answers.append(finish(start(*words, cwd=cli.folder), timeout=200))
        return start_run(*arguments)

    monkeypatch.setattr(fpexp.run, "start_run", slow)
    first, (second,) = cli(*words), answers
    assert first.code == 0, first
    assert "2 of 2 jobs are done" in first.out
    assert [run.config().seed for run in cli.runs()] == [1, 0]
    assert second.code == 1, second
    assert "1 of 2 jobs are done" in second.out
    assert re.search(
        r"running elsewhere .* in the hands of job 0 of \S+/results/sweeps/\S+ \(process \d+ on", second.out
    )


def test_a_job_that_another_sweep_has_finished_in_the_meantime_is_done(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["task=a4", "model=lstm", "seed=0,1", *TINY]
    job = tiny(Path("results"), "seed=0")
    begun = claim("results", settle(job)[0].fingerprint(), "a sweep")

    def finish_first(config: Any, *arguments: Any) -> Any:
        run = start_run(config, *arguments)
        start_run(job, *arguments)
        return run

    monkeypatch.setattr("fpexp.run.start_run", finish_first)
    with begun:
        answer = cli("train", "-m", *words)
    assert answer.code == 0, answer
    assert [job["state"] for _, job in sorted(jobs(sweeps()[-1]).items())] == ["done before", "finished"]
    assert "in the hands of" not in answer.out


# Ctrl-C


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_job_stops_the_sweep(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    monkeypatch.setattr("fpexp.commands.multirun.job.trackers", lambda config: Recorder(at_step=stop_at(2, signum)))
    answer = cli("train", "-m", "task=a4", "model=lstm", "seed=0,1", *TINY)
    assert answer.code == 128 + signum
    assert "0 of 2 jobs are done" in answer.out
    (sweep,) = sweeps()
    assert {number: job["state"] for number, job in jobs(sweep).items()} == {0: "interrupted", 1: "not started"}
    assert [run.status()["state"] for run in cli.runs()] == ["interrupted"]


def test_a_signal_while_the_picture_is_drawn_stops_the_sweep(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of a run is its picture; a signal then must not be forgotten with the run."""
    from fpexp.reporting.figures import draw_curves

    def draw(curves: Any, path: Path) -> None:
        draw_curves(curves, path)
        if path.name == "curve.png":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("fpexp.run.draw_curves", draw)
    answer = cli("train", "-m", "task=a4", "model=lstm", "seed=0,1", *TINY)
    assert answer.code == 130
    assert len(cli.runs()) == 1


def test_ctrl_c_stops_the_sweep_and_the_same_command_goes_on(
    cli: CommandLine, outside: list[str], tmp_path: Path
) -> None:
    words = ["train", "-m", *outside, "model.behaviour=fine,wait,good"]
    Path("may-wait").touch()
    process = start(*words, cwd=tmp_path)
    wait_for(Path("waiting").exists, process)
    process.send_signal(signal.SIGINT)
    answer = finish(process)
    assert answer.code == 130, answer
    assert "Traceback" not in answer.out + answer.err
    assert "1 of 3 jobs are done" in answer.out
    (sweep,) = sweeps()
    assert {number: job["state"] for number, job in jobs(sweep).items()} == {
        0: "finished", 1: "interrupted", 2: "not started"
    }  # fmt: skip
    finished, waiting = cli.runs()
    assert (finished.status()["state"], waiting.status()["state"]) == ("finished", "interrupted")

    Path("may-wait").unlink()
    answer = cli(*words)
    assert answer.code == 0, answer.err
    second = jobs(sweeps()[-1])
    assert [second[number]["state"] for number in range(3)] == ["done before", "finished", "finished"]
    assert [second[number]["run"] for number in (0, 1)] == [finished.id, waiting.id]
    assert [row["step"] for row in read_rows(waiting.metrics) if row["kind"] == "train"] == list(range(1, 7))
    assert len(cli.runs()) == 3


def test_a_run_that_ends_itself_while_it_is_built_is_no_success(
    cli: CommandLine, outside: list[str], tmp_path: Path
) -> None:
    (tmp_path / "outside_exit.py").write_text("import sys\n\ndef leave(vocabulary_size: int):\n    sys.exit(0)\n")
    (tmp_path / "conf" / "model" / "leave.yaml").write_text("_target_: outside_exit.leave\n")
    for words in (["train"], ["train", "-m", "seed=0,1"]):
        try:
            code = cli(*words, *outside, "model=leave", "~model.d_model").code
        except SystemExit as error:
            code = error.code
        assert code not in (0, None)


def test_an_experiment_that_sweeps_gives_way_to_the_command_line(cli: CommandLine) -> None:
    """reference_a4 has three models and three seeds; what is given takes their place, it does not multiply them."""
    answer = cli("train", "-m", "experiment=reference_a4", "model=lstm", "seed=0,1", *TINY)
    assert answer.code == 0
    assert "2 of 2 jobs are done" in answer.out
    assert [run.config().seed for run in cli.runs()] == [0, 1]


def test_a_sweep_leaves_loggers_as_they_were(cli: CommandLine) -> None:
    """Hydra's `disabled` logging would silence every logger of the process, and with it what kernels have to say."""
    logger = logging.getLogger("fpexp.ops.backend")
    assert cli("train", "-m", "task=a4", "model=lstm", *TINY).code == 0
    assert not logger.disabled
    assert logger.isEnabledFor(logging.WARNING)


def test_jobs_with_the_same_numbers_are_run_once(cli: CommandLine) -> None:
    answer = cli("train", "-m", "task=a4", "model=lstm", *TINY, "seed=0,0,1", "threads=1,2")
    assert answer.code == 0, answer.err
    assert "6 jobs, 2 that differ" in answer.out
    assert "2 of 2 jobs are done" in answer.out
    assert len(cli.runs()) == 2


def test_what_cannot_be_measured_is_refused_before_the_first_starts(cli: CommandLine) -> None:
    words = ["train", "-m", "task=a4", "model=fp_mamba_h", *TINY]
    cli(*words, "sweep.evaluate=[{lengths: [5000]}]").refused("sweep.evaluate: lengths=5000")
    cli(*words, "sweep.evaluate=[{against: sequential}]").refused("against=")
    cli(*words, "solver=sequential", "sweep.evaluate=[{max_iterations: [2]}]").refused("solver=picard")
    assert not Path("results/runs").exists()


def test_a_curve_that_cannot_be_read_does_not_end_the_summary(cli: CommandLine) -> None:
    words = ["train", "-m", "task=a4", "model=lstm", *TINY, "seed=0,1"]
    cli(*words)
    (cli.runs()[0].path / "curve.jsonl").write_text('{"length": "4"}\n3\n')
    answer = cli(*words)
    assert answer.code == 0, answer.err
    assert "curve.jsonl has lines that are no rows of a curve" in answer.err
    assert "2 of 2 jobs are done" in answer.out
