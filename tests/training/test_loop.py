"""The training loop through whole runs: resuming to the bit, signals, faults, and what stands in the rows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import (
    Killed,
    Recorder,
    assert_same_weights,
    assert_steps_stand_once,
    kill_at,
    run_python,
    sit,
    stop_at,
    tiny,
    train_tiny,
    weights,
    without_time,
)

from fpexp.build import Experiment, build
from fpexp.config.run import RunConfig
from fpexp.errors import FpexpError, Interrupted, UserError
from fpexp.fixed_point import Cap, Status
from fpexp.randomness import generator
from fpexp.run import resume_run, start_run
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import IGNORE, Batch
from fpexp.training import checkpoint, loop
from fpexp.training.interruption import Interruption

NAN = float("nan")
Change = Callable[[Callable[[Experiment], None]], None]


@pytest.fixture
def change_experiment(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Let the runs of a test change what was built."""

    def change(function: Callable[[Experiment], None]) -> None:
        def changed(config: RunConfig, processes: int) -> Experiment:
            experiment = build(config, processes)
            function(experiment)
            return experiment

        monkeypatch.setattr("fpexp.run.build", changed)

    return change


class Listening:
    """A task that remembers its inputs."""

    def __init__(self, task: Any) -> None:
        self.task, self.inputs = task, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        batch = self.task.sample(size, length, generator)
        self.inputs.append(batch.inputs.clone())
        return batch


def assert_finite_on_disk(run: RunFolder) -> None:
    paths = list(run.checkpoints.glob("step_*"))
    assert paths
    for path in paths:
        for name, tensor in checkpoint.read(path).tensors.items():
            assert tensor.isfinite().all(), f"{path.name}: {name}"


# CASES 25-27: the same to the bit

RESUMED = [
    ("lstm", ["model.layers=2"]),
    ("fp_mamba_h", []),
    ("fp_mamba_k", ["solver=picard", "schedule=gamma", "training.accumulation=2"]),
]


@pytest.mark.parametrize(("model", "words"), RESUMED, ids=[model for model, _ in RESUMED])
def test_resumed_twice_is_the_unbroken_run_to_the_bit(tmp_path: Path, model: str, words: list[str]) -> None:
    """40 steps, against 13 + 11 + 16, the first of them in the warm-up: losses, learning rates, weights, data, and
    every other number in the rows.
    """
    config = tiny(
        tmp_path,
        "training.steps=40",
        "training.warmup_steps=18",
        "training.evaluate_every=8",
        "training.checkpoint_every=7",
        "task.lengths.mastery=0.1",
        "model.dropout=0.1",
        *words,
        model=model,
    )

    def listening() -> tuple[Experiment, Listening]:
        experiment = build(config)
        task = Listening(experiment.task)
        return dataclasses.replace(experiment, task=task), task

    unbroken = RunFolder.create(config)
    experiment, task = listening()
    sit(unbroken, experiment, Recorder())
    expected = weights(experiment.model)

    run, inputs = RunFolder.create(config), []
    for resume, stop in ((False, 13), (True, 24), (True, None)):
        torch.manual_seed(1234)  # another process would start anywhere
        experiment, heard = listening()
        tracker = Recorder(at_step=stop_at(stop) if stop else None)
        if stop:
            with pytest.raises(Interrupted):
                sit(run, experiment, tracker, resume=resume)
        else:
            sit(run, experiment, tracker, resume=resume)
        inputs += heard.inputs

    assert without_time(read_rows(run.metrics)) == without_time(read_rows(unbroken.metrics))
    assert len({row["length"] for row in read_rows(run.metrics)}) > 1
    assert_same_weights(weights(experiment.model), expected)
    assert len(inputs) == len(task.inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, task.inputs, strict=True))
    assert len({tuple(batch.flatten().tolist()) for batch in inputs}) > 35, "every step has data of its own"


