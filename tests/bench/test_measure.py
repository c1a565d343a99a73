"""The harness with contenders that take no time: order, medians, ratios, checks, what is missing."""

from __future__ import annotations

import math

import pytest

from fpexp.bench import progress
from fpexp.bench.measure import Check, CheckFailed, Contender, Rounds, Row, Target, measure, stopwatch

ROUNDS = Rounds(repeats=3, warmup=1, budget=60.0)


class Fakes:
    """Contenders that say when they run and return the times they are given."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def __call__(self, name: str, *seconds: float, checks: tuple[Check, ...] = (), **settings: object) -> Contender:
        times = iter(seconds)

        def run() -> float:
            self.log.append(name)
            return next(times, 1.0)

        def check() -> tuple[Check, ...]:
            self.log.append(f"check {name}")
            return checks

        return Contender(name, **{"group": "", **settings}, seconds=run, check=check)  # type: ignore[arg-type]


@pytest.fixture
def fake() -> Fakes:
    return Fakes()


def test_checks_come_first_then_warm_up_then_turns(fake: Fakes) -> None:
    measure([fake("a"), fake("b")], ROUNDS)
    assert fake.log == ["check a", "check b", *"ab", *"ab", *"ab", *"ab"]


def test_groups_are_timed_apart_after_the_checks_of_all(fake: Fakes) -> None:
    measure([fake("a", group="1"), fake("c", group="2"), fake("b", group="1")], Rounds(2, 0, 60.0))
    assert fake.log == ["check a", "check c", "check b", *"abab", *"cc"]


def test_medians_quartiles_and_ratios_without_the_warm_up(fake: Fakes) -> None:
    base = fake("base", 100.0, 1.0, 3.0, 2.0)
    slow = fake("slow", 100.0, 8.0, 5.0, 6.0, baseline="base", target=Target("ratio", at_most=3.0))
    rows = measure([base, slow], ROUNDS)
    assert [row.seconds for row in rows] == [(1.0, 3.0, 2.0), (8.0, 5.0, 6.0)]
    assert [row.median_s for row in rows] == [2.0, 6.0]
    assert [row.quartiles_s for row in rows] == [(1.5, 2.5), (5.5, 7.0)]
    assert [row.ratio for row in rows] == [None, 3.0]
    assert [row.met for row in rows] == [None, True]


def test_a_baseline_is_of_the_same_group(fake: Fakes) -> None:
    contenders = [
        fake(name, seconds, group=group, baseline="a" if name == "b" else None)
        for group, times in (("1", (1.0, 2.0)), ("2", (10.0, 50.0)))
        for name, seconds in zip("ab", times, strict=True)
    ]
    assert [row.ratio for row in measure(contenders, Rounds(1, 0, 60.0))] == [None, 2.0, None, 5.0]


@pytest.mark.parametrize("value", [0.2, math.nan])
def test_nothing_is_timed_when_a_check_fails(fake: Fakes, value: float) -> None:
    good = (Check("error", 0.05, 0.1), Check("error", 0.1, 0.1))
    wrong = fake("wrong", checks=(*good, Check("error of y", value, 0.1)), group="T=16")
    with pytest.raises(CheckFailed, match=rf"wrong \(T=16\) is not right.*error of y {value:g}, at most 0.1") as caught:
        measure([fake("good", checks=good), wrong, fake("later")], ROUNDS)
    assert caught.value.exit_code == 1
    assert fake.log == ["check good", "check wrong"]


def test_what_is_missing_has_a_row_and_is_left_alone(fake: Fakes) -> None:
    absent = fake("peer", baseline="ours", target=Target("ratio", at_least=5.0), missing="not installed")
    ours, peer = measure([fake("ours"), absent], ROUNDS)
    assert (ours.median_s, ours.ratio) == (1.0, None)
    assert (peer.median_s, peer.quartiles_s, peer.ratio, peer.met, peer.seconds) == (None, None, None, None, ())
    assert not [entry for entry in fake.log if "peer" in entry]


def test_a_missing_baseline_takes_the_ratio_with_it(fake: Fakes) -> None:
    rows = measure([fake("ours", missing="no"), fake("b", baseline="ours", target=Target("ratio", 1.0))], ROUNDS)
    assert (rows[1].ratio, rows[1].met) == (None, None)


def test_once_is_once_and_first(fake: Fakes) -> None:
    rows = measure([fake("again", 9.0), fake("once", 7.0, once=True, baseline="again")], ROUNDS)
    assert fake.log == ["check again", "check once", "once", *["again"] * 4]
    assert rows[1].seconds == (7.0,)
    assert rows[1].quartiles_s == (7.0, 7.0)


def test_what_is_not_timed_has_its_numbers(fake: Fakes) -> None:
    counted = Contender("counted", "", numbers=lambda: {"registers": 96}, target=Target("registers", at_most=255))
    row, other = measure([counted, fake("a", baseline="counted")], ROUNDS)
    assert (row.seconds, row.median_s, row.numbers, row.met) == ((), None, {"registers": 96}, True)
    assert (len(other.seconds), other.ratio) == (3, None)


def test_the_budget_ends_the_rounds_but_not_before_three(fake: Fakes) -> None:
    (row,) = measure([fake("a")], Rounds(repeats=50, warmup=0, budget=1e-9))
    assert len(row.seconds) == 3
    (row,) = measure([fake("a")], Rounds(repeats=2, warmup=0, budget=1e-9))
    assert len(row.seconds) == 2


def test_the_budget_ends_the_warm_up_but_not_before_one_round(fake: Fakes) -> None:
    measure([fake("a")], Rounds(repeats=1, warmup=50, budget=1e-9))
    assert fake.log == ["check a", "a", "a"]


def test_what_takes_long_says_how_far_it_is(
    fake: Fakes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SAY_EVERY", 0.0)
    measure([fake("a", group="1"), fake("b", group="2")], Rounds(1, 0, 60.0))
    assert capsys.readouterr().out.splitlines() == [
        "checked 1 of 2: 1, a",
        "checked 2 of 2: 2, b",
        "memory and counts of 1 of 2: 1, a",
        "memory and counts of 2 of 2: 2, b",
        "timed 1 of 2: 1",
        "timed 2 of 2: 2",
    ]


@pytest.mark.parametrize(
    ("target", "met", "missed", "text"),
    [
        (Target("ratio", at_most=3.0), 3.0, 3.01, "<= 3x"),
        (Target("ratio", at_least=5.0), 5.0, 4.99, ">= 5x"),
        (Target("median_s", at_most=8.0), 8.0, 8.01, "<= 8 s"),
        (Target("memory_of_inputs", at_most=4.0), 0.0, 4.1, "memory of inputs <= 4"),
    ],
    ids=lambda value: str(value),
)
def test_targets(target: Target, met: float, missed: float, text: str) -> None:
    assert target.met(met)
    assert not target.met(missed)
    assert str(target) == text


def test_a_target_may_be_on_a_number_of_its_own(fake: Fakes) -> None:
    contender = fake("a", target=Target("memory", at_most=4.0), numbers=lambda: {"memory": 5.0})
    assert measure([contender], ROUNDS)[0].met is False
    assert Row(contender).met is None


def test_the_stopwatch_times_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([10.0, 12.5])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    done: list[int] = []
    assert stopwatch(lambda: done.append(1))() == 2.5
    assert done == [1]
