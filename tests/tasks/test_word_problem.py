"""Word problems against permutation tables in plain loops (CASES 22), and how likely a test sequence was trained on."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from fpexp.errors import UserError
from fpexp.randomness import generator
from fpexp.tasks import IGNORE, WordProblem
from fpexp.tasks.lengths import LengthPolicy


def word_problem(group: str, **settings: Any) -> WordProblem:
    defaults = {"bos": False, "lengths": LengthPolicy("fixed", 4, 4, 0.5), "context": 64, "table_limit": 1024}
    return WordProblem(group=group, **{**defaults, **settings})


def table(group: str) -> np.ndarray:
    """The composition table by element number: permutations in lexicographic order, Z_n by addition."""
    kind, n = group[0], int(group[1:])
    if kind == "Z":
        return np.add.outer(np.arange(n), np.arange(n)) % n
    return oracle.permutation_table(oracle.symmetric_group(n) if kind == "S" else oracle.alternating_group(n))


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("table_limit", [0, 1024])
@pytest.mark.parametrize("group", ["S3", "A4", "Z7", "A5", "S5"])
def test_targets_are_the_running_products(group: str, table_limit: int, bos: bool) -> None:
    task = word_problem(group, bos=bos, table_limit=table_limit)
    composition = table(group)
    batch = task.sample(16, 13, generator(0, "train"))
    assert task.vocabulary_size == len(composition) + bos
    assert task.chance == 1 / len(composition)
    inputs, targets = batch.inputs[:, int(bos) :], batch.targets[:, int(bos) :]
    assert inputs.shape == targets.shape == (16, 13)
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert y == oracle.running_products(x, composition).tolist()


def test_products_of_groups_multiply_factor_by_factor() -> None:
    a4, z5 = table("A4"), table("Z5")
    composition = np.array(
        [[a4[i // 5, j // 5] * 5 + z5[i % 5, j % 5] for j in range(60)] for i in range(60)], dtype=np.int64
    )
    batch = word_problem("A4 x Z5").sample(8, 9, generator(1, "train"))
    for x, y in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert y == oracle.running_products(x, composition).tolist()


def test_the_label_at_i_is_the_product_through_i() -> None:
    """CASES 22: no shift. The first label is the first element, and a prefix has the labels of the whole."""
    task = word_problem("S5")
    batch = task.sample(8, 10, generator(2, "train"))
    assert torch.equal(batch.targets[:, 0], batch.inputs[:, 0])
    assert torch.equal(task.group.running_products(batch.inputs[:, :4]), batch.targets[:, :4])
    changed = batch.inputs.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 120
    other = task.group.running_products(changed)
    assert torch.equal(other[:, :6], batch.targets[:, :6])
    assert (other[:, 6:] != batch.targets[:, 6:]).all()


def test_bos_stands_first_and_is_not_scored() -> None:
    task = word_problem("A4", bos=True)
    batch = task.sample(5, 4, generator(0, "train"))
    assert batch.inputs.shape == batch.targets.shape == (5, task.input_length(4)) == (5, 5)
    assert (batch.inputs[:, 0] == 12).all()
    assert (batch.inputs[:, 1:] < 12).all()
    assert (batch.targets[:, 0] == IGNORE).all()
    assert (batch.targets[:, 1:] != IGNORE).all()
    assert batch.scored == 20


def test_elements_are_uniform_and_independent() -> None:
    batch = word_problem("A4").sample(4000, 3, generator(3, "train"))
    for position in range(3):
        counts = torch.bincount(batch.inputs[:, position], minlength=12).double()
        assert float(((counts - 4000 / 12) ** 2 / (4000 / 12)).sum()) < 31.3  # chi squared, 11 degrees, p = 0.001
    pairs = torch.bincount(batch.inputs[:, 0] * 12 + batch.inputs[:, 1], minlength=144).double()
    assert float(((pairs - 4000 / 144) ** 2 / (4000 / 144)).sum()) < 198.6  # 143 degrees, p = 0.0015


def test_samples_come_from_the_generator_alone() -> None:
    task = word_problem("A5")
    before = torch.get_rng_state()
    batches = [task.sample(4, 6, generator(5, "train", 9)).inputs for _ in range(2)]
    assert torch.equal(*batches)
    assert torch.equal(torch.get_rng_state(), before)


def test_train_validation_and_test_data_differ() -> None:
    """CASES 35 without workers: no sequence of one split, nor of one training step, is in another."""
    task = word_problem("A5")
    streams = [("train", 0), ("train", 1), ("validation", 0), ("test", 0), ("test", 16)]
    rows = [set(map(tuple, task.sample(256, 16, generator(0, *stream)).inputs.tolist())) for stream in streams]
    for a, b in itertools.combinations(rows, 2):
        assert not a & b
    assert all(len(part) == 256 for part in rows)


def test_length_that_does_not_fit_the_context() -> None:
    task = word_problem("A4", bos=True, context=5)
    task.check_length(4, "lengths")
    with pytest.raises(
        UserError, match=r"evaluation.lengths\[2\]=5 needs 6 tokens, more than task.context=5; at most 4 here, or raise"
    ):
        task.check_length(5, "evaluation.lengths[2]")
    with pytest.raises(UserError, match=r"task.lengths.max=4 needs 5 tokens"):
        word_problem("A4", bos=True, context=4)


@pytest.mark.parametrize("group", ["", "A", "S0", "Q8", "A4 x", "4", "S5.0", "A2", "S1", "S50"])
def test_what_is_no_group_is_named(group: str) -> None:
    with pytest.raises(UserError, match=r"task.group: .*'"):
        word_problem(group)


@pytest.mark.parametrize(("group", "length", "drawn"), [("Z2", 3, 5), ("Z3", 2, 20), ("S3", 2, 10), ("Z2", 1, 1)])
def test_expected_overlap_is_what_happens(group: str, length: int, drawn: int) -> None:
    """Of fresh sequences, the share that is among `drawn` others, counted 400 times."""
    task = word_problem(group)
    source = generator(7, "train")
    fresh, rounds = 200, 400
    hits = 0
    for _ in range(rounds):
        seen = set(map(tuple, task.sample(drawn, length, source).inputs.tolist()))
        hits += sum(tuple(row) in seen for row in task.sample(fresh, length, source).inputs.tolist())
    expected = task.expected_overlap(length, drawn)
    assert expected == pytest.approx(1 - (1 - task.group.order**-length) ** drawn, rel=1e-9)
    assert hits / (fresh * rounds) == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / rounds))


def test_expected_overlap_at_its_ends() -> None:
    task = word_problem("A5")
    assert task.expected_overlap(16, 0) == 0
    assert task.expected_overlap(1, 0) == 0
    assert task.expected_overlap(2, 10**7) == pytest.approx(1)
    assert task.expected_overlap(16, 10**6) == pytest.approx(10**6 / 60**16, rel=1e-9)
    assert task.expected_overlap(512, 10**9) == 0
    assert 0 <= task.expected_overlap(170, 10**9) < 1e-200