def test_seconds_add_up_over_sittings(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    run = RunFolder.create(config)
    with pytest.raises(Interrupted):
        sit(run, build(config), Recorder(at_step=stop_at(3)))
    sit(run, build(config), Recorder(), resume=True)
    seconds = [row["seconds"] for row in read_rows(run.metrics) if row["kind"] == "train"]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


@pytest.mark.parametrize("model", ["lstm", "fp_mamba_dplr"])
def test_two_equal_runs_are_identical_to_the_bit(tmp_path: Path, model: str) -> None:
    runs = [train_tiny(tmp_path, "model.dropout=0.2", model=model) for _ in range(2)]
    (first, first_tracker), (second, second_tracker) = runs
    assert without_time(first_tracker.rows) == without_time(second_tracker.rows)
    assert_same_weights(weights(first.model), weights(second.model))


def test_seeds_differ_in_weights_and_data(tmp_path: Path) -> None:
    losses = [train_tiny(tmp_path, f"seed={seed}")[1].of("train")[0]["loss"] for seed in (0, 1)]
    assert losses[0] != losses[1]


# Learning rate, validation, early stop


def rates(tmp_path: Path, *words: str) -> list[float]:
    _, tracker = train_tiny(tmp_path, "training.lr=1", "training.steps=6", "training.warmup_steps=2", *words)
    return [row["lr"] for row in tracker.of("train")]


def test_learning_rate_of_every_step(tmp_path: Path) -> None:
    assert rates(tmp_path, "training.lr_schedule=constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates(tmp_path, "training.lr_schedule=linear") == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    cosine = [(1 + math.cos(math.pi * part / 4)) / 2 for part in range(4)]
    assert rates(tmp_path, "training.lr_schedule=cosine") == pytest.approx([0.5, 1, *cosine])
    floor = rates(tmp_path, "training.lr_schedule=linear", "training.final_lr_fraction=0.2")
    assert floor == pytest.approx([0.5, 1, 1, 0.8, 0.6, 0.4])


@pytest.mark.parametrize(("steps", "expected"), [(10, [4, 8, 10]), (8, [4, 8]), (3, [3])])
def test_validation_at_every_multiple_and_at_the_end_once(tmp_path: Path, steps: int, expected: list[int]) -> None:
    _, tracker = train_tiny(tmp_path, f"training.steps={steps}", "training.evaluate_every=4")
    rows = tracker.of("validation")
    assert [row["step"] for row in rows] == expected
    assert {row["length"] for row in rows} == {4}
    assert {row["n"] for row in rows} == {8}


def test_rows_at_the_first_step_every_so_many_and_at_the_end(tmp_path: Path) -> None:
    _, tracker = train_tiny(tmp_path, "training.steps=8", "training.log_every=3")
    assert [row["step"] for row in tracker.of("train")] == [1, 3, 6, 8]


def test_rows_say_what_the_solvers_did(tmp_path: Path) -> None:
    words = ["training.steps=2", "model.layers=2", "solver.tolerance=1e-9", "solver.inner_max_iterations=7"]
    _, tracker = train_tiny(tmp_path, *words, model="fp_mamba_h")
    assert [row["kind"] for row in tracker.rows] == ["train", "train", "validation"]
    for row in tracker.rows:
        assert row["fraction_converged"] == 0
        assert row["iterations_mean"] == row["iterations_max"] == 7
        assert row["residual_max"] > 1e-9
        assert row["cap_hits"] == 2 * row["n"]
        assert [layer["cap_hits"] for layer in row["layers"]] == [row["n"]] * 2


GRADIENT_ROW = {"gradient_iterations_mean", "gradient_iterations_max", "gradient_residual_max"}


def test_rows_say_what_the_equations_of_the_backward_pass_took(tmp_path: Path) -> None:
    """In training alone, for all layers and each; the same in two micro-batches."""
    words = ["training.steps=2", "model.layers=2", "gradient=implicit", "gradient.tolerance=1e-4", "precision=float64"]
    _, tracker = train_tiny(tmp_path, *words, model="fp_mamba_h")
    _, halves = train_tiny(tmp_path, *words, "training.accumulation=2", model="fp_mamba_h")
    assert [row["kind"] for row in tracker.rows] == ["train", "train", "validation"]
    for row in tracker.of("train"):
        for part in (row, *row["layers"]):
            assert part.keys() >= GRADIENT_ROW
            assert 0 < part["gradient_iterations_mean"] <= part["gradient_iterations_max"] <= 50
            assert 0 < part["gradient_residual_max"] <= 1e-4
    for row in tracker.of("validation"):
        assert not any(GRADIENT_ROW & part.keys() for part in (row, *row["layers"]))
    for row, other in zip(tracker.of("train"), halves.of("train"), strict=True):
        assert other["gradient_iterations_mean"] == pytest.approx(row["gradient_iterations_mean"])
        assert other["gradient_iterations_max"] == row["gradient_iterations_max"]
        assert other["gradient_residual_max"] == pytest.approx(row["gradient_residual_max"], rel=1e-6)


@pytest.mark.parametrize("gradient", ["one_step", "unrolled"])
def test_no_other_gradient_has_such_numbers(tmp_path: Path, gradient: str) -> None:
    _, tracker = train_tiny(tmp_path, "training.steps=1", f"gradient={gradient}", model="fp_mamba_h")
    assert [row["kind"] for row in tracker.rows] == ["train", "validation"]
    assert not any(GRADIENT_ROW & row.keys() for row in tracker.rows)


def test_early_stop_when_asked(tmp_path: Path) -> None:
    words = ["training.steps=20", "training.evaluate_every=4"]
    trainer, _ = train_tiny(tmp_path, *words, "training.stop_at_accuracy=0")
    assert trainer.progress.step == 4
    trainer, _ = train_tiny(tmp_path, *words, "training.stop_at_accuracy=1")
    assert trainer.progress.step == 20
    trainer, _ = train_tiny(tmp_path, *words)
    assert trainer.progress.step == 20


def test_early_stop_is_remembered(tmp_path: Path) -> None:
    words = ["training.steps=20", "training.evaluate_every=4", "training.stop_at_accuracy=0"]
    trainer, _ = train_tiny(tmp_path, *words)
    again = sit(trainer.run, build(trainer.experiment.config), Recorder(), resume=True)
    assert again.progress.step == 4


def test_best_checkpoint_is_kept_beside_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.1, 0.9, 0.3, 0.9])
    real = loop.evaluate_length
    losses = iter([2.0, 1.0, 0.5, 1.0])  # looked at where accuracies are equal
    monkeypatch.setattr(
        loop,
        "evaluate_length",
        lambda *given: {**real(*given), "sequence_accuracy": next(accuracies), "loss": next(losses)},
    )
    words = ["training.steps=8", "training.evaluate_every=2", "training.checkpoint_every=3"]
    trainer, _ = train_tiny(tmp_path, *words, "training.keep_checkpoints=1")
    assert checkpoint.best_step(trainer.run.checkpoints) == 4
    kept = sorted(path.name for path in trainer.run.checkpoints.glob("step_*"))
    assert kept == ["step_00000004.safetensors", "step_00000008.safetensors"]


