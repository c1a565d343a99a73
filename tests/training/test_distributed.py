"""Two processes train one run (gloo, on the CPU): the numbers of one process, one writer, and one end for all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Answer, Recorder, assert_steps_stand_once, sit, stop_at, tiny

from fpexp.build import build
from fpexp.cli import main
from fpexp.config.compose import compose
from fpexp.config.run import RunConfig
from fpexp.errors import EndedElsewhere, Interrupted, UserError
from fpexp.evaluation.metrics import Accuracy, BackwardStatistics, LayerStatistics, SolveStatistics
from fpexp.run import resume_run
from fpexp.run_folder import RunFolder, all_runs, read_rows
from fpexp.tasks import Batch
from fpexp.training import checkpoint
from fpexp.training.distributed import check_shares, micro_batches
from fpexp.training.interruption import Interruption
from fpexp.world import ALONE, World

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

PARTS = """
import os, signal
import torch
from fpexp.models import LanguageModel, lstm
from fpexp.randomness import generator
from fpexp.ranges import Count, Probability
from fpexp.tasks import IGNORE, WordProblem


class EveryOther(WordProblem):  # of two processes the second has rows without a scored position, alone
    def sample(self, size, length, generator):
        batch = super().sample(size, length, generator)
        batch.targets[1::2] = IGNORE
        return batch


class Numbers:
    def __init__(self, task, seed):
        self.task, self.seed, self.position = task, seed, 0

    def read(self, size):
        self.position += 1
        return self.task.sample(size, 4, generator(self.seed, "train", self.position))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def close(self):
        pass


class Reading(WordProblem):
    def open_stream(self, seed):
        return Numbers(self, seed)


class Writing(WordProblem):  # the answers of the two processes may end after different numbers of tokens
    stop_token, generated_samples = 0, 7

    def sample_prompts(self, size, length, generator):
        tokens = torch.randint(self.vocabulary_size, (size, 2 * length + 3), generator=generator)
        return tokens[:, :length], tokens[:, length:]


def signalled(vocabulary_size: int, *, d_model: Count, layers: Count, expand: Count, dropout: Probability,
              signum: Count, at: Count) -> LanguageModel:
    model = lstm(vocabulary_size, d_model=d_model, layers=layers, expand=expand, dropout=dropout)
    forward, calls = model.forward, 0

    def counted(*inputs):
        nonlocal calls
        calls += 1
        if calls == at and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signum)
        return forward(*inputs)

    model.forward = counted
    return model
"""

WORKER = """
import contextlib, io, json, os, sys
sys.path.insert(0, os.getcwd())
from fpexp.cli import main
from fpexp.world import World

answers = []
with World.from_environment().joined():
    World.joined = lambda world: contextlib.nullcontext()  # once for all commands
    for words in json.load(open("commands.json")):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        answers.append((code, out.getvalue(), err.getvalue()))
