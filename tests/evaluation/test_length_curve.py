"""The length curve: one pass or each length by itself, what a row says, and rows that stay when it is interrupted."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Recorder, sit, tiny
from torch import Tensor

from fpexp.build import Experiment, build
from fpexp.errors import Interrupted
from fpexp.evaluation.length_curve import evaluate_length, length_curve
from fpexp.evaluation.metrics import Accuracy, LayerStatistics
from fpexp.models import ModelOutput
from fpexp.models.fp_mamba_problem import FPMambaProblem
from fpexp.randomness import generator
from fpexp.run import resume_run, start_run
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import IGNORE
from fpexp.training.interruption import Interruption


def experiment_of(tmp_path: Path, *words: str, model: str = "lstm") -> Experiment:
    return build(tiny(tmp_path, *words, model=model))


def curve(experiment: Experiment, lengths: list[int], drawn: dict[int, int] | None = None) -> list[dict[str, Any]]:
    return list(length_curve(experiment, lengths, experiment.config.evaluation.samples, drawn or {}))


def shapes_of_forwards(experiment: Experiment) -> list[tuple[int, int]]:
    """Return a list that gets the (B, T) of every forward pass from now on."""
    shapes: list[tuple[int, int]] = []
    experiment.model.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    return shapes


def answer(experiment: Experiment, respond: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the model predict `respond(tokens)`."""

    def forward(tokens: torch.Tensor, *_: Any) -> ModelOutput:
        size = experiment.task.vocabulary_size
        return ModelOutput(torch.nn.functional.one_hot(respond(tokens), size).float())

    experiment.model.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize("bos", ["false", "true"])
@pytest.mark.parametrize("model", ["lstm", "fp_mamba_h", "fp_mamba_k"])
def test_rows_of_one_pass_are_those_of_the_prefixes_alone(tmp_path: Path, model: str, bos: str) -> None:
    """The same samples, cut at each length and solved again: accuracies, counts, residuals."""
    words = [f"task.bos={bos}", "evaluation.samples=11", "evaluation.batch_size=4", "solver=sequential"]
    experiment = experiment_of(tmp_path, *words, "solver.tolerance=1e-2", model=model)
    shapes = shapes_of_forwards(experiment)
    lengths = [1, 3, 4, 9]
    rows = curve(experiment, lengths)
    longest = experiment.task.input_length(9)
    assert shapes == [(4, longest), (4, longest), (3, longest)]

    source = generator(experiment.config.seed, "test", 0)
    batches = [experiment.task.sample(size, 9, source) for size in (4, 4, 3)]
    experiment.model.eval()
    for length, row in zip(lengths, rows, strict=True):
        tokens = experiment.task.input_length(length)
        accuracy, statistics = Accuracy(), LayerStatistics()
        for batch in batches:
            with torch.no_grad():
                output = experiment.model(batch.inputs[:, :tokens], experiment.schedule.evaluation_cap())
            accuracy.add(output.logits, batch.targets[:, :tokens])
            statistics.add(output.solves)
        expected = {**accuracy.summary(), **statistics.summary()}
        expected_layers = expected.pop("layers", [])
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-4)
        for layer, expected_layer in zip(row.get("layers", []), expected_layers, strict=True):
            assert layer == pytest.approx(expected_layer, rel=1e-4)
        assert row["n"] == 11
    if model != "lstm":
        counts = [row["iterations_mean"] for row in rows]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]


def test_picard_runs_each_length_by_itself(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "solver=picard", "evaluation.samples=6", model="fp_mamba_h")
    shapes = shapes_of_forwards(experiment)
    rows = curve(experiment, [5, 2, 3])
    assert shapes == [(6, 2), (6, 3), (6, 5)]
    assert [row["length"] for row in rows] == [2, 3, 5]
    for row in rows:
        alone = evaluate_length(experiment, row["length"], 6, "test", index=row["length"])
        assert {name: row[name] for name in alone} == alone


