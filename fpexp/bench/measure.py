"""The harness: every contender is checked, and only then are they timed in turn, A B A B, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from fpexp.bench.progress import Progress
from fpexp.errors import FpexpError

LEAST_ROUNDS = 3
"""Rounds that are made even where the time for them is over: a median of fewer says little."""


class CheckFailed(FpexpError):
    """A contender computes something else than the reference."""


@dataclass(frozen=True)
class Check:
    """A difference to the reference and the largest that is let pass; NaN does not pass."""

    what: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the contender may be timed."""
        return self.value <= self.limit


@dataclass(frozen=True)
class Target:
    """A bound on `ratio` (to the baseline's median), on `median_s` or on one of the contender's own numbers."""

    number: str
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        """Tell whether a value keeps the bound."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        names = {"ratio": "{}x", "median_s": "{} s"}
        form = names.get(self.number, f"{self.number.replace('_', ' ')} {{}}")
        bounds = [("<=", self.at_most), (">=", self.at_least)]
        return " ".join(form.format(f"{sign} {bound:g}") for sign, bound in bounds if bound is not None)


@dataclass(frozen=True)
class Contender:
    """Something to time. `seconds` does its work once and returns how long that took; None where nothing is timed.

    Contenders of one `group` take turns; `baseline` is the one of the group that the ratio is taken to. `numbers` are
    what is told beside the times, such as iterations; they are asked for after the checks. With `once` the work is done
    a single time, before the rounds. `missing` says why there is nothing to run.
    """

    name: str
    group: str
    seconds: Callable[[], float] | None = None
    check: Callable[[], Sequence[Check]] = tuple
    baseline: str | None = None
    target: Target | None = None
    numbers: Callable[[], Mapping[str, Any]] = dict
    once: bool = False
    missing: str = ""


@dataclass(frozen=True)
class Rounds:
    """How often everything is timed: `repeats` rounds after `warmup` of them, fewer where `budget` seconds a group
    are over, but never fewer than LEAST_ROUNDS after one unless asked for."""

    repeats: int
    warmup: int
    budget: float


@dataclass(frozen=True)
class Row:
    """What was measured of one contender."""

    contender: Contender
    seconds: tuple[float, ...] = ()
    ratio: float | None = None
    checks: tuple[Check, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def median_s(self) -> float | None:
        """The median time."""
        return median(self.seconds) if self.seconds else None

    @property
    def quartiles_s(self) -> tuple[float, float] | None:
        """The first and the third quartile of the times."""
        if not self.seconds:
            return None
        low, _, high = quantiles(self.seconds * 2 if len(self.seconds) == 1 else self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none, or nothing to hold against it."""
        target = self.contender.target
        if target is None:
            return None
        own = {"ratio": self.ratio, "median_s": self.median_s}
        value = own[target.number] if target.number in own else self.numbers.get(target.number)
        return None if value is None else target.met(value)


def stopwatch(work: Callable[[], object]) -> Callable[[], float]:
    """Return a function that does the work and returns how long it took."""

    def seconds() -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    return seconds


def measure(contenders: Sequence[Contender], rounds: Rounds) -> list[Row]:
    """Check all contenders, then time them, group by group. `CheckFailed` where one is wrong: nothing is timed then."""
    present, say = [contender for contender in contenders if not contender.missing], Progress()
    checks: dict[int, tuple[Check, ...]] = {}
    numbers: dict[int, Mapping[str, Any]] = {}
    seconds: dict[int, list[float]] = {}
    for contender in present:
        checks[id(contender)] = _checked(contender)
        say(f"checked {len(checks)} of {len(present)}: {contender.group}, {contender.name}")
    for contender in present:
        numbers[id(contender)] = contender.numbers()
        say(f"memory and counts of {len(numbers)} of {len(present)}: {contender.group}, {contender.name}")
    for group in dict.fromkeys(contender.group for contender in present):
        timed = {id(c): (c.seconds, c.once) for c in present if c.group == group and c.seconds}
        seconds |= {key: [work()] for key, (work, once) in timed.items() if once}
        seconds |= _interleave({key: work for key, (work, once) in timed.items() if not once}, rounds)
        say(f"timed {len(seconds)} of {len(present)}: {group}")
    medians = {(c.group, c.name): median(seconds[id(c)]) for c in present if c.seconds}
    return [
        Row(
            contender,
            tuple(seconds.get(id(contender), ())),
            _ratio(medians, contender),
            checks[id(contender)],
            numbers[id(contender)],
        )
        if not contender.missing
        else Row(contender)
        for contender in contenders
    ]


def _checked(contender: Contender) -> tuple[Check, ...]:
    checks = tuple(contender.check())
    for check in checks:
        if not check.passed:
            where = f" ({contender.group})" if contender.group else ""
            raise CheckFailed(
                f"{contender.name}{where} is not right, so nothing is timed: {check.what} {check.value:.3g}, at most "
                f"{check.limit:.3g}"
            )
    return checks


def _interleave(works: Mapping[int, Callable[[], float]], rounds: Rounds) -> dict[int, list[float]]:
    end = time.perf_counter() + rounds.budget
    for number in range(rounds.warmup):
        if number and time.perf_counter() > end:
            break
        for work in works.values():
            work()
    found: dict[int, list[float]] = {key: [] for key in works}
    for number in range(rounds.repeats):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for key, work in works.items():
            found[key].append(work())
    return found


def _ratio(medians: Mapping[tuple[str, str], float], contender: Contender) -> float | None:
    """Times of the baseline; None where it could not run."""
    baseline = medians.get((contender.group, contender.baseline or ""))
    return medians[contender.group, contender.name] / baseline if baseline else None
