"""Accuracy against length: the curve of a run, and the validation during training.

Several processes evaluate a share of every batch each, and all have the numbers of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fpexp.build import Experiment
from fpexp.evaluation.generation import measure_generation
from fpexp.evaluation.metrics import Accuracy, LayerStatistics, TextStatistics, scaled_accuracy
from fpexp.machine import autocast
from fpexp.models import ModelOutput
from fpexp.randomness import generator
from fpexp.tasks import Answered, Batch, HeldOut, Task
from fpexp.world import ALONE, World


def nothing() -> None:
    """What is done between batches where nobody asks for more."""


@torch.no_grad()
def evaluate_length(
    experiment: Experiment,
    length: int,
    samples: int,
    split: str,
    index: int = 0,
    world: World = ALONE,
    between_batches: Callable[[], None] = nothing,
) -> dict[str, Any]:
    """Return the accuracies and solver statistics over `samples` fresh sequences of one length."""
    task, accuracy, statistics = experiment.task, Accuracy(), LayerStatistics()
    text = TextStatistics.of(task.vocabulary_size) if isinstance(task, HeldOut) else None
    for batch, output in _forward(experiment, length, samples, split, index, world, between_batches):
        if batch is None:
            statistics.expect(len(output.solves))
            continue
        accuracy.add(output.logits, batch.targets, batch.examples)
        statistics.add(output.solves)
        if text is not None:
            text.add(batch.targets)
    accuracy, statistics = accuracy.over(world), statistics.over(world)
    row = {"length": length, **accuracy.summary(), **statistics.summary()}
    if text is not None and isinstance(task, HeldOut):
        text = text.over(world)
        row |= text.summary(accuracy.loss, task.count_bytes(text.counts))
    return row


def length_curve(
    experiment: Experiment,
    lengths: Sequence[int],
    samples: int,
    drawn: dict[int, int],
    world: World = ALONE,
    between_batches: Callable[[], None] = nothing,
) -> Iterator[dict[str, Any]]:
    """Yield one row for each length, in ascending order.

    `drawn` tells how many training sequences of each length were drawn. Where prefixes of a sample are samples and
    solver counts do not depend on what follows, all lengths are read off one pass at the longest.
    """
    lengths = sorted(set(lengths))
    one_pass = experiment.task.prefixes_are_samples and not experiment.model.iterations_depend_on_length
    if one_pass:
        rows: Iterator[dict[str, Any]] = iter(_prefix_rows(experiment, lengths, samples, world, between_batches))
    else:
        rows = (evaluate_length(experiment, n, samples, "test", n, world, between_batches) for n in lengths)
    task = experiment.task
    for row in rows:
        count = _holding(task, drawn, row["length"])
        yield {
            **row,
            **(measure_generation(experiment, task, row["length"], world) if isinstance(task, Answered) else {}),
            "scaled_accuracy": scaled_accuracy(row["token_accuracy"], task.chance),
            "chance": task.chance,
            "decoding": task.decoding,
            "seen_in_training": count > 0,
            "expected_overlap": task.expected_overlap(row["length"], count),
        }


@torch.no_grad()
def _prefix_rows(
    experiment: Experiment, lengths: Sequence[int], samples: int, world: World, between_batches: Callable[[], None]
) -> list[dict[str, Any]]:
    sums = {length: (Accuracy(), LayerStatistics()) for length in lengths}
    for batch, output in _forward(experiment, lengths[-1], samples, "test", 0, world, between_batches):
        for length, (accuracy, statistics) in sums.items():
            if batch is None:
                statistics.expect(len(output.solves))
                continue
            tokens = experiment.task.input_length(length)
            accuracy.add(output.logits[:, :tokens], batch.targets[:, :tokens])
            statistics.add([solve.prefix(tokens) for solve in output.solves])
    return [{"length": length, **a.over(world).summary(), **s.over(world).summary()} for length, (a, s) in sums.items()]


def _holding(task: Task, drawn: dict[int, int], length: int) -> int:
    """Return how many training sequences hold a sample of `length`: longer ones too, where prefixes are samples.

    They are in every text, though text that is held out is measured window by window.
    """
    in_longer = task.prefixes_are_samples or isinstance(task, HeldOut)
    return sum(n for other, n in drawn.items() if other == length or (in_longer and other > length))


def _forward(
    experiment: Experiment,
    length: int,
    samples: int,
    split: str,
    index: int,
    world: World,
    between_batches: Callable[[], None],
) -> Iterator[tuple[Batch | None, ModelOutput]]:
    """Yield this process's share of each batch and what the model, in evaluation mode, says of it.

    None stands for a share of no sequence: the model has read one that is another's, since all processes of a model
    with shared weights must run it equally often.
    """
    config, model = experiment.config, experiment.model
    was_training = model.training
    model.eval()
    try:
        for drawn in _batches(experiment, length, samples, generator(config.seed, split, index), split):
            between_batches()
            idle = len(drawn.inputs) <= world.rank
            batch = drawn.rows(slice(1) if idle else world.share).to(config.device)
            with autocast(config):
                output = model(batch.inputs, experiment.schedule.evaluation_cap(), batch.mask)
            yield None if idle else batch, output
    finally:
        model.train(was_training)


def _batches(experiment: Experiment, length: int, samples: int, source: torch.Generator, split: str) -> Iterator[Batch]:
    """Yield `samples` fresh sequences, or all that the task holds out for the split."""
    task, size = experiment.task, experiment.config.evaluation.batch_size
    if isinstance(task, HeldOut):
        yield from task.held_out(split, length, size)
        return
    for start in range(0, samples, size):
        yield task.sample(min(size, samples - start), length, source)