# CASES 31


class Unequal:
    """Eight rows of unequal length, padded on the right."""

    lengths_of_rows = (8, 1, 3, 5, 8, 2, 7, 4)

    def __init__(self, task: Any) -> None:
        self.lengths, self.vocabulary_size, self.mastered_by = task.lengths, task.vocabulary_size, task.mastered_by

    def sample(self, size: int, length: int, generator: torch.Generator) -> Batch:
        mask = torch.arange(8) < torch.tensor(self.lengths_of_rows)[:, None]
        inputs, targets = torch.randint(self.vocabulary_size, (2, 8, 8), generator=generator)
        return Batch(inputs, torch.where(mask, targets, IGNORE), mask)


def one_step(config: RunConfig) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the weights after one step and its row; the sitting ends before a validation, which the stub lacks."""
    experiment = build(config)
    tracker = Recorder(at_step=kill_at(1))
    with pytest.raises(Killed):
        sit(RunFolder.create(config), dataclasses.replace(experiment, task=Unequal(experiment.task)), tracker)
    return weights(experiment.model), tracker.rows[0]


@pytest.mark.parametrize("model", ["lstm", "fp_mamba_h"])
def test_accumulation_gives_the_same_weights(tmp_path: Path, model: str) -> None:
    words = ["training.steps=2", "training.batch_size=8", "precision=float64"]
    whole, row = one_step(tiny(tmp_path, *words, model=model))
    assert row["n"] == 8
    for parts in (4, 3):
        other, other_row = one_step(tiny(tmp_path, *words, f"training.accumulation={parts}", model=model))
        for name, expected in whole.items():
            assert expected.dtype == torch.float64
            assert (other[name] - expected).abs().max() < 1e-10, name
        assert other_row["n"] == 8
        assert other_row["loss"] == pytest.approx(row["loss"], rel=1e-12)
        assert other_row["token_accuracy"] == row["token_accuracy"]


# CASES 24 and 1: what is not finite


def nan_gradient_at(*steps: int) -> Callable[[Experiment], None]:
    """Return a change of the experiment: the loss stays finite, the gradient does not."""

    def change(experiment: Experiment) -> None:
        model, forward, step = experiment.model, experiment.model.forward, itertools.count()

        def spoiled(*inputs: Any) -> Any:
            output = forward(*inputs)
            if model.training and next(step) in steps:
                output.logits.register_hook(lambda gradient: gradient * NAN)
            return output

        model.forward = spoiled  # type: ignore[method-assign]

    return change


def test_nan_gradient_stops_the_run(tmp_path: Path, change_experiment: Change) -> None:
    change_experiment(nan_gradient_at(7))
    config = tiny(tmp_path, "training.steps=12", "training.checkpoint_every=5")
    tracker = Recorder()
    with pytest.raises(FpexpError, match=r"step 7: loss .*, gradient norm nan; training stopped") as caught:
        start_run(config, tracker)
    assert caught.value.exit_code == 1
    run = tracker.run
    status = run.status()
    assert status["state"] == "failed"
    assert "step 7" in status["reason"]
    assert "FpexpError" in (run.path / "traceback.txt").read_text()
    assert checkpoint.load_newest(run.checkpoints, []).state["step"] == 5
    assert_finite_on_disk(run)
    assert not run.curve.exists()


def test_nan_gradient_is_skipped_and_counted_when_asked(tmp_path: Path, change_experiment: Change) -> None:
    change_experiment(nan_gradient_at(7, 9))
    config = tiny(tmp_path, "training.steps=12", "training.checkpoint_every=1", "training.non_finite=skip")
    seen: dict[int, dict[str, torch.Tensor]] = {}
    tracker = Recorder()
    run = start_run(config, tracker)
    for step in (11, 12):
        path = run.checkpoints / f"step_{step:08d}.safetensors"
        seen[step] = dict(checkpoint.read(path).tensors)
    assert run.status()["state"] == "finished"
    assert run.status()["skipped"] == 2
    assert [row["skipped"] for row in tracker.of("train")] == [0] * 7 + [1, 1] + [2] * 3
    assert [row["grad_norm"] is None for row in read_rows(run.metrics) if row["kind"] == "train"] == [
        row["step"] in (8, 10) for row in tracker.of("train")
    ], "JSON has no NaN"
    assert_finite_on_disk(run)
    assert not torch.equal(seen[11]["model.head.weight"], seen[12]["model.head.weight"])


def test_a_skipped_step_changes_no_weight(tmp_path: Path) -> None:
    config = tiny(tmp_path, "training.steps=4", "training.non_finite=skip")
    experiment = build(config)
    nan_gradient_at(0, 1, 2, 3)(experiment)
    before = weights(experiment.model)
    sit(RunFolder.create(config), experiment, Recorder())
    assert_same_weights(weights(experiment.model), before)


def test_nothing_but_bad_steps_ends_the_run(tmp_path: Path, change_experiment: Change) -> None:
    change_experiment(nan_gradient_at(*range(2, 100)))
    config = tiny(tmp_path, "training.steps=60", "training.non_finite=skip")
    tracker = Recorder()
    with pytest.raises(FpexpError, match="steps in a row were not finite"):
        start_run(config, tracker)
    assert tracker.run.status()["state"] == "failed"
    assert len(tracker.of("train")) < 30


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    trainer, _ = train_tiny(tmp_path)
    before = sorted(path.name for path in trainer.run.checkpoints.iterdir())
    trainer.progress.step += 1
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = NAN
    with pytest.raises(FpexpError, match=r"head.weight is not finite and was not saved"):
        trainer.save()
    assert sorted(path.name for path in trainer.run.checkpoints.iterdir()) == before


@pytest.mark.parametrize("solver", ["sequential", "picard"])
def test_solve_that_becomes_nan_ends_the_run(tmp_path: Path, change_experiment: Change, solver: str) -> None:
    """CASES 1: from step 5 on the map gives NaN, with weights that are finite."""
    broken = False
    statuses: list[int] = []

    def change(experiment: Experiment) -> None:
        def spoil(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
            return output * NAN if broken else None

        def remember(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            statuses[:] = output.solves[0].status.tolist()

        experiment.model.layers[0].layer.in_projection.register_forward_hook(spoil)
        experiment.model.register_forward_hook(remember)

    def at_step(step: int) -> None:
        nonlocal broken
        broken = step >= 5

    change_experiment(change)
    config = tiny(tmp_path, "training.steps=9", "training.checkpoint_every=5", f"solver={solver}", model="fp_mamba_h")
    tracker = Recorder(at_step=at_step)
    with pytest.raises(FpexpError, match=r"step 5: loss nan") as caught:
        start_run(config, tracker)
    assert caught.value.exit_code == 1
    assert tracker.run.status()["state"] == "failed"
    assert statuses == [Status.NON_FINITE] * 4
    assert [row["step"] for row in tracker.of("train")] == [1, 2, 3, 4, 5]
    assert checkpoint.load_newest(tracker.run.checkpoints, []).state["step"] == 5
    assert_finite_on_disk(tracker.run)


def test_an_unforeseen_error_is_one_line_with_its_traceback_on_disk(tmp_path: Path, change_experiment: Change) -> None:
    def change(experiment: Experiment) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("the map\nis wrong")

        experiment.model.forward = fail  # type: ignore[method-assign]

    change_experiment(change)
    tracker = Recorder()
    with pytest.raises(FpexpError) as caught:
        start_run(tiny(tmp_path), tracker)
    run = tracker.run
    assert "\n" not in str(caught.value)
    assert f"run {run.id} failed: RuntimeError: the map" in str(caught.value)
    assert run.status()["state"] == "failed"
    assert "the map\nis wrong" in (run.path / "traceback.txt").read_text()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_out_of_memory_names_the_settings_to_lower(
    tmp_path: Path, change_experiment: Change, error: BaseException
) -> None:
    def change(experiment: Experiment) -> None:
        def fail(*_: Any) -> None:
            raise error

        experiment.model.forward = fail  # type: ignore[method-assign]

    change_experiment(change)
    with pytest.raises(FpexpError, match=r"out of memory on cpu; lower training.batch_size=4, raise .*accumulation=1"):
        start_run(tiny(tmp_path), Recorder())


def test_full_disk_under_the_metrics_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC from the rows, and from everything that is written after it."""
    tracker = Recorder()
    real = Path.write_text

    def write_text(path: Path, *arguments: Any, **more: Any) -> int:
        if tracker.rows:
            raise OSError(28, "No space left on device")
        return real(path, *arguments, **more)

    def full(row: dict[str, Any]) -> None:
        raise OSError(28, "No space left on device")

    tracker.at_row = full
    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(FpexpError, match=r"the disk of .* is full; free some space") as caught:
        start_run(tiny(tmp_path), tracker)
    assert "\n" not in str(caught.value)
    assert "traceback" not in str(caught.value), "it could not be written"
    assert tracker.run.status()["state"] != "finished"


