"""Copying through the whole way: string accuracy of packed rows, and answers that are written (CASES 18-21, 31)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Killed, Recorder, kill_at, sit, tiny, weights
from torch import Tensor

from fpexp.build import Experiment, build
from fpexp.config.run import RunConfig
from fpexp.evaluation.generation import measure_generation
from fpexp.evaluation.length_curve import evaluate_length, length_curve
from fpexp.evaluation.metrics import Accuracy
from fpexp.models import DecodingState, LanguageModel, ModelOutput
from fpexp.randomness import generator
from fpexp.run import start_run
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import IGNORE, Batch, Copy

PACKINGS = ["true", "false"]


def experiment_of(tmp_path: Path, *words: str, model: str = "lstm") -> Experiment:
    config = tiny(tmp_path, "task.context=40", "task.generated_samples=7", *words, task="copy", model=model)
    return build(config)


def accuracies(predictions: Tensor, batch: Batch) -> dict[str, Any]:
    accuracy = Accuracy()
    accuracy.add_predictions(predictions, batch.targets, batch.examples)
    return accuracy.summary()


def by_a_loop(task: Copy, predictions: Tensor, batch: Batch) -> dict[str, Any]:
    """The same by reading each row's text: an answer is what stands after `|`, up to and with `.`."""
    letters = letters_right = strings = strings_right = 0
    for tokens, predicted in zip(batch.inputs, predictions.tolist(), strict=True):
        text, guess = task.write(tokens), None
        for position, symbol in enumerate(text):
            if symbol == "|":
                guess = True
            if symbol in "._":
                guess = None
            if guess is None:
                continue
            right = task.symbols[predicted[position]] == text[position + 1]
            guess = guess and right
            letters, letters_right = letters + 1, letters_right + right
            if text[position + 1] == ".":
                strings, strings_right = strings + 1, strings_right + guess
    return {
        "token_accuracy": letters_right / letters,
        "sequence_accuracy": strings_right / strings,
        "n": strings,
    }


@pytest.mark.parametrize("packing", PACKINGS)
def test_string_accuracy_is_that_of_a_plain_loop(tmp_path: Path, packing: str) -> None:
    task: Any = experiment_of(tmp_path, f"task.packing={packing}").task
    source = generator(0, "test")
    batch, lengths = task.sample_mixed(40, 6, source)
    right = torch.where(batch.targets == IGNORE, 0, batch.targets)
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        guesses = torch.randint(task.vocabulary_size, right.shape, generator=source)
        predictions = torch.where(torch.rand(right.shape, generator=source) < share, right, guesses)
        summary = accuracies(predictions, batch)
        expected = by_a_loop(task, predictions, batch)
        assert {name: summary[name] for name in expected} == pytest.approx(expected, abs=1e-12)
        assert summary["n"] == len(lengths)
    assert summary["sequence_accuracy"] == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_right_only_where_nothing_is_scored(tmp_path: Path, packing: str) -> None:
    """CASES 19: at `$`, the letters that are read, `.` and the padding."""
    task: Any = experiment_of(tmp_path, f"task.packing={packing}").task
    batch, _ = task.sample_mixed(20, 6, generator(0, "test"))
    scored = batch.targets != IGNORE
    following = batch.inputs.roll(-1, dims=1)
    summary = accuracies(torch.where(scored, task.pad_token, following), batch)
    assert summary["token_accuracy"] == summary["sequence_accuracy"] == summary["last_token_accuracy"] == 0
    summary = accuracies(torch.where(scored, following, task.pad_token), batch)
    assert summary["token_accuracy"] == summary["sequence_accuracy"] == summary["last_token_accuracy"] == 1