def test_both_ends_are_there_and_say_what_they_are(tmp_path: Path) -> None:
    """CASES 23."""
    experiment = experiment_of(tmp_path, "evaluation.samples=10")
    rows = curve(experiment, [20, 10, 20], {10: 300})
    assert [row["length"] for row in rows] == [10, 20]
    assert [row["n"] for row in rows] == [10, 10]
    assert [row["decoding"] for row in rows] == ["tagging", "tagging"]
    assert [row["seen_in_training"] for row in rows] == [True, False]
    assert rows[0]["expected_overlap"] == pytest.approx(300 / 12**10, rel=1e-6)
    assert rows[1]["expected_overlap"] == 0
    names = {"length", "token_accuracy", "last_token_accuracy", "sequence_accuracy", "n", "loss"}
    assert names <= rows[0].keys()
    assert "iterations_mean" not in rows[0]


def test_iterations_stand_in_the_rows_of_a_model_that_solves(tmp_path: Path) -> None:
    (row,) = curve(experiment_of(tmp_path, model="fp_mamba_dplr"), [4])
    assert {"iterations_mean", "iterations_max", "fraction_converged", "cap_hits"} <= row.keys()
    assert 1 <= row["iterations_mean"] <= row["iterations_max"]


def test_bos_is_never_scored(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "task.bos=true")
    group, bos = experiment.task.group, experiment.task.group.order
    answer(experiment, lambda tokens: torch.full_like(tokens, bos))
    assert [row["token_accuracy"] for row in curve(experiment, [1, 4])] == [0, 0]

    def wrong_at_bos(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.zeros_like(tokens[:, :1]), group.running_products(tokens[:, 1:])], dim=1)

    answer(experiment, wrong_at_bos)
    for row in curve(experiment, [1, 4]):
        assert row["token_accuracy"] == row["last_token_accuracy"] == row["sequence_accuracy"] == 1


def test_last_token_is_the_last_of_the_prefix(tmp_path: Path) -> None:
    """A model that is right up to the third token: each length has its own last token."""
    experiment = experiment_of(tmp_path, "evaluation.samples=32")
    group = experiment.task.group

    def right_to_three(tokens: torch.Tensor) -> torch.Tensor:
        products = group.running_products(tokens)
        return torch.cat([products[:, :3], (products[:, 3:] + 1) % 12], dim=1)

    answer(experiment, right_to_three)
    rows = {row["length"]: row for row in curve(experiment, [2, 3, 4, 6])}
    assert [rows[n]["last_token_accuracy"] for n in (2, 3, 4, 6)] == [1, 1, 0, 0]
    assert [rows[n]["token_accuracy"] for n in (2, 3, 4, 6)] == [1, 1, 0.75, 0.5]
    assert [rows[n]["sequence_accuracy"] for n in (2, 3, 4, 6)] == [1, 1, 0, 0]


@pytest.mark.parametrize("solver", ["sequential", "picard"])
def test_evaluation_batch_size_changes_nothing(tmp_path: Path, solver: str) -> None:
    """CASES 21 through the whole way; each sequence stops by itself in evaluation."""
    rows = []
    for size in (1, 8, 37):
        words = [f"evaluation.batch_size={size}", "evaluation.samples=37", f"solver={solver}", "model.dropout=0.5"]
        words.append("schedule.evaluation_max_iterations=20")
        rows.append(curve(experiment_of(tmp_path, *words, model="fp_mamba_h"), [2, 5]))
    for other in rows[1:]:
        for a, b in zip(rows[0], other, strict=True):
            numbers = [n for n in a if n not in ("layers", "decoding")]
            assert {n: b[n] for n in numbers} == pytest.approx({n: a[n] for n in numbers}, rel=1e-5, abs=1e-6)


def test_evaluation_has_its_own_cap(tmp_path: Path) -> None:
    words = [
        "solver=picard",
        "solver.tolerance=1e-12",
        "schedule.max_iterations=2",
        "schedule.evaluation_max_iterations=5",
    ]
    (row,) = curve(experiment_of(tmp_path, *words, model="fp_mamba_h"), [4])
    assert row["iterations_mean"] == row["iterations_max"] == 5
    assert row["cap_hits"] == row["n"]
    assert row["fraction_converged"] == 0


def test_measuring_leaves_no_trace(tmp_path: Path) -> None:
    """Training mode, the global generator and the weights are as before, with dropout in the model."""
    experiment = experiment_of(tmp_path, "model.dropout=0.5")
    experiment.model.train()
    before = torch.get_rng_state()
    first = curve(experiment, [2, 4])
    assert experiment.model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert curve(experiment, [2, 4]) == first
    assert all(parameter.grad is None for parameter in experiment.model.parameters())