# CASES 5


def test_passes_in_any_order_and_constant_memory(tmp_path: Path) -> None:
    words = ["training.steps=40", "training.batch_size=16", "model.d_model=32", "training.evaluate_every=5"]
    config = tiny(tmp_path, *words, "task.lengths.policy=fixed", "task.lengths.max=8", model="fp_mamba_h")
    experiment = build(config)
    model = experiment.model
    tokens = experiment.task.sample(4, 4, generator(0, "train")).inputs
    for _ in range(3):
        model(tokens, Cap(10)).logits.sum().backward()
    first, second = model(tokens, Cap(10)), model(tokens.flip(0), Cap(10))
    (first.logits.sum() + second.logits.square().sum()).backward()

    memory = {}

    def at_step(step: int) -> None:
        memory[step] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    sit(RunFolder.create(config), experiment, Recorder(at_step=at_step))
    assert memory[40] - memory[10] < 20e6  # a graph that is kept takes more than that in five steps


# CASES 37


@pytest.mark.parametrize("every", [5, 100], ids=["own checkpoint", "checkpoint of the best validation"])
def test_steps_stand_once_after_a_kill_between_checkpoints(tmp_path: Path, every: int) -> None:
    words = ["training.steps=12", f"training.checkpoint_every={every}", "training.evaluate_every=4"]
    config = tiny(tmp_path, *words)
    run = RunFolder.create(config)
    with pytest.raises(Killed):
        sit(run, build(config), Recorder(at_step=kill_at(8)))
    with open(run.metrics, "a") as handle:
        handle.write('{"kind": "train", "st')  # and the last line was cut short
    with pytest.raises(Killed):
        sit(run, build(config), Recorder(at_step=kill_at(9)), resume=True)
    resume_run(run, config, Recorder())
    assert_steps_stand_once(run)
    assert [row["step"] for row in read_rows(run.metrics) if row["kind"] == "train"] == list(range(1, 13))
    assert [row["step"] for row in read_rows(run.metrics) if row["kind"] == "validation"] == [4, 8, 12]
    assert [row["length"] for row in read_rows(run.curve)] == [2, 4]
    assert all(json.loads(line) for line in run.metrics.read_text().splitlines())


