"""`fpexp` as it is typed: what works, what is refused and how, exit codes."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import TINY, CommandLine, Recorder, run_python, stop_at, tiny
from safetensors.torch import save_file

import fpexp
from fpexp.build import build
from fpexp.cli import COMMANDS
from fpexp.config.catalogue import choices
from fpexp.config.compose import compose
from fpexp.errors import Interrupted
from fpexp.models import LanguageModel
from fpexp.run import start_run
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import WordProblem
from fpexp.training import checkpoint


@pytest.fixture
def stopped(cli: CommandLine) -> RunFolder:
    """A run that was stopped at its third step."""
    with pytest.raises(Interrupted):
        start_run(tiny(Path("results")), Recorder(at_step=stop_at(3)))
    return cli.runs()[-1]


def digest(folder: Path) -> dict[str, str]:
    """What every file of a folder holds, but for the lock."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


# What works


@pytest.mark.parametrize(
    "words",
    [
        ["task=a5", "model=fp_mamba_k"],
        ["task=a4", "model=lstm", "seed=1", "training.steps=3"],
        [
            "task=s5",
            "model=fp_mamba_h",
            "model.channel_mixer.rank=4",
            "solver=picard",
            "schedule=fixed",
            "schedule.max_iterations=16",
        ],
        ["task=a5", "model=fp_mamba_dplr", "model.channel_mixer.rank=2", "solver=picard", "schedule=gamma"],
        ["task=a4", "model=fp_mamba_k", "gradient=unrolled", "gradient.steps=3"],
        ["task=a4", "model=fp_mamba_k", "gradient=implicit", "gradient.tolerance=1e-2"],
        ["task=a4", "model=lstm", "gradient=implicit"],
        ["task=group", "task.group='A4 x Z5'", "model=fp_mamba_k"],
        ["task=group", "task.group=A4 x Z5", "model=fp_mamba_k", "task.bos=true", "precision=bfloat16"],
    ],
    ids=" ".join,
)
def test_a_first_day(cli: CommandLine, words: list[str]) -> None:
    steps = [word for word in words if word.startswith("training.steps")] or ["training.steps=2"]
    answer = cli("train", *TINY, *words, *steps)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    (run,) = cli.runs()
    assert run.status()["state"] == "finished"
    assert [row["length"] for row in read_rows(run.curve)] == [2, 4]
    assert f"run {run.id}" in answer.out
    assert "parameters" in answer.out
    assert str(Path("curve.png")) in answer.out


