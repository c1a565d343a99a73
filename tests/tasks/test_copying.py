"""Copying, read back by a plain loop over characters: labels, packing, masks, and what is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from fpexp.errors import UserError
from fpexp.randomness import generator
from fpexp.tasks import IGNORE, Batch, Copy
from fpexp.tasks.lengths import LengthPolicy

PACKINGS = [False, True]


def copying(**settings: Any) -> Copy:
    defaults = {
        "alphabet": 5,
        "packing": True,
        "lengths": LengthPolicy("fixed", 2, 8, 0.5),
        "context": 64,
        "generated_samples": 4,
    }
    return Copy(**{**defaults, **settings})


def check_batch(task: Copy, batch: Batch) -> list[int]:
    """Check every position of every row by a loop over its text; return the lengths of the examples, in order."""
    lengths = []
    for row in range(len(batch.inputs)):
        text = task.write(batch.inputs[row])
        real = text.rstrip("_")
        mask = [True] * len(text) if batch.mask is None else batch.mask[row].tolist()
        assert mask == [True] * len(real) + [False] * (len(text) - len(real))
        expected: list[int] = []
        numbers: list[int] = []
        parts = re.findall(r"[^.]*\.", real)
        assert "".join(parts) == real
        assert task.packing or len(parts) == 1
        for number, part in enumerate(parts):
            found = re.fullmatch(r"\$([a-z]+)\|([a-z]+)\.", part)
            assert found, part
            letters, again = found.groups()
            assert letters == again
            answer = [ord(letter) - ord("a") for letter in letters] + [task.stop_token]
            expected += [IGNORE] * (len(letters) + 1) + answer + [IGNORE]
            numbers += [number] * len(part)
            lengths.append(len(letters))
        assert batch.targets[row].tolist() == expected + [IGNORE] * (len(text) - len(real))
        if task.packing:
            assert batch.examples is not None
            assert batch.examples[row, : len(real)].tolist() == numbers
        else:
            assert batch.examples is None
    return lengths


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_every_example_of_a_sample_has_its_length(length: int, packing: bool) -> None:
    task = copying(packing=packing)
    batch = task.sample(6, length, generator(0, "train"))
    assert batch.inputs.shape == (6, task.input_length(length)) == (6, 64 if packing else 2 * length + 3)
    in_a_row = 64 // (2 * length + 3) if packing else 1
    assert check_batch(task, batch) == [length] * 6 * in_a_row
    assert batch.scored == 6 * in_a_row * (length + 1)
    assert packing or batch.mask is None


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("context", [19, 40, 64, 257])
def test_mixed_lengths_are_between_the_shortest_and_the_longest(context: int, packing: bool) -> None:
    task = copying(packing=packing, context=context)
    for longest in (2, 3, 8):
        batch, lengths = task.sample_mixed(7, longest, generator(longest, "train"))
        assert check_batch(task, batch) == lengths.tolist()
        assert set(lengths.tolist()) <= set(range(2, longest + 1))
        rows, width = batch.inputs.shape
        assert (rows, width) == (7, context if packing else 2 * int(lengths.max()) + 3)


def test_a_row_is_full_when_the_next_example_begins_another() -> None:
    """Next fit, by a plain loop over the lengths that came out."""
    task = copying(alphabet=26, context=100)
    batch, lengths = task.sample_mixed(50, 8, generator(3, "train"))
    assert batch.examples is not None
    assert batch.mask is not None
    row, used = 0, 0
    for length in lengths.tolist():
        if used + 2 * length + 3 > 100:
            assert int(batch.mask[row].sum()) == used
            row, used = row + 1, 0
        used += 2 * length + 3
    assert row == 49
    assert int(batch.mask[49].sum()) == used > 100 - 19


@pytest.mark.parametrize("packing", PACKINGS)
def test_mixed_lengths_are_uniform(packing: bool) -> None:
    """Chi squared over 2-8; drawing anew what does not fit a row of 40 would fail it by far."""
    task = copying(packing=packing, context=40)
    draws = [task.sample_mixed(200, 8, generator(0, "train", step))[1] for step in range(40)]
    counts = torch.bincount(torch.cat(draws), minlength=9)[2:].double()
    mean = counts.sum() / 7
    assert float(((counts - mean) ** 2 / mean).sum()) < 22.5  # 6 degrees, p = 0.001


def test_letters_are_uniform_and_independent() -> None:
    batch, _ = copying(packing=True).sample_mixed(2000, 8, generator(1, "train"))
    letters = batch.targets[(batch.targets != IGNORE) & (batch.targets < 5)]
    counts = torch.bincount(letters, minlength=5).double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 18.5  # 4 degrees, p = 0.001
    pairs = copying(packing=False).sample(4000, 2, generator(2, "train")).inputs
    counts = torch.bincount(pairs[:, 1] * 5 + pairs[:, 2], minlength=25).double()
    assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 51.2  # 24 degrees, p = 0.001


def test_vocabulary_and_chance() -> None:
    assert copying(alphabet=26).vocabulary_size == 30
    assert copying(alphabet=26).chance == 1 / 27
    assert copying(alphabet=1).vocabulary_size == 5


@pytest.mark.parametrize("packing", PACKINGS)
def test_batches_come_from_the_generator_alone(packing: bool) -> None:
    task = copying(packing=packing)
    before = torch.get_rng_state()
    first, second = (task.sample_mixed(5, 8, generator(5, "train", 9))[0] for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert not torch.equal(first.inputs, task.sample_mixed(5, 8, generator(5, "train", 10))[0].inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_parts_of_a_batch_keep_mask_and_examples() -> None:
    batch, _ = copying().sample_mixed(7, 8, generator(0, "train"))
    parts = batch.chunk(3)
    assert [len(part.inputs) for part in parts] == [3, 3, 1]
    for name in ("inputs", "targets", "mask", "examples"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert batch.to("cpu").examples is not None


def test_prompts_and_their_answers() -> None:
    task = copying()
    prompts, answers = task.sample_prompts(20, 6, generator(0, "test"))
    assert prompts.shape == (20, 8)
    assert answers.shape == (20, 7)
    for prompt, answer in zip(prompts, answers, strict=True):
        text = task.write(prompt)
        assert text == f"${task.write(answer)[:-1]}|"
        assert task.write(answer)[-1] == "."
        assert torch.equal(task.read_prompt(text), prompt)
        assert torch.equal(task.answer(prompt), answer)


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("", "the prompt is empty; write '$', letters from a to e and '|', such as '$a|'"),
        ("abc|", "does not begin with '$'"),
        ("|", "does not begin with '$'"),
        ("$abc", "does not end with '|'"),
        ("$", "does not end with '|'"),
        ("$|", "has no letters"),
        ("$abz|", "has 'z', which is no letter of task.alphabet=5"),
        ("$aB|", "has 'B'"),
        ("$a|a|", "has '|'"),
        ("$" + "a" * 31 + "|", "has 31 letters, which need 65 tokens, more than task.context=64"),
    ],
)
def test_a_prompt_that_cannot_be_read(prompt: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        copying().read_prompt(prompt)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", PACKINGS)
def test_lengths_are_checked_against_the_context(packing: bool) -> None:
    with pytest.raises(
        UserError,
        match=r"task.lengths.max=50 needs 103 tokens, more than task.context=102; at most 49 here, or raise task",
    ):
        copying(packing=packing, context=102, lengths=LengthPolicy("fixed", 5, 50, 0.5))
    task = copying(packing=packing, context=103, lengths=LengthPolicy("fixed", 5, 50, 0.5))
    with pytest.raises(UserError, match=r"evaluation.lengths\[1\]=51 needs 105 tokens"):
        task.check_length(51, "evaluation.lengths[1]")


def test_expected_overlap_is_what_happens() -> None:
    task, length, drawn = copying(alphabet=3, packing=False), 3, 20
    assert task.expected_overlap(length, drawn) == pytest.approx(1 - (1 - 1 / 27) ** 20, rel=1e-9)
    source, hits, rounds = generator(0, "train"), 0, 200
    for _ in range(rounds):
        seen, fresh = (set(map(tuple, task.sample(n, length, source).inputs.tolist())) for n in (drawn, 1))
        hits += len(seen & fresh)
    assert hits / rounds == pytest.approx(task.expected_overlap(length, drawn), abs=0.15)
    assert task.expected_overlap(length, 0) == 0
    assert task.expected_overlap(2000, 10**9) == 0
    assert copying(alphabet=1).expected_overlap(2, 1) == 1


def test_no_string_of_one_split_is_in_another() -> None:
    task = copying(alphabet=26, packing=False)
    streams = [("train", 0), ("train", 1), ("validation", 0), ("test", 8)]
    rows = [set(map(tuple, task.sample(200, 12, generator(0, *stream)).inputs.tolist())) for stream in streams]
    assert not any(a & b for a, b in itertools.combinations(rows, 2))