def test_steps_stand_once_after_a_kill_before_the_first_checkpoint(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    run = RunFolder.create(config)
    with pytest.raises(Killed):
        sit(run, build(config), Recorder(at_step=kill_at(3)))
    assert not list(run.checkpoints.iterdir())
    resume_run(run, config, Recorder())
    assert_steps_stand_once(run)
    assert run.status()["state"] == "finished"


def test_steps_stand_once_after_a_signal_in_a_validation_and_a_kill(tmp_path: Path) -> None:
    """The checkpoint of an interrupted validation has its step, but not yet its row."""
    config = tiny(tmp_path, "training.steps=12", "training.evaluate_every=4", "evaluation.batch_size=4")
    run = RunFolder.create(config)

    def interrupt_second_validation(experiment: Experiment) -> Experiment:
        task = experiment.task
        validations = itertools.count()

        def sample(size: int, length: int, source: torch.Generator) -> Batch:
            if not experiment.model.training and next(validations) == 2:
                signal.raise_signal(signal.SIGTERM)
            return type(task).sample(task, size, length, source)

        task.sample = sample  # type: ignore[method-assign]
        return experiment

    with pytest.raises(Interrupted):
        sit(run, interrupt_second_validation(build(config)), Recorder())
    saved = checkpoint.load_newest(run.checkpoints, [])
    assert (saved.state["step"], saved.state["progress"]["validated_at"]) == (8, 4)
    with pytest.raises(Killed):
        sit(run, build(config), Recorder(at_step=kill_at(10)), resume=True)
    resume_run(run, config, Recorder())
    assert_steps_stand_once(run)


# Interruption, resume and status in this process


def test_first_signal_is_remembered_and_the_second_has_its_usual_effect() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted) as caught:
            interruption.check()
        assert caught.value.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_at_once_and_says_interrupted(tmp_path: Path) -> None:
    def twice(step: int) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    tracker = Recorder(at_step=twice)
    with pytest.raises(KeyboardInterrupt):
        start_run(tiny(tmp_path, "training.checkpoint_every=2"), tracker)
    assert tracker.run.status()["state"] == "interrupted"
    resume_run(tracker.run, tracker.run.config(), Recorder())
    assert tracker.run.status()["state"] == "finished"
    assert_steps_stand_once(tracker.run)


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    run = start_run(tiny(tmp_path), Recorder())
    assert run.status()["state"] == "finished"
    assert run.status()["step"] == 6
    with pytest.raises(UserError, match=f"run '{run.id}' is finished"):
        resume_run(run, run.config(), Recorder())
    assert run.status()["state"] == "finished"


