"""The checker on its own: types, ranges, names and what it says of mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from fpexp.config.schema import Checker, Component, plain, settings_of
from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero, Fraction, NonNegative, Positive, Probability, Range


@dataclass(frozen=True)
class Inner:
    rate: Positive
    lambda_: bool = False


@dataclass(frozen=True)
class Outer:
    inner: Inner
    steps: Count


def wheel(hub: str, *, spokes: Count, colour: Literal["red", "green"] = "red") -> tuple[Any, ...]:
    return hub, spokes, colour


class Bicycle:
    def __init__(self, road: str, *, front: Callable[[str], Any], gears: Count | None = None) -> None:
        self.front = front


HERE = __name__


def check(annotation: Any, value: Any) -> Any:
    return Checker({"key": value}).check(annotation, value, "key")


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (int, 2000.0, 2000),
        (int, 0, 0),
        (float, 1, 1.0),
        (float, 1e-5, 1e-5),
        (bool, False, False),
        (str, "", ""),
        (int | None, None, None),
        (int | None, 3, 3),
        (list[int], [1, 2.0], [1, 2]),
        (list[Count], [], []),
        (tuple[Probability, Probability], [0.9, 0], (0.9, 0.0)),
        (Literal["a", "b"], "b", "b"),
        (Annotated[str, "explained"], "text", "text"),
    ],
)
def test_value_is_taken_as_its_type(annotation: Any, value: Any, expected: Any) -> None:
    result = check(annotation, value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, 2.5, "key=2.5 must be an integer"),
        (int, True, "key=True must be an integer"),
        (int, "3", "key='3' must be an integer"),
        (int, float("inf"), "an integer"),
        (float, "1e-3", "key='1e-3' must be a finite number"),
        (float, float("nan"), "a finite number"),
        (float, True, "a finite number"),
        (bool, 1, "key=1 must be true or false"),
        (bool, "yes", "true or false"),
        (str, 5, "key=5 must be text"),
        (int, None, "an integer"),
        (int | None, "x", "an integer"),
        (list[Count], 4, "key=4 must be a list, such as key=[1,2]"),
        (list[Count], "4", "must be a list"),
        (list[Count], [1, 0], "key[1]=0 is out of range: it must be at least 1"),
        (tuple[Probability, Probability], [0.9], "key=[0.9] must have 2 entries"),
        (Literal["cosine", "linear"], "cosin", "unknown key 'cosin'; did you mean 'cosine'? (cosine, linear)"),
        (Inner, 3, "key=3 must be a mapping with its own keys, such as key.<name>=<value>"),
        (int, "???", "key has no value; set it with key=<value>"),
    ],
)
def test_wrong_type_is_refused_with_the_key(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(annotation, value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "inside", "outside"),
    [
        (Count, [1, 10**9], [0, -1]),
        (CountOrZero, [0], [-1]),
        (Positive, [1e-30], [0.0, -1.0]),
        (NonNegative, [0.0], [-1e-30]),
        (Fraction, [0.0, 1.0], [-0.1, 1.1]),
        (Probability, [0.0, 0.999], [1.0, -0.1]),
    ],
)
def test_ranges_hold_at_their_ends(annotation: Any, inside: list[float], outside: list[float]) -> None:
    for value in inside:
        assert check(annotation, value) == value
    for value in outside:
        with pytest.raises(UserError, match=r"key=.* is out of range: it must be "):
            check(annotation, value)


def test_a_range_says_both_ends() -> None:
    assert str(Range(0, below=1)) == "at least 0 and below 1"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"inner": {"rate": 1, "rat": 2}, "steps": 1}, "unknown key 'inner.rat'; did you mean 'inner.rate'?"),
        ({"inner": {"rate": 1}, "steps": 1, "rate": 1}, "unknown key 'rate'; did you mean 'inner.rate'?"),
        ({"inner": {"rate": 1}, "steps": 1, "zzz": 1}, "unknown key 'zzz'; known here: inner, steps"),
        ({"inner": {}, "steps": 1}, "inner.rate is missing; set it with inner.rate=<value>"),
        ({"inner": {"rate": 1}}, "steps is missing"),
        ({"inner": {"rate": 1, "lambda_": True}, "steps": 1}, "unknown key 'inner.lambda_'"),
    ],
)
def test_wrong_keys_are_named_in_full_with_a_suggestion(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Checker(raw).check(Outer, raw, "")
    assert str(caught.value).startswith(message)


def test_trailing_underscore_only_avoids_a_keyword() -> None:
    raw = {"inner": {"rate": 0.5, "lambda": True}, "steps": 3}
    config = Checker(raw).check(Outer, raw, "")
    assert config == Outer(Inner(0.5, lambda_=True), 3)
    assert plain(config) == raw


def test_settings_are_the_keyword_only_parameters() -> None:
    assert list(settings_of(wheel)) == ["spokes", "colour"]
    assert list(settings_of(Bicycle)) == ["front", "gears"]


def test_component_round_trip() -> None:
    raw = {
        "_target_": f"{HERE}.Bicycle",
        "front": {"_target_": f"{HERE}.wheel", "spokes": 32, "colour": "green"},
        "gears": None,
    }
    component = Checker(raw).component(raw, "bicycle")
    assert component.resolve() is Bicycle
    assert component.settings["front"] == Component(f"{HERE}.wheel", {"spokes": 32, "colour": "green"})
    assert plain(component) == raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"spokes": 3}, "wheel._target_ must name what to build"),
        ({"_target_": 5}, "wheel._target_ must name what to build"),
        ({"_target_": "wheel"}, "wheel._target_: 'wheel' is not a dotted name"),
        ({"_target_": "nowhere.wheel"}, "wheel._target_: cannot import 'nowhere.wheel'"),
        ({"_target_": f"{HERE}.whel"}, f"wheel._target_: cannot import '{HERE}.whel'"),
        ({"_target_": f"{HERE}.HERE"}, "cannot be called"),
        ({"_target_": f"{HERE}.wheel"}, "wheel.spokes is missing"),
        ({"_target_": f"{HERE}.wheel", "spokes": 0}, "wheel.spokes=0 is out of range"),
        ({"_target_": f"{HERE}.wheel", "spoke": 1}, "unknown key 'wheel.spoke'; did you mean 'wheel.spokes'?"),
        ({"_target_": f"{HERE}.wheel", "hub": "x", "spokes": 1}, "unknown key 'wheel.hub'"),
        (
            {"_target_": f"{HERE}.Bicycle", "front": {"_target_": f"{HERE}.wheel", "spokes": 0}},
            "wheel.front.spokes=0 is out of range",
        ),
    ],
)
def test_component_mistakes(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        Checker(raw).component(raw, "wheel")
    assert message in str(caught.value)
