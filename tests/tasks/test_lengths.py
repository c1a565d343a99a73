"""Length policies: fixed, uniform, growing when the current length is mastered."""

from __future__ import annotations

import json

import pytest
import torch

from fpexp.errors import UserError
from fpexp.randomness import generator
from fpexp.tasks.lengths import LengthPolicy, Lengths


def drawn(lengths: Lengths, steps: int) -> list[int]:
    found = [lengths.next(generator(0, "train", step)) for step in range(steps)]
    for length in found:
        lengths.count(length, 8)
    return found


def test_fixed_is_always_the_longest() -> None:
    lengths = Lengths(LengthPolicy("fixed", 3, 16, 0.5))
    assert drawn(lengths, 4) == [16] * 4
    lengths.observe(1.0)
    assert drawn(lengths, 1) == [16]
    assert lengths.drawn == {16: 40}


def test_uniform_has_every_length_with_both_ends_and_comes_from_the_generator() -> None:
    before = torch.get_rng_state()
    first, second = (drawn(Lengths(LengthPolicy("uniform", 3, 6, 0.5)), 400) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), before)
    counts = {length: first.count(length) for length in set(first)}
    assert counts.keys() == {3, 4, 5, 6}
    assert min(counts.values()) > 70


def test_uniform_does_not_depend_on_how_training_goes() -> None:
    a, b = (Lengths(LengthPolicy("uniform", 2, 9, 0.5)) for _ in range(2))
    a.observe(1.0)
    assert drawn(a, 20) == drawn(b, 20)


def test_growth_by_one_and_only_when_mastered() -> None:
    lengths = Lengths(LengthPolicy("grow", 2, 4, 0.75))
    for accuracy, expected in ((0.0, 2), (0.7499, 2), (0.75, 3), (0.5, 3), (1.0, 4), (1.0, 4), (0.0, 4)):
        lengths.observe(accuracy)
        assert drawn(lengths, 1) == [expected]
    assert lengths.drawn == {2: 16, 3: 16, 4: 24}


@pytest.mark.parametrize("policy", ["fixed", "uniform", "grow"])
def test_state_comes_back_through_json(policy: str) -> None:
    a = Lengths(LengthPolicy(policy, 2, 12, 0.5))  # type: ignore[arg-type]
    for step in range(5):
        a.count(a.next(generator(1, "train", step)), 4)
        a.observe(step / 5)
    b = Lengths(a.policy)
    b.load_state_dict(json.loads(json.dumps(a.state_dict())))
    assert (b.current, b.drawn) == (a.current, a.drawn)
    for step in range(5, 10):
        assert a.next(generator(1, "train", step)) == b.next(generator(1, "train", step))
        a.observe(0.6)
        b.observe(0.6)
    assert b.state_dict() == a.state_dict()


def test_a_minimum_above_the_maximum_is_refused() -> None:
    LengthPolicy("grow", 4, 4, 0.5)
    with pytest.raises(UserError, match=r"task.lengths.min=5 is more than task.lengths.max=4"):
        LengthPolicy("grow", 5, 4, 0.5)


def test_rehearsal_draws_what_was_mastered_and_counts_for_nothing() -> None:
    lengths = Lengths(LengthPolicy("grow", 2, 9, 0.75, rehearsal=0.25))
    assert drawn(lengths, 50) == [2] * 50  # nothing was mastered yet
    lengths.current = 5
    found = drawn(lengths, 2000)
    shares = {length: found.count(length) / 2000 for length in set(found)}
    assert shares == pytest.approx({2: 1 / 12, 3: 1 / 12, 4: 1 / 12, 5: 3 / 4}, abs=0.03)
    rehearsed = next(step for step in range(100) if lengths.next(generator(0, "train", step)) < 5)
    lengths.observe(1.0)
    assert lengths.current == 5
    assert next(lengths.next(generator(0, "train", step)) for step in range(rehearsed + 1, 200)) == 5
    lengths.observe(1.0)
    assert lengths.current == 6


def test_rehearsal_is_for_growing_lengths() -> None:
    with pytest.raises(UserError, match=r"task.lengths.rehearsal=0.5 is for task.lengths.policy=grow only"):
        LengthPolicy("uniform", 2, 4, 0.5, rehearsal=0.5)