def test_a_killed_run_is_lost_not_running(tmp_path: Path) -> None:
    run = RunFolder.create(tiny(tmp_path))
    with run.lock():
        run.write_status("running")
        assert run.status()["state"] == "running"
    assert run.status()["state"] == "lost"


def test_resume_tells_of_the_broken_checkpoint_it_went_past(tmp_path: Path) -> None:
    config = tiny(tmp_path, "training.steps=12", "training.checkpoint_every=3")
    run = RunFolder.create(config)
    with pytest.raises(Interrupted):
        sit(run, build(config), Recorder(at_step=stop_at(7)))
    newest = run.checkpoints / "step_00000007.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    notes: list[str] = []

    class Notes(Recorder):
        def start(self, start: Any) -> None:
            notes.extend(start.notes)
            assert start.resumed_from == 6
            super().start(start)

    resume_run(run, config, Notes())
    assert any(newest.name in note and "going back to the one before" in note for note in notes)
    assert_steps_stand_once(run)
    assert run.status()["state"] == "finished"


# CASES 29, by real processes

SIGNALLED = """
import json, os, signal, sys, time
from pathlib import Path
sys.path.insert(0, os.getcwd())
import torch
import torch._dynamo, fpexp.run  # before the forks, which share them
from fpexp.cli import main

for name, slow_from, signum in json.loads(sys.argv[1]):
    os.mkdir(name)
    child = os.fork()
    if child == 0:
        os.chdir(name)
        os.environ["SLOW_FROM"] = str(slow_from)
        for number, path in ((1, "out"), (2, "err")):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        code = main(["train", "config=../run.json"])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + 60
    while not Path(name, "reached").exists() and time.monotonic() < end:
        time.sleep(0.01)
    os.kill(child, signum)
    Path(name, "code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""

SLOW_MODEL = """
import os, time
from pathlib import Path
from fpexp.models import LanguageModel, lstm
from fpexp.ranges import Count, Probability