def test_validation_and_test_are_other_samples(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "evaluation.samples=64")
    rows = [evaluate_length(experiment, 4, 64, split)["loss"] for split in ("validation", "test")]
    assert rows[0] != rows[1]


def test_no_position_is_scored_past_its_length(tmp_path: Path) -> None:
    """A model that is right nowhere but after length 2 has nothing at length 2."""
    experiment = experiment_of(tmp_path)
    group = experiment.task.group

    def right_after_two(tokens: torch.Tensor) -> torch.Tensor:
        products = group.running_products(tokens)
        return torch.cat([(products[:, :2] + 1) % 12, products[:, 2:]], dim=1)

    answer(experiment, right_after_two)
    assert [row["token_accuracy"] for row in curve(experiment, [2, 4])] == [0, 0.5]
    assert IGNORE not in experiment.task.sample(2, 4, generator(0, "test")).targets


# Streaming


def test_rows_come_one_by_one_where_each_length_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends a length in the middle of a batch, keeps the rows before it and leaves the model as it was."""
    experiment = experiment_of(tmp_path, "solver=picard", "evaluation.batch_size=4", model="fp_mamba_h")
    evaluate = FPMambaProblem.evaluate

    def evaluate_and_stop(problem: FPMambaProblem, y: Tensor) -> Tensor:
        if problem.length == 4:
            signal.raise_signal(signal.SIGTERM)
        return evaluate(problem, y)

    monkeypatch.setattr(FPMambaProblem, "evaluate", evaluate_and_stop)
    with Interruption() as interruption:
        rows = interruption.between(length_curve(experiment, [2, 3, 4], 8, {}))
        assert [next(rows)["length"], next(rows)["length"]] == [2, 3]
        with pytest.raises(Interrupted):
            next(rows)
    assert experiment.model.training


def test_a_signal_between_the_rows_waits_for_what_is_done_with_them() -> None:
    with Interruption() as interruption:
        rows = interruption.between(iter([1, 2]))
        assert next(rows) == 1
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            next(rows)


def test_interrupted_curve_keeps_its_rows_and_measures_the_missing_ones(tmp_path: Path) -> None:
    config = tiny(tmp_path, "solver=picard", "evaluation.lengths=[2,3,5]", model="fp_mamba_h")
    whole = start_run(config, Recorder())

    def stop(row: dict[str, Any]) -> None:
        if row["kind"] == "curve" and row["length"] == 3:
            signal.raise_signal(signal.SIGTERM)

    tracker = Recorder(at_row=stop)
    with pytest.raises(Interrupted):
        start_run(config, tracker)
    run = tracker.run
    assert run.status()["state"] == "interrupted"
    assert [row["length"] for row in read_rows(run.curve)] == [2, 3]
    assert not (run.path / "curve.png").exists()

    measured = Recorder()
    resume_run(run, config, measured)
    assert [row["length"] for row in measured.of("curve")] == [5]
    assert read_rows(run.curve) == read_rows(whole.curve)
    assert run.status()["state"] == "finished"
    assert (run.path / "curve.png").exists()


def test_curve_counts_what_training_drew(tmp_path: Path) -> None:
    """Growing from 2, never above 2: only length 2 was seen."""
    run = start_run(tiny(tmp_path, "task.lengths.mastery=1"), Recorder())
    assert [row["seen_in_training"] for row in read_rows(run.curve)] == [True, False]
    assert read_rows(run.curve)[0]["expected_overlap"] > 0


def test_seen_lengths_survive_a_resume(tmp_path: Path) -> None:
    config = tiny(tmp_path, "training.checkpoint_every=3", "task.lengths.mastery=0")
    run = RunFolder.create(config)
    trainer = sit(run, build(config), Recorder())
    again = sit(run, build(config), Recorder(), resume=True)
    assert again.batches.lengths.drawn == trainer.batches.lengths.drawn == {2: 4, 3: 4, 4: 16}


def test_evaluation_settings_are_the_configs(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "evaluation.samples=5", "evaluation.batch_size=2")
    shapes = shapes_of_forwards(experiment)
    curve(experiment, [3])
    assert shapes == [(2, 3), (2, 3), (1, 3)]
    more = dataclasses.replace(experiment.config.evaluation, batch_size=5)
    shapes.clear()
    curve(dataclasses.replace(experiment, config=experiment.config.replace(evaluation=more)), [3])
    assert shapes == [(5, 3)]
