"""Drawing a training batch of each task against the training step that is made with it, at scale=cpu.

The batch is that of the task's protocol at its longest training length. The step is one of `model` on this very batch,
as `training_step` makes it. Drawing is what training waits for before each step; at most a twentieth of it.

Roofline: a batch of B rows of T tokens is B T random numbers and B T indices that are looked up and written. Word
problems multiply once, modular arithmetic draws and evaluates once for each of T tokens in turn, on vectors of B: some
thirty calls of numpy a token, a microsecond or two each at such B. Copying has no such loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fpexp.bench.context import Context
from fpexp.bench.measure import Check, Contender, Target, stopwatch
from fpexp.bench.subjects import fresh
from fpexp.bench.training_step import training_step
from fpexp.build import Experiment
from fpexp.randomness import generator
from fpexp.ranges import CountOrZero
from fpexp.tasks import IGNORE, Batch, Copy, Mixed, ModularArithmetic, WordProblem

AT_MOST = 0.05
"""Of a training step."""

STEP = "training step"
CHECKED = 32
"""Rows that are checked by a loop in plain Python."""

SUBJECTS = {
    "a5": ("a5", []),
    "copy, one example a row": ("copy", ["task.packing=false"]),
    "copy, packed": ("copy", ["task.packing=true"]),
    "modular_arithmetic": ("modular_arithmetic", []),
}


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark; `sequences` 0 is that of each task's protocol."""

    model: str = "fp_mamba_h"
    sequences: CountOrZero = 0


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """For each task a step and the drawing of its batch."""
    for name, (task, words) in SUBJECTS.items():
        experiment = fresh(sizes.model, *words, task=task)
        size = sizes.sequences or experiment.config.training.batch_size
        draw = drawing(experiment, size)
        batch = draw()
        cap = experiment.schedule.training_cap(batch.inputs.shape[1], generator(0, "bench", 1))
        group = f"{name}, batch {size}, length {experiment.task.lengths.max}, {sizes.model}"
        yield Contender(STEP, group, stopwatch(training_step(experiment, batch, cap)))
        yield Contender(
            "drawing",
            group,
            stopwatch(draw),
            check=lambda task=experiment.task, batch=batch: [wrong_rows(task, batch)],  # type: ignore[misc]
            baseline=STEP,
            target=Target("ratio", at_most=AT_MOST),
            numbers=lambda draw=draw, batch=batch: {"samples_per_second": _rate(draw, batch)},  # type: ignore[misc]
        )


def drawing(experiment: Experiment, size: int) -> Callable[[], Batch]:
    """Return what draws a training batch at the longest length, the same one each time."""
    task, length = experiment.task, experiment.task.lengths.max
    if isinstance(task, Mixed):
        return lambda: task.sample_mixed(size, length, generator(0, "bench"))[0]
    return lambda: task.sample(size, length, generator(0, "bench"))


def wrong_rows(task: Any, batch: Batch) -> Check:
    """Count, among the first rows, those whose targets are not what a plain loop says."""
    rows = zip(batch.inputs[:CHECKED].tolist(), batch.targets[:CHECKED].tolist(), strict=True)
    expected = _EXPECTED[type(task)]
    wrong = sum(
        expected(task, tokens) != [target for target in targets if target != IGNORE] for tokens, targets in rows
    )
    return Check("rows with wrong targets:", wrong, 0)


def _products(task: WordProblem, tokens: Sequence[int]) -> list[int]:
    table, product, products = task.group.table.tolist(), 0, []  # type: ignore[attr-defined]
    for token in tokens:
        product = table[product][token]
        products.append(product)
    return products


def _copies(task: Copy, tokens: Sequence[int]) -> list[int]:
    answers: list[int] = []
    letters: list[int] = []
    for token in tokens:
        if token < task.alphabet:
            letters.append(token)
        elif token == task.copy_token:
            answers += [*letters, task.stop_token]
        else:
            letters = []
    return answers


def _values(task: ModularArithmetic, tokens: Sequence[int]) -> list[int]:
    text = "".join(task.expressions.symbols[token] for token in tokens[:-1])
    return [eval(text) % task.expressions.modulus]  # its own digits, signs and brackets


_EXPECTED: dict[type, Callable[[Any, Sequence[int]], list[int]]] = {
    WordProblem: _products,
    Copy: _copies,
    ModularArithmetic: _values,
}


def _rate(draw: Callable[[], Batch], batch: Batch) -> float:
    """Return examples a second, of the median of a few draws."""
    examples = (
        len(batch.inputs)
        if batch.examples is None
        else int(batch.examples.masked_fill(batch.targets == IGNORE, -1).amax(dim=1).add(1).sum())
    )
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        draw()
        seconds.append(time.perf_counter() - began)
    return examples / median(seconds)