def test_one_wrong_letter_spoils_its_own_string_only(tmp_path: Path) -> None:
    """CASES 20, in a row of four examples."""
    task: Any = experiment_of(tmp_path, "task.packing=true").task
    batch = task.sample(1, 3, generator(0, "test"))
    predictions = batch.targets.clone()
    place = int((batch.examples[0] == 2).nonzero()[0]) + 5  # the second letter of the third answer
    predictions[0, place] = task.pad_token
    summary = accuracies(predictions, batch)
    assert (summary["n"], summary["sequence_accuracy"]) == (4, 0.75)
    assert summary["token_accuracy"] == 15 / 16
    assert summary["last_token_accuracy"] == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_evaluation_batch_size_changes_nothing(tmp_path: Path, packing: str) -> None:
    """CASES 21: 37 rows of mixed length."""
    rows = []
    for size in (1, 8, 37):
        experiment = experiment_of(tmp_path, f"task.packing={packing}", f"evaluation.batch_size={size}")
        batch, _ = experiment.task.sample_mixed(37, 8, generator(0, "test"))  # type: ignore[attr-defined]
        accuracy = Accuracy()
        experiment.model.eval()
        for part in batch.chunk(-(-37 // size)):
            with torch.no_grad():
                output = experiment.model(part.inputs, experiment.schedule.evaluation_cap(), part.mask)
            accuracy.add(output.logits, part.targets, part.examples)
        rows.append(accuracy.summary())
    assert rows[1] == pytest.approx(rows[0], abs=1e-5)
    assert rows[2] == pytest.approx(rows[0], abs=1e-5)


# Writing


class Copier(LanguageModel):
    """Knows the task, from what it has read since the last `$`; `change` of (letters, place) may tell it otherwise."""

    def __init__(
        self, task: Copy, change: Callable[[list[int], int], int | None] = lambda letters, place: None
    ) -> None:
        super(LanguageModel, self).__init__()
        self.task, self.change = task, change
        self.shapes: list[tuple[int, int]] = []

    def next_token(self, read: list[int]) -> int:
        begin = max((i for i, token in enumerate(read) if token == self.task.begin_token), default=-1)
        example = read[begin + 1 :]
        if self.task.copy_token not in example:
            return self.task.pad_token
        middle = example.index(self.task.copy_token)
        letters, place = example[:middle], len(example) - middle - 1
        changed = self.change(letters, place)
        right = letters[place] if place < len(letters) else self.task.stop_token
        return right if changed is None else changed

    def answer(self, tokens: Tensor, before: Tensor) -> ModelOutput:
        whole = torch.cat([before, tokens], dim=1).tolist()
        first = before.shape[1]
        predictions = [[self.next_token(row[: i + 1]) for i in range(first, len(row))] for row in whole]
        return ModelOutput(
            torch.nn.functional.one_hot(torch.tensor(predictions), self.task.vocabulary_size).float(), ()
        )

    def forward(self, tokens: Tensor, *_: Any) -> ModelOutput:
        return self.answer(tokens, tokens[:, :0])

    def decode(self, tokens: Tensor, state: DecodingState | None = None) -> tuple[ModelOutput, DecodingState]:
        if state is None:
            self.shapes.append((tokens.shape[0], tokens.shape[1]))
        before = tokens[:, :0] if state is None else state.layers[0]
        return self.answer(tokens, before), DecodingState(0, (torch.cat([before, tokens], dim=1),))


def with_copier(experiment: Experiment, *change: Callable[[list[int], int], int | None]) -> Experiment:
    task: Any = experiment.task
    return dataclasses.replace(experiment, model=Copier(task, *change))


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_is_always_right_is_right_both_ways(tmp_path: Path, packing: str) -> None:
    experiment = with_copier(experiment_of(tmp_path, f"task.packing={packing}"))
    task: Any = experiment.task
    for length in (1, 5):
        forced = evaluate_length(experiment, length, 6, "test")
        written = measure_generation(experiment, task, length)
        assert forced["token_accuracy"] == forced["sequence_accuracy"] == 1
        assert written == {"generated_token_accuracy": 1, "generated_sequence_accuracy": 1, "generated_n": 7}


def test_a_stop_too_early_or_too_late_is_wrong(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path)
    task: Any = experiment.task

    def early(letters: list[int], place: int) -> int | None:
        return task.stop_token if place == len(letters) - 1 else None

    def late(letters: list[int], place: int) -> int | None:
        return letters[0] if place == len(letters) else None

    for change in (early, late):
        row = measure_generation(with_copier(experiment, change), task, 4)
        assert row["generated_sequence_accuracy"] == 0
        assert row["generated_token_accuracy"] < 1
    assert measure_generation(with_copier(experiment, late), task, 4)["generated_token_accuracy"] == 0.8
    # Nothing is written after the stop, so that neither the last letter nor the `.` is right.
    assert measure_generation(with_copier(experiment, early), task, 4)["generated_token_accuracy"] == 0.6


@pytest.mark.parametrize("size", [1, 3, 40])
def test_who_has_stopped_is_wrong_while_others_write_on(tmp_path: Path, size: int) -> None:
    """The same numbers, whatever batch an early stop is in."""
    words = ["task.generated_samples=40", f"evaluation.batch_size={size}", "task.alphabet=2"]
    experiment = experiment_of(tmp_path, *words)
    task: Any = experiment.task

    def early(letters: list[int], place: int) -> int | None:
        return task.stop_token if place == 1 and letters[0] == 0 else None

    row = measure_generation(with_copier(experiment, early), task, 4)
    right = row["generated_sequence_accuracy"]
    assert 0.2 < right < 0.8
    assert row["generated_token_accuracy"] == pytest.approx(right + (1 - right) / 5)


def test_a_first_mistake_that_goes_on_shows_in_what_is_written(tmp_path: Path) -> None:
    """A model that repeats the letter before: when it writes by itself, its first mistake goes on to the end."""
    experiment = experiment_of(tmp_path)
    task: Any = experiment.task

    class Stuck(Copier):
        def next_token(self, read: list[int]) -> int:
            return read[-1] if read[-1] < self.task.alphabet else super().next_token(read)

    stuck = dataclasses.replace(experiment, model=Stuck(task))
    forced, written = evaluate_length(stuck, 6, 40, "test"), measure_generation(stuck, task, 6)
    assert forced["sequence_accuracy"] == written["generated_sequence_accuracy"] == 0
    assert written["generated_token_accuracy"] < 0.4


def test_a_batch_of_prompts_has_one_length_and_the_evaluations_size(tmp_path: Path) -> None:
    words = ["task.generated_samples=10", "evaluation.batch_size=4", "evaluation.lengths=[3,5]"]
    experiment = with_copier(experiment_of(tmp_path, *words))
    list(length_curve(experiment, [3, 5], 4, {}))
    model: Any = experiment.model
    assert model.shapes == [(4, 5), (4, 5), (2, 5), (4, 7), (4, 7), (2, 7)]


def test_none_are_written_where_none_are_asked_for(tmp_path: Path) -> None:
    experiment = experiment_of(tmp_path, "task.generated_samples=0")
    (row,) = length_curve(experiment, [3], 4, {})
    assert not [name for name in row if name.startswith("generated")]


@pytest.mark.parametrize("model", ["lstm", "fp_mamba_h"])
@pytest.mark.parametrize("packing", PACKINGS)
def test_a_run_has_both_accuracies_by_length(tmp_path: Path, packing: str, model: str) -> None:
    words = [f"task.packing={packing}", "task.context=40", "task.generated_samples=5"]
    run = start_run(tiny(tmp_path, *words, task="copy", model=model), Recorder())
    rows = read_rows(run.curve)
    assert [row["length"] for row in rows] == [2, 4]
    for row in rows:
        assert row["decoding"] == "teacher-forced"
        assert row["generated_n"] == 5
        assert row["n"] == 8 * (40 // (2 * row["length"] + 3) if packing == "true" else 1)
        assert 0 <= row["generated_sequence_accuracy"] <= row["generated_token_accuracy"] <= 1
    assert [row["seen_in_training"] for row in rows] == [False, rows[1]["expected_overlap"] > 0]  # from 3 on


# Padding and accumulation


@pytest.mark.parametrize(
    ("packing", "model"),
    [("true", "lstm"), ("true", "mamba"), ("true", "transformer"), ("true", "fp_mamba_h"), ("false", "fp_mamba_h")],
)
def test_a_row_alone_and_padded_in_a_batch(tmp_path: Path, packing: str, model: str) -> None:
    """CASES 18."""
    words = [f"task.packing={packing}", "precision=float64", "device=cpu"]
    experiment = experiment_of(tmp_path, *words, model=model)
    experiment.model.eval()
    batch, _ = experiment.task.sample_mixed(5, 7, generator(0, "test"))  # type: ignore[attr-defined]
    assert batch.mask is not None
    cap = experiment.schedule.evaluation_cap()
    with torch.no_grad():
        together = experiment.model(batch.inputs, cap, batch.mask).logits
        for row in range(5):
            real = int(batch.mask[row].sum())
            alone = experiment.model(batch.inputs[row : row + 1, :real], cap).logits
            assert (together[row, :real] - alone[0]).abs().max() < 1e-10


def after_one_step(config: RunConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    experiment = build(config)
    tracker = Recorder(at_step=kill_at(1))
    with pytest.raises(Killed):
        sit(RunFolder.create(config), experiment, tracker)
    return weights(experiment.model), tracker.rows[0]


@pytest.mark.parametrize(("packing", "model"), [("true", "lstm"), ("true", "fp_mamba_h"), ("false", "lstm")])
def test_accumulation_gives_the_same_weights(tmp_path: Path, packing: str, model: str) -> None:
    """CASES 31: eight rows at once, as 4 x 2 and as 3 + 3 + 2."""
    words = [f"task.packing={packing}", "task.context=40", "task.lengths.policy=fixed", "task.lengths.max=8"]
    words += ["training.steps=2", "training.batch_size=8", "precision=float64"]
    whole, row = after_one_step(tiny(tmp_path, *words, task="copy", model=model))
    assert row["n"] == 8 if packing == "false" else row["n"] > 8
    for parts in (4, 3):
        accumulated = tiny(tmp_path, *words, f"training.accumulation={parts}", task="copy", model=model)
        other, other_row = after_one_step(accumulated)
        for name, expected in whole.items():
            assert (other[name] - expected).abs().max() < 1e-10, name
        for name in ("n", "token_accuracy", "sequence_accuracy", "last_token_accuracy"):
            assert other_row[name] == row[name]
        assert other_row["loss"] == pytest.approx(row["loss"], rel=1e-12)