json.dump(answers, open(f"answers{os.environ['RANK']}.json", "w"))
"""

STEPS = ["training.steps=12", "training.batch_size=5", "training.evaluate_every=6", "evaluation.samples=9"]
EXACT = ["solver=picard", "schedule=fixed", "schedule.max_iterations=5", "schedule.stop_early=false"]
SAME = {
    "lstm": ("lstm", []),
    "lstm accumulated": ("lstm", ["training.accumulation=2"]),
    "lstm unscored rows": ("lstm", ["precision=float64"]),
    "lstm text": ("lstm", []),
    "lstm streamed": ("lstm", ["model.layers=2"]),
    "fp_mamba_h picard": ("fp_mamba_h", [*EXACT, "precision=float64"]),
    "fp_mamba_h sequential": ("fp_mamba_h", ["solver=sequential", "training.accumulation=2"]),
    "fp_mamba_k drawn caps": (
        "fp_mamba_k",
        ["solver=picard", "schedule=gamma", "solver.tolerance=1e-15", "schedule.evaluation_max_iterations=5"],
    ),
    "lstm fsdp": ("lstm", ["parallel=fsdp", "model.layers=2"]),
    "fp_mamba_k fsdp": ("fp_mamba_k", [*EXACT, "parallel=fsdp", "model.layers=2", "model.weight_norm=true"]),
    "fp_mamba_h writes fsdp": (
        "fp_mamba_h",
        ["parallel=fsdp", "solver=sequential", "training.accumulation=2", "gradient=implicit", "precision=float64"],
    ),
}
"""Configs whose numbers do not depend on how a batch is split."""

TASKS = {"streamed": "parts.Reading", "unscored": "parts.EveryOther", "writes": "parts.Writing"}


TEXT = "\n\n".join(" ".join(str(i * j) for j in range(i % 7 + 3)) for i in range(40))


def text_words(results_dir: Path) -> list[str]:
    text = ["task=fineweb", "task.source=local", "task.files=text.txt", "task.text_unit=paragraph", "task.context=8"]
    sizes = ["task.validation_tokens=60", "task.shuffle_buffer=4", "model.d_model=16", "evaluation.lengths=[2,4]"]
    steps = ["training.log_every=1", "evaluation.batch_size=3", f"results_dir={results_dir}"]
    return ["model=lstm", *text, *sizes, *STEPS, *steps, "training.warmup_steps=0"]


def of_case(name: str, results_dir: Path) -> RunConfig:
    model, words = SAME[name]
    if "text" in name:
        return compose(text_words(results_dir))
    config = tiny(results_dir, *STEPS, *words, model=model)
    targets = [target for word, target in TASKS.items() if word in name]
    tree = config.to_dict()
    return RunConfig.parse({**tree, "task": {**tree["task"], "_target_": targets[0]}}) if targets else config


def with_signal(config: RunConfig, signum: int, at: int) -> RunConfig:
    """Return an LSTM's config whose second process gets a signal at its so many-th forward pass."""
    tree = config.to_dict()
    model = {**tree["model"], "_target_": "parts.signalled", "signum": int(signum), "at": at}
    return RunConfig.parse({**tree, "model": model})


def only_run(results_dir: Path) -> RunFolder:
    (run,) = all_runs(results_dir)
    return run