def test_a_run_leaves_its_folder(cli: CommandLine) -> None:
    run = cli.train("seed=5")
    assert re.fullmatch(r"a4-lstm-seed5-\d{8}-\d{6}(-\d+)?", run.id)
    names = {path.name for path in run.path.iterdir()} - {".lock"}
    assert names == {
        "config.yaml", "environment.json", "metrics.jsonl", "curve.jsonl", "curve.png", "status.json", "checkpoints"
    }  # fmt: skip
    (environment,) = json.loads((run.path / "environment.json").read_text())["sittings"]
    assert environment["seed"] == 5
    assert environment["parameters"] == build(run.config()).model.parameter_count()
    assert environment["fingerprint"] == run.config().fingerprint()
    assert environment["packages"]["torch"]
    assert environment["command"].startswith("fpexp train task=a4 model=lstm ")
    assert {"commit", "device", "python", "fpexp", "backends", "threads"} <= environment.keys()
    for row in read_rows(run.curve):
        assert {"length", "token_accuracy", "last_token_accuracy", "sequence_accuracy", "n"} <= row.keys()
        assert row["n"] == 8
    for row in read_rows(run.metrics):
        assert {"kind", "step", "loss", "token_accuracy", "last_token_accuracy", "sequence_accuracy"} <= row.keys()
    assert all("lr" in row and "grad_norm" in row for row in read_rows(run.metrics) if row["kind"] == "train")
    saved = run.config()
    assert (saved.device, saved.precision) == ("cpu", "float32")
    assert not list(run.path.rglob("*.partial"))


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_without_network_key_or_wandb_a_run_finishes(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """CASES.md 37: nothing is asked, one line says so, and the rows are where they always are."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    answer = cli("train", "task=a4", "model=lstm", *TINY, "tracking=wandb", f"tracking.mode={mode}")
    assert answer.code == 0, answer.err
    (line,) = answer.err.splitlines()
    assert line.startswith("warning: ")
    assert "wandb" in line
    assert "not installed" in line
    (run,) = cli.runs()
    assert run.status()["state"] == "finished"
    assert [row["step"] for row in read_rows(run.metrics) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["length"] for row in read_rows(run.curve)] == [2, 4]


def test_ids_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    ids = [RunFolder.create(tiny(tmp_path)).id for _ in range(3)]
    stem = "a4-lstm-seed0-20260101-000000"
    assert ids == [stem, f"{stem}-2", f"{stem}-3"]


def test_resume_goes_on_and_ends_finished(cli: CommandLine, stopped: RunFolder) -> None:
    status = stopped.status()
    assert (status["state"], status["resume"]) == ("interrupted", f"fpexp train resume={stopped.id}")
    answer = cli("train", f"resume={stopped.id}", "threads=1")
    assert answer.code == 0, answer.err
    assert "resumed from step 3" in answer.out
    assert stopped.status()["state"] == "finished"
    assert [row["step"] for row in read_rows(stopped.metrics) if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert len(cli.runs()) == 1
    sittings = json.loads((stopped.path / "environment.json").read_text())["sittings"]
    assert sittings[-1]["command"] == f"fpexp train resume={stopped.id} threads=1"
    assert len(sittings) == 2


def test_resume_in_another_results_dir_says_so(cli: CommandLine) -> None:
    tracker = Recorder(at_step=stop_at(2))
    with pytest.raises(Interrupted, match=r"go on with: fpexp train resume=\S+ results_dir=elsewhere$") as caught:
        start_run(tiny(Path("elsewhere")), tracker)
    words = str(caught.value).rpartition("fpexp ")[2].split()
    assert cli(*words).code == 0
    assert tracker.run.status()["state"] == "finished"


def test_evaluate_has_its_own_folder_and_overwrites_nothing(cli: CommandLine) -> None:
    run = cli.train(model="fp_mamba_h")
    before = digest(run.path)
    answer = cli("evaluate", f"run={run.id}", "lengths=[2,16,7]", "samples=12", "batch_size=5")
    assert answer.code == 0, answer.err
    (first,) = (run.path / "evaluations").iterdir()
    rows = read_rows(first / "curve.jsonl")
    assert [(row["length"], row["n"], row["step"]) for row in rows] == [(2, 12, 6), (7, 12, 6), (16, 12, 6)]
    assert [row["seen_in_training"] for row in rows] == [True, False, False]
    assert (first / "curve.png").read_bytes().startswith(b"\x89PNG")
    for word in ("length", "2", "7", "16", str(first.name)):
        assert word in answer.out

    answer = cli("evaluate", f"run={run.path}")
    assert answer.code == 0, answer.err
    (second,) = set((run.path / "evaluations").iterdir()) - {first}
    own = [dict(row) for row in read_rows(run.curve)]
    assert read_rows(second / "curve.jsonl") == own
    after = digest(run.path)
    assert {name: after[name] for name in before} == before


def test_evaluating_twice_in_one_second(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cli.train()
    monkeypatch.setattr("time.strftime", lambda *_: "20260101-000000")
    codes = [cli("evaluate", f"run={run.id}", f"lengths=[{length}]").code for length in (2, 3)]
    assert codes == [0, 0]
    folders = sorted((run.path / "evaluations").iterdir())
    assert [[row["length"] for row in read_rows(folder / "curve.jsonl")] for folder in folders] == [[2], [3]]


def test_runs_lists_what_is_recorded(cli: CommandLine, stopped: RunFolder) -> None:
    finished = cli.train("evaluation.lengths=[4,16]", model="fp_mamba_k")
    (finished.path.parent / "broken").mkdir()
    (finished.path.parent / "broken" / "config.yaml").write_text("nothing")
    answer = cli("runs")
    assert answer.code == 0
    lines = answer.out.splitlines()
    near, far = (row["token_accuracy"] for row in read_rows(finished.curve))
    (line,) = (line for line in lines if finished.id in line)
    for word in ("a4", "fp_mamba_k", "finished", f"{near:.3f} @4", f"{far:.3f} @16"):
        assert word in line
    assert any(stopped.id in line and "interrupted" in line for line in lines)
    assert any("broken" in line and "unreadable config" in line for line in lines)
    assert cli("runs", f"results_dir={finished.path.parent.parent}").out == answer.out


def test_runs_of_nothing(cli: CommandLine) -> None:
    answer = cli("runs", "results_dir=elsewhere")
    assert answer.code == 0
    assert "no runs under elsewhere/runs yet" in answer.out
    assert not Path("elsewhere").exists()


def test_list_models_counts_their_parameters(cli: CommandLine) -> None:
    """One line a model, its count at each scale that of the model which `train` builds."""
    answer = cli("list", "models", "task=a4", "model.d_model=32")
    assert answer.code == 0
    header, *lines = answer.out.splitlines()
    assert header.split() == ["parameters", "scale=cpu", "scale=gpu", "scale=paper", "task=a4", "model.d_model=32"]
    assert [line.split()[0] for line in lines] == list(choices("model"))
    for line in lines:
        name, *counts = line.split()[:4]
        built = build(compose(["task=a4", "model.d_model=32", f"model={name}"])).model
        assert counts[0] == f"{sum(parameter.numel() for parameter in built.parameters()):,}"
    assert "task=a5" in cli("list", "models").out.splitlines()[0]


@pytest.mark.parametrize("kind", ["task", "solver", "schedule", "gradient", "scale", "experiment"])
def test_list_has_a_line_for_each_choice(cli: CommandLine, kind: str) -> None:
    answer = cli("list", f"{kind}s")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert [line.split()[0] for line in lines] == list(choices(kind))
    assert all(len(line.split()) > 1 for line in lines)
    assert all(f"  {line}" in cli("list").out for line in lines)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_the_commands_and_exit_codes(cli: CommandLine, words: list[str]) -> None:
    answer = cli(*words)
    assert answer.code == 0
    for word in (*COMMANDS, "--version", "exit codes", "130", "143"):
        assert word in answer.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(cli: CommandLine, command: str) -> None:
    answer = cli(command, "--help")
    assert answer.code == 0
    assert answer.out.startswith(f"usage: fpexp {command}")
    assert cli(command, "-h").out == answer.out


def test_help_of_train_has_groups_values_and_keys(cli: CommandLine) -> None:
    out = cli("train", "--help").out
    for group in ("task", "model", "solver", "schedule", "gradient", "scale", "tracking", "experiment"):
        for name in (group, *choices(group)):
            assert re.search(rf"^\s+{name}\b", out, re.MULTILINE), name
    for key in ("device", "precision", "threads", "seed", "results_dir", "steps", "lr", "samples", "fail_fast"):
        assert re.search(rf"^\s+{key}:", out, re.MULTILINE), key


def test_version(cli: CommandLine) -> None:
    assert cli("--version").out == f"fpexp {fpexp.__version__}\n"


def test_help_of_a_run_has_every_key_as_a_word_that_sets_it(cli: CommandLine) -> None:
    words = ["task=copy", "model=fp_mamba_h", "training.lr=1e-5"]
    keys = cli("train", *words, "--help").out.splitlines()
    assert {"training.lr=1e-05", "task.alphabet=26", "model.channel_mixer.rank=2", "model.dt_rank=null"} <= set(keys)
    assert compose([*words, *keys]) == compose(words)
    assert "usage: fpexp train" in cli("train", "task=copy", "--help").out
    assert "did you mean" in cli("train", "task=copyy", "model=lstm", "--help").err


def test_help_and_list_are_quick_and_import_nothing_heavy(tmp_path: Path) -> None:
    code = """
import sys, time
from fpexp.cli import main
for words in ([], ["--help"], ["--version"], ["train", "--help"], ["runs", "--help"], ["list"], ["bench", "--list"]):
    assert main(words) == 0
taken = time.process_time()
heavy = {"torch", "hydra", "omegaconf", "numpy", "matplotlib", "wandb", "datasets", "rich"} & set(sys.modules)
print(taken, file=sys.stderr)
assert not heavy, heavy
assert taken < 0.5, taken
"""
    answer = run_python(code, tmp_path)
    assert answer.code == 0, answer.err


# What is refused


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["trian"], ["unknown command 'trian'; did you mean 'train'?", "evaluate"]),
        (["train"], ["which model? write model=<name>", "lstm"]),
        (["train", "task=a4", "model=lstm", "training.lrr=1"], ["'training.lrr'", "did you mean 'training.lr'?"]),
        (["train", "task=a4", "model=lstm", "+training.lrr=1"], ["'training.lrr'", "did you mean 'training.lr'?"]),
        (["train", "task=a4", "model=mamba,zz"], ["'model=mamba,zz'", "-m"]),
        (["train", "task=a4", "model=lstn"], ["unknown model 'lstn'; did you mean 'lstm'?"]),
        (["train", "task=a4", "model=lstm", "training.steps=many"], ["training.steps='many' must be an integer"]),
        (["train", "task=a4", "model=lstm", "training.lr_schedule=cosin"], ["did you mean 'cosine'?"]),
        (["train", "task=group", "model=lstm", "task.group=A"], ["task.group", "'A'", "for example 'S5'"]),
        (["train", "task=group", "model=lstm", "task.group=S0"], ["task.group", "'S0'"]),
        (["train", "task=group", "model=lstm", "task.group=Q8"], ["task.group", "'Q8'"]),
        (["train", "task=group", "model=lstm"], ["task.group has no value"]),
        (
            ["train", "task=a4", "model=fp_mamba_k", "model.d_model=16", "model.expand=1.0625"],
            ["Kronecker", "17", "model.d_model", "model.expand"],
        ),
        (["train", "task=a4", "model=fp_mamba_h", "model.channel_mixer.rank=0"], ["model.channel_mixer.rank=0"]),
        (["train", "task=a4", "model=fp_mamba_h", "model.expand=1e9"], ["no memory holds", "model.d_model"]),
        (["train", "task=a4", "model=fp_mamba_h", "model.expand=1e30"], ["no memory holds", "model.d_model"]),
        (["train", "task=a4", "model=fp_mamba_h", "model.delta_range=[1e-45,0.1]"], ["model.delta_range", "1e-06"]),
        (
            ["train", "task=a4", "model=fp_mamba_h", "solver=picard", "schedule=gamma", "schedule.mean=1e300"],
            ["schedule.mean", "at most"],
        ),
        (["train", "task=a4", "model=lstm", "evaluation.lengths=[0]"], ["evaluation.lengths[0]=0", "at least 1"]),
        (["train", "task=a4", "model=lstm", "task.lengths.min=0"], ["task.lengths.min=0"]),
        (["train", "task=a4", "model=lstm", "evaluation.lengths=[5000]"], ["evaluation.lengths[0]=5000", "context"]),
        (["train", "task=a4", "model=fp_mamba_h", "solver=sequential", "schedule=fixed"], ["schedule=fixed", "picard"]),
        (
            ["train", "task=a4", "model=lstm", "task.context=2000000001", "evaluation.lengths=[2000000000]"],
            ["evaluation.lengths: a length of 2000000000", "evaluation.batch_size=", "at least", "cpu has"],
        ),
        (
            ["train", "task=a4", "model=fp_mamba_k", "task.context=2e9", "task.lengths.max=2e9"],
            ["task.lengths.max: a length of 2000000000", "training.batch_size=", "training.accumulation=1", "cpu has"],
        ),
        (["train", "task=a4", "model=lstm", "evaluation.lengths=[1e12]"], ["evaluation.lengths[0]=", "at most"]),
        (["train", "task=a4", "model=fp_mamba_k", "solver.tolerance=0"], ["solver.tolerance=0", "above 0"]),
        (["train", "task=a4", "model=fp_mamba_k", "solver.tolerance=-0.1"], ["solver.tolerance=-0.1", "above 0"]),
        (
            ["train", "task=a4", "model=fp_mamba_k", "solver=anderson", "solver.tolerance=0"],
            ["solver.tolerance=0", "above 0"],
        ),
        (
            ["train", "task=a4", "model=fp_mamba_k", "gradient=implicit", "gradient.tolerance=0"],
            ["gradient.tolerance=0", "above 0"],
        ),
        (["train", "task=a4", "model=fp_mamba_k", "schedule.max_iterations=0"], ["schedule.max_iterations=0"]),
        (
            ["train", "task=a4", "model=fp_mamba_k", "schedule=fixed", "schedule.max_iterations=0"],
            ["schedule.max_iterations=0", "at least 1"],
        ),
        (
            ["train", "task=a4", "model=fp_mamba_k", "schedule.evaluation_max_iterations=0"],
            ["schedule.evaluation_max_iterations=0", "at least 1"],
        ),
        (
            ["train", "task=a4", "model=fp_mamba_k", "solver.inner_max_iterations=0"],
            ["solver.inner_max_iterations=0", "at least 1"],
        ),
        (["train", "task=a4", "model=fp_mamba_k", "solver=anderson", "solver.window=0"], ["solver.window=0"]),
        (["train", "task=a4", "model=lstm", "device=tpu"], ["unknown device 'tpu'", "cuda"]),
        (["train", "task=a4", "model=lstm", "device=cuda:64"], ["device=cuda:64", "use device=cpu"]),
        (["train", "task=a4", "model=lstm", "model._target_=no.thing"], ["model._target_", "cannot import 'no.thing'"]),
        (["train", "resume=a4-lstm"], ["no run 'a4-lstm' under results/runs"]),
        (["train", "resume=a4-lstm", "-m"], ["resume= and -m do not go together"]),
        (["train", "config=nowhere.yaml"], ["nowhere.yaml", "No such file"]),
        (["train", "config=nowhere.yaml", "-m"], ["config= and -m do not go together"]),
        (["train", "-m", "task=a4", "model=lstm,zz"], ["unknown model 'zz'"]),
        (["train", "-m", "task=a4", "model=lstm", "seed=0,x"], ["seed='x' must be an integer"]),
        (["train", "-m", "task=a4", "model=lstm", "training.lrr=1,2"], ["'training.lrr'", "'training.lr'?"]),
        (["evaluate"], ["which run? write run=<run id>"]),
        (["evaluate", "run=nope"], ["no run 'nope'"]),
        (["evaluate", "runn=nope"], ["unknown key 'runn'; did you mean 'run'?"]),
        (["evaluate", "nope"], ["'nope' is not understood", "lengths"]),
        (["evaluate", "run=nope", "lengths=2"], ["lengths=2 must be a list"]),
        (["evaluate", "run=nope", "lengths=[0]"], ["lengths[0]=0 is out of range"]),
        (["evaluate", "run=nope", "lengths=[]"], ["lengths=[] is empty"]),
        (["evaluate", "run=nope", "lengths=[2,"], ["cannot read 'lengths=[2,'"]),
        (["evaluate", "run=nope", "samples=0"], ["samples=0 is out of range"]),
        (["list", "tasks", "model.d_model=8"], ["model.d_model=8", "fpexp list models"]),
        (["list", "models", "scale=cpu"], ["'scale=cpu'", "every scale"]),
        (["list", "models", "model.d_model=16"], ["model=fp_mamba2_h: model.head_size=64 does not divide"]),
        (["train", "task=a4", "model=mamba2", "model.a_range=[1,1e60]"], ["model.a_range"]),
        (["list", "models", "task=a55"], ["did you mean 'a5'?"]),
        (["list", "modles"], ["unknown kind 'modles'; did you mean 'models'?", "tasks"]),
        (["runs", "result_dir=x"], ["unknown key 'result_dir'; did you mean 'results_dir'?"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" not in value[0] else "",
)
def test_a_mistake_is_one_line_and_two(cli: CommandLine, words: list[str], parts: list[str]) -> None:
    cli(*words).refused(*parts)
    assert not list(Path().iterdir()), "nothing is left behind"


def test_numbers_of_evaluate_are_numbers(cli: CommandLine) -> None:
    cli("evaluate", "run=nope", "samples=1e3", "lengths=[1e1]").refused("no run 'nope'")


@pytest.mark.parametrize("target", ["file", "file/below", "."])
def test_a_results_dir_that_cannot_be_written(cli: CommandLine, target: str) -> None:
    Path("file").write_text("kept")
    Path("runs").write_text("kept")
    cli("train", "task=a4", "model=lstm", *TINY, f"results_dir={target}").refused(f"results_dir={target}")
    cli("train", "-m", "task=a4", "model=lstm", *TINY, "results_dir=file").refused("results_dir=file")
    assert Path("file").read_text() == Path("runs").read_text() == "kept"


def test_a_run_id_that_is_nearly_right(cli: CommandLine, stopped: RunFolder) -> None:
    wrong = stopped.id[:-1]
    for words in (["train", f"resume={wrong}"], ["evaluate", f"run={wrong}"]):
        cli(*words).refused(f"no run '{wrong}'", f"did you mean '{stopped.id}'?")


@pytest.mark.parametrize(
    "word",
    ["training.steps=30", "training.lr=0.1", "model.d_model=32", "model=fp_mamba_h", "seed=1", "+training.steps=9"],
)
def test_a_resumed_run_does_not_change(cli: CommandLine, stopped: RunFolder, word: str) -> None:
    before = digest(stopped.path)
    key = word.partition("=")[0].lstrip("+")
    cli("train", f"resume={stopped.id}", word).refused(f"'{key}' cannot change in a resumed run", "config.yaml")
    assert digest(stopped.path) == before


def test_a_checkpoint_of_another_shape(cli: CommandLine, stopped: RunFolder) -> None:
    path = stopped.path / "config.yaml"
    path.write_text(path.read_text().replace("d_model: 16", "d_model: 24"))
    for words in (["evaluate", f"run={stopped.id}"], ["train", f"resume={stopped.id}"]):
        cli(*words).refused(
            "step_00000003.safetensors is of another model", "embedding.weight (12, 16) is not (12, 24)"
        )
    assert stopped.status()["state"] != "finished"
    assert not stopped.curve.exists()
    assert checkpoint.load_newest(stopped.checkpoints, []).state["step"] == 3


def test_a_finished_run_is_not_resumed(cli: CommandLine) -> None:
    run = cli.train()
    before = digest(run.path)
    cli("train", f"resume={run.id}").refused(f"run '{run.id}' is finished", f"fpexp evaluate run={run.id}")
    assert digest(run.path) == before


def test_a_run_that_another_process_holds(cli: CommandLine, stopped: RunFolder) -> None:
    before = digest(stopped.path)
    with stopped.lock():
        cli("train", f"resume={stopped.id}").refused(f"run '{stopped.id}' is being used by another process")
    assert digest(stopped.path) == before
    assert stopped.status()["state"] == "interrupted"


def test_a_run_without_a_checkpoint_cannot_be_measured(cli: CommandLine) -> None:
    run = RunFolder.create(tiny(Path("results")))
    cli("evaluate", f"run={run.id}").refused(f"no whole checkpoint in {run.path.resolve() / 'checkpoints'}")
    assert not (run.path / "evaluations").exists()


def test_evaluating_past_the_context_leaves_nothing(cli: CommandLine, stopped: RunFolder) -> None:
    before = digest(stopped.path)
    cli("evaluate", f"run={stopped.id}", "lengths=[2,5000]").refused("lengths=5000", "task.context=4096")
    assert digest(stopped.path) == before
    assert not (stopped.path / "evaluations").exists()


def test_a_broken_checkpoint_is_told_when_measuring(cli: CommandLine) -> None:
    run = cli.train("training.checkpoint_every=3")
    newest = run.checkpoints / "step_00000006.safetensors"
    newest.write_bytes(newest.read_bytes()[:-50])
    answer = cli("evaluate", f"run={run.id}")
    assert answer.code == 0
    assert newest.name in answer.err
    assert "Traceback" not in answer.err
    (folder,) = (run.path / "evaluations").iterdir()
    assert {row["step"] for row in read_rows(folder / "curve.jsonl")} == {3}


def test_evaluating_what_no_memory_holds_leaves_nothing(cli: CommandLine) -> None:
    run = cli.train("task.context=2000000000", model="fp_mamba_h")
    before = digest(run.path)
    words = ("lengths=[2,2000000000]", "batch_size=1")
    cli("evaluate", f"run={run.id}", *words).refused("lengths: a length of 2000000000", "batch_size=1", "cpu has")
    cli("evaluate", f"run={run.id}", "lengths=[1e12]").refused("lengths[0]=", "at most")
    assert digest(run.path) == before
    assert not (run.path / "evaluations").exists()


# Failures and signals


@pytest.mark.parametrize(
    "error",
    [RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), MemoryError()],
    ids=["torch", "numpy"],
)
def test_evaluating_until_memory_is_out(cli: CommandLine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    run = cli.train()

    def forward(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(LanguageModel, "forward", forward)
    cli("evaluate", f"run={run.id}").refused("out of memory on cpu; lower batch_size or the longest of lengths", code=1)
    assert not (run.path / "evaluations").exists()


def test_a_checkpoint_that_is_not_finite(cli: CommandLine, stopped: RunFolder) -> None:
    saved = checkpoint.load_newest(stopped.checkpoints, [])
    tensors = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    tensors["model.head.weight"][0, 0] = float("nan")
    save_file(tensors, saved.path, metadata={"state": json.dumps(dict(saved.state))})
    for words in (["evaluate", f"run={stopped.id}"], ["train", f"resume={stopped.id}"]):
        cli(*words).refused(f"{saved.path.name}: head.weight is not finite", code=1)
    assert stopped.status()["state"] == "interrupted", "nothing has happened to the run"
    assert not (stopped.path / "evaluations").exists()


def test_a_run_that_diverges_ends_with_one(cli: CommandLine) -> None:
    words = ["training.lr=1e20", "training.clip=null", "training.warmup_steps=0"]
    answer = cli("train", "task=a4", "model=lstm", *TINY, *words)
    answer.refused("step", "lower training.lr", code=1)
    (run,) = cli.runs()
    assert run.status()["state"] == "failed"
    assert "lower training.lr" in run.status()["reason"]
    assert not run.curve.exists()


def test_a_signal_while_measuring_keeps_the_rows_and_ends_with_its_code(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cli.train("solver=picard", model="fp_mamba_h")
    before = digest(run.path)
    sample = WordProblem.sample

    def sample_and_stop(task: WordProblem, size: int, length: int, generator: Any) -> Any:
        if length == 3:
            signal.raise_signal(signal.SIGTERM)
        return sample(task, size, length, generator)

    monkeypatch.setattr(WordProblem, "sample", sample_and_stop)
    answer = cli("evaluate", f"run={run.id}", "lengths=[2,3,4]", "batch_size=4")
    assert (answer.code, answer.err) == (143, "fpexp: interrupted by SIGTERM\n")
    (folder,) = (run.path / "evaluations").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["curve.jsonl.partial", "settings.json"]
    assert [row["length"] for row in read_rows(folder / "curve.jsonl.partial")] == [2]
    assert {name: value for name, value in digest(run.path).items() if name in before} == before


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "fpexp: interrupted"),
        (Interrupted(2), 130, "fpexp: interrupted by SIGINT"),
        (Interrupted(15, "stopped; go on"), 143, "fpexp: stopped; go on"),
    ],
)
def test_exit_codes_of_signals(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def run(arguments: list[str]) -> Any:
        raise error

    monkeypatch.setattr("fpexp.commands.runs.run", run)
    answer = cli("runs")
    assert (answer.code, answer.err, answer.out) == (code, line + "\n", "")


def test_a_run_shorter_than_its_warm_up_says_so(cli: CommandLine) -> None:
    answer = cli("train", "task=a4", "model=lstm", *TINY, "training.steps=2", "training.warmup_steps=3")
    assert answer.code == 0, answer.err
    assert "ends in its warm-up: training.warmup_steps=3, training.steps=2" in answer.out


# Backends that are not for this machine (CASES.md 38)


@pytest.mark.parametrize("solver", [["solver=sequential", "solver"], ["solver=auto", "solver.sequential"]])
def test_triton_without_a_gpu_is_one_line(cli: CommandLine, solver: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    words = ["train", "task=a4", "model=fp_mamba_h", *TINY, "device=cpu", solver[0], f"{solver[1]}.backend=triton"]
    cli(*words).refused("solver.backend=triton is for cuda tensors, not cpu; use solver.backend=auto")
    assert not cli.runs()


def test_auto_says_once_that_it_uses_the_cpu(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = cli("train", "task=a4", "model=lstm", *TINY)
    assert answer.code == 0, answer.err
    assert answer.out.count("device=auto: cpu (no GPU here)") == 1
    assert "device=auto" not in cli("train", "task=a4", "model=lstm", *TINY, "device=cpu").out