def slow(vocabulary_size: int, *, d_model: Count, layers: Count, expand: Count, dropout: Probability) -> LanguageModel:
    model = lstm(vocabulary_size, d_model=d_model, layers=layers, expand=expand, dropout=dropout)
    forward, calls = model.forward, 0

    def slower(*inputs):
        nonlocal calls
        calls += 1
        if calls >= int(os.environ.get("SLOW_FROM", 10**9)):
            Path("reached").touch()
            time.sleep(0.1)
        return forward(*inputs)

    model.forward = slower
    return model
"""

# Forward passes: 6 of training, 10 of the validation after them, 10 of the curve.
PHASES = {
    "training": (3, signal.SIGTERM),
    "ctrl-c": (3, signal.SIGINT),
    "validation": (8, signal.SIGTERM),
    "curve": (18, signal.SIGTERM),
}


@pytest.fixture(scope="module")
def signalled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a folder for each of PHASES, in which a run was sent its signal."""
    folder = tmp_path_factory.mktemp("signalled")
    (folder / "slow.py").write_text(SLOW_MODEL)
    config = tiny(Path("results"), "evaluation.samples=80", "evaluation.validation_samples=80").to_dict()
    config["model"]["_target_"] = "slow.slow"
    (folder / "run.json").write_text(json.dumps(config))
    phases = json.dumps([(name, calls, signum) for name, (calls, signum) in PHASES.items()])
    answer = run_python(SIGNALLED.replace("sys.argv[1]", repr(phases)), folder)
    assert answer.code == 0, answer.err
    return folder


@pytest.mark.parametrize("phase", PHASES)
def test_signal_saves_ends_with_its_code_and_can_be_resumed(
    signalled: Path, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(signalled / phase)
    monkeypatch.syspath_prepend(signalled)
    (run,) = (RunFolder(path) for path in Path("results/runs").iterdir())
    signum = PHASES[phase][1]
    assert Path("code").read_text() == str(128 + signum)
    (line,) = Path("err").read_text().splitlines()
    assert line == (f"fpexp: interrupted by {signum.name}; the state is saved, go on with: fpexp train resume={run.id}")
    status = run.status()
    assert status["state"] == "interrupted"
    assert status["resume"] == f"fpexp train resume={run.id}"
    saved = checkpoint.load_newest(run.checkpoints, [])
    assert saved.state["step"] == (6 if phase in ("validation", "curve") else pytest.approx(3, abs=2))
    assert saved.state["progress"]["validated_at"] == (6 if phase == "curve" else -1)
    assert not list(run.checkpoints.glob(".*"))

    resume_run(run, run.config(), Recorder())
    assert run.status()["state"] == "finished"
    assert_steps_stand_once(run)
    assert [row["step"] for row in read_rows(run.metrics) if row["kind"] == "train"] == list(range(1, 7))
    assert [(row["length"], row["n"]) for row in read_rows(run.curve)] == [(2, 80), (4, 80)]
    assert (run.path / "curve.png").read_bytes().startswith(b"\x89PNG")