@dataclass
class Launch:
    """What one launch of both processes left behind: folders with results, and the answers of each by command."""

    folder: Path
    answers: dict[str, tuple[Answer, Answer]]

    def run(self, name: str) -> RunFolder:
        return only_run(self.folder / name)

    def succeeded(self, name: str) -> RunFolder:
        """Return the run of a command that must have ended well, with the second process silent."""
        first, second = self.answers[name]
        assert (first.code, second.code) == (0, 0), first.err + second.err
        assert second.out == second.err == ""
        return self.run(name)


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """All commands in one start of two processes, since a start takes seconds."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "parts.py").write_text(PARTS)
    (folder / "worker.py").write_text(WORKER)
    (folder / "text.txt").write_text(TEXT)
    sys.path.insert(0, str(folder))
    commands: dict[str, list[str]] = {}

    def train(name: str, config: RunConfig) -> None:
        path = folder / f"{len(commands)}.json"
        path.write_text(json.dumps(config.to_dict()))
        commands[name] = ["train", f"config={path}"]

    for name in SAME:
        train(name, of_case(name, folder / name))
    dropout = [*STEPS, "model.dropout=0.2"]
    train("dropout", tiny(folder / "dropout", *dropout))
    train("stopped", with_signal(tiny(folder / "stopped", *dropout), signal.SIGTERM, 5))
    for parallel in ("ddp", "fsdp"):  # begun alone
        run = RunFolder.create(config := tiny(folder / parallel, *STEPS, f"parallel={parallel}"))
        run.write_status("running")
        with pytest.raises(Interrupted):
            sit(run, build(config), Recorder(at_step=stop_at(4)))
        middle = with_signal(config, signal.SIGINT, 5)
        (run.path / "config.yaml").write_text(json.dumps(middle.to_dict()))
        commands[parallel] = ["train", f"resume={run.path}"]
    validating = tiny(folder / "validating", *STEPS, "evaluation.batch_size=4", "training.evaluate_every=3")
    train("validating", with_signal(validating, signal.SIGTERM, 4))
    common = ["train", "task=a4", "model=lstm", f"results_dir={folder / 'refused'}"]
    commands["typo"] = [*common, "training.lrr=1"]
    commands["few rows"] = [*common, "training.batch_size=3", "training.accumulation=2"]
    commands["one device"] = [*common, "device=cuda:0"]
    commands["sweep"] = [*common, "-m", "seed=0,1"]
    commands["not finite"] = [*common, *STEPS, "training.lr=1e30", "training.clip=null", "task.lengths.max=3"]
    (folder / "commands.json").write_text(json.dumps(list(commands.values())))
    done = subprocess.run(
        [*TORCHRUN, "worker.py"],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,  # kernels may have to be compiled
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [[Answer(*a) for a in json.loads((folder / f"answers{rank}.json").read_text())] for rank in (0, 1)]
    sys.path.remove(str(folder))
    return Launch(folder, dict(zip(commands, zip(*answers, strict=True), strict=True)))


def environment() -> dict[str, str]:
    """Return that of a process which finds the package and the modules of its folder."""
    import fpexp

    paths = [str(Path(fpexp.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def assert_same_numbers(ours: Any, alone: Any, tolerance: float, where: str = "") -> None:
    """Compare rows; counts exactly, all else to the tolerance, times not at all."""
    if isinstance(alone, dict):
        assert ours.keys() == alone.keys(), where
        for key in alone.keys() - {"seconds"}:
            assert_same_numbers(ours[key], alone[key], tolerance, f"{where}.{key}")
    elif isinstance(alone, list):
        assert len(ours) == len(alone), where
        for number, (a, b) in enumerate(zip(ours, alone, strict=True)):
            assert_same_numbers(a, b, tolerance, f"{where}[{number}]")
    elif isinstance(alone, float):
        assert ours == pytest.approx(alone, rel=tolerance, abs=tolerance), where
    else:
        assert ours == alone, where


@pytest.mark.parametrize("name", SAME)
def test_numbers_are_those_of_one_process(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Losses, accuracies, solver statistics, gradient norms, validation, curve and weights."""
    monkeypatch.syspath_prepend(launch.folder)
    monkeypatch.chdir(launch.folder)
    run = launch.succeeded(name)
    config = of_case(name, tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    assert main(["train", f"config={tmp_path / 'run.json'}"]) == 0
    alone = only_run(tmp_path)
    rows = read_rows(run.metrics)
    assert len([row for row in rows if row["kind"] == "train"]) == 12
    assert_same_numbers(rows, read_rows(alone.metrics), 1e-6)
    assert_same_numbers(read_rows(run.curve), read_rows(alone.curve), 1e-6)
    assert [row["length"] for row in read_rows(run.curve)] == [2, 4]
    assert ("generated_n" in read_rows(run.curve)[0]) == ("writes" in name)
    ours, others = (checkpoint.load_newest(folder.checkpoints, []).tensors for folder in (run, alone))
    assert ours.keys() == others.keys()
    for key in ours:
        assert ours[key].shape == others[key].shape
        if not key.startswith("random."):
            torch.testing.assert_close(ours[key], others[key], rtol=1e-4, atol=1e-6, msg=key)
    assert run.config().fingerprint() == alone.config().fingerprint()


def test_first_process_alone_writes(launch: Launch) -> None:
    run = launch.run("lstm")
    assert run.status()["state"] == "finished"
    assert (run.path / "curve.png").exists()
    assert_steps_stand_once(run)
    (sitting,) = json.loads((run.path / "environment.json").read_text())["sittings"]
    assert sitting["processes"] == 2
    assert launch.answers["lstm"][0].out.count("2 processes, parallel=ddp") == 1


def test_a_signal_to_one_process_stops_both_and_they_go_on_to_the_bit(launch: Launch) -> None:
    first, second = launch.answers["stopped"]
    assert (first.code, second.code) == (143, 143)
    assert "the state is saved, go on with" in first.err
    assert second.err == ""
    run = launch.run("stopped")
    assert run.status()["state"] == "interrupted"
    assert checkpoint.load_newest(run.checkpoints, []).state["step"] == 5
    rows = [row["loss"] for row in read_rows(run.metrics)]
    assert rows == [row["loss"] for row in read_rows(launch.run("dropout").metrics)][: len(rows)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_then_two_then_one(launch: Launch, tmp_path: Path, parallel: str) -> None:
    first, second = launch.answers[parallel]
    assert (first.code, second.code) == (130, 130), first.err + second.err
    run = launch.run(parallel)
    assert checkpoint.load_newest(run.checkpoints, []).state["step"] == 8
    plain = tiny(launch.folder / parallel, *STEPS)
    resume_run(run, plain, Recorder())
    config = tiny(tmp_path, *STEPS)
    unbroken = Recorder()
    sit(RunFolder.create(config), build(config), unbroken)
    assert_steps_stand_once(run)
    assert_same_numbers(read_rows(run.metrics), unbroken.rows, 1e-6)


def test_a_signal_in_a_validation_ends_it_at_the_same_batch(launch: Launch) -> None:
    first, second = launch.answers["validating"]
    assert (first.code, second.code) == (143, 143), first.err + second.err
    saved = checkpoint.load_newest(launch.run("validating").checkpoints, [])
    assert (saved.state["step"], saved.state["progress"]["validated_at"]) == (3, -1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("typo", ["unknown key 'training.lrr'"]),
        ("few rows", ["training.batch_size=3", "training.accumulation=2", "2 processes", "4"]),
        ("one device", ["device=cuda:0", "device=cuda"]),
        ("sweep", ["-m"]),
    ],
)
def test_a_mistake_is_told_once(launch: Launch, name: str, words: list[str]) -> None:
    first, second = launch.answers[name]
    first.refused(*words)
    assert (second.code, second.out, second.err) == (2, "", "")


def test_all_stop_at_a_step_that_is_not_finite(launch: Launch) -> None:
    first, second = launch.answers["not finite"]
    first.refused("training stopped", "training.lr", code=1)
    assert (second.code, second.err) == (1, "")
    assert launch.run("refused").status()["state"] == "failed"


def test_a_killed_process_ends_the_run(tmp_path: Path) -> None:
    """Without waiting; the last checkpoint is good, the status says what happened, and the run can be resumed."""
    (tmp_path / "parts.py").write_text(PARTS)
    config = tiny(Path("results"), "training.steps=400", "training.checkpoint_every=5", "training.evaluate_every=400")
    tree = {**config.to_dict(), "model": {**config.to_dict()["model"], "signum": 9, "at": 13}}
    tree["model"]["_target_"] = "parts.signalled"
    (tmp_path / "run.json").write_text(json.dumps(tree))
    began = time.monotonic()
    done = subprocess.run(
        [*TORCHRUN, "-m", "fpexp", "train", "config=run.json"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode != 0
    assert time.monotonic() - began < 60
    run = only_run(tmp_path / "results")
    assert checkpoint.load_newest(run.checkpoints, []).state["step"] == 10
    status = run.status()
    assert status["state"] == "failed", done.stderr
    assert "another process of the run has ended" in status["reason"]
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("fpexp: error: "))
    assert "another process of the run has ended" in line


# One process of several, without the others


def batch(rows: int) -> Batch:
    numbers = torch.arange(rows)[:, None]
    return Batch(numbers, numbers)


@pytest.mark.parametrize(("rows", "size", "accumulation"), [(5, 2, 1), (5, 2, 2), (7, 2, 3), (8, 3, 2), (6, 3, 2)])
def test_shares_are_all_rows_once_in_equally_many_parts(rows: int, size: int, accumulation: int) -> None:
    parts = [micro_batches(batch(rows), accumulation, World(rank, rank, size)) for rank in range(size)]
    assert {len(of_rank) for of_rank in parts} == {accumulation}
    for rank, of_rank in enumerate(parts):
        assert all(len(part.inputs) for part in of_rank)
        taken = sorted(number for part in of_rank for number in part.inputs.flatten().tolist())
        assert taken == batch(rows).rows(World(rank, rank, size).share).inputs.flatten().tolist()


def test_alone_a_batch_is_split_as_ever() -> None:
    assert [part.inputs.flatten().tolist() for part in micro_batches(batch(5), 2, ALONE)] == [[0, 1, 2], [3, 4]]


def test_too_few_rows_name_the_keys(tmp_path: Path) -> None:
    config = tiny(tmp_path, "training.batch_size=4", "training.accumulation=2")
    check_shares(config, World(0, 0, 2))
    with pytest.raises(UserError, match=r"training.batch_size=4 .* 3 processes .* training.accumulation=2 .* 6"):
        check_shares(config, World(0, 0, 3))


def test_the_world_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert World.from_environment() == ALONE
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    world = World.from_environment()
    assert (world.rank, world.local_rank, world.size, world.is_first) == (5, 1, 8, False)


class Two(World):
    """Two processes whose other one says what it is told to."""

    def __init__(self, *other: list[float]) -> None:
        super().__init__(0, 0, 2)
        object.__setattr__(self, "other", list(other))

    def gather(self, numbers: Any) -> list[list[float]]:
        return [list(numbers), self.other.pop(0)]  # type: ignore[attr-defined]


def test_sums_over_processes() -> None:
    ours = Accuracy(1.5, 4, 3, 2, 1, 1)
    assert ours.over(Two([0.5, 2, 1, 1, 0, 1])) == Accuracy(2.0, 6, 4, 3, 1, 2)
    first = SolveStatistics(2, 10, 6, 1, 1, 0, 0.5, BackwardStatistics(4, 20, 7, 1e-3))
    second = SolveStatistics(1, 9, 9, 0, 0, 1, float("nan"), BackwardStatistics(1, 3, 3, 1e-2))
    assert SolveStatistics.from_numbers(first.numbers()) == first
    (layer,) = LayerStatistics([first]).over(Two(second.numbers())).layers
    assert (layer.sequences, layer.iterations, layer.iterations_max) == (3, 19, 9)
    assert (layer.converged, layer.cap_hits, layer.diverged) == (1, 1, 1)
    assert layer.residual_max != layer.residual_max, "a NaN on any process is not lost"
    assert layer.backward == BackwardStatistics(5, 23, 7, 1e-2)


def test_an_error_elsewhere_ends_this_process_silently() -> None:
    with pytest.raises(EndedElsewhere) as caught:
        Two([2.0]).together(lambda: None)
    assert caught.value.exit_code == 2
    with pytest.raises(UserError, match="mine"):
        Two([2.0]).together(lambda: raise_mine())


def raise_mine() -> None:
    raise UserError("mine")


def test_signals_after_the_first_have_no_effect_beside_others() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        with Interruption(Two([0.0], [0.0])) as interruption:
            interruption.check()
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            with pytest.raises(Interrupted):
                interruption.check()
    finally:
        for signum, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("rank", "local_rank", "size"),
    [("2", "0", "2"), ("0", "0", "0"), ("-1", "0", "2"), ("0", "3", "2"), ("a", "0", "2")],
)
def test_a_place_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, local_rank: str, size: str
) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"RANK={rank}, LOCAL_RANK={local_rank}, WORLD_SIZE={size} is no place"):
        World.from_environment()


def test_processes_that_cannot_meet_are_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="start with torchrun"), World.from_environment().joined():
        raise AssertionError("there is nobody to meet")
