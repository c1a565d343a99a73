"""Sizes that have to fit each other, refused by the names of their settings."""

from __future__ import annotations

import math

from fpexp.errors import UserError


def inner_width(expand: float, d_model: int) -> int:
    """Return expand * d_model, rounded; a UserError where it is 0."""
    width = round(expand * d_model)
    if width < 1:
        raise UserError(f"model.expand={expand:g} times model.d_model={d_model} is an inner width of 0; raise one")
    return width


def count_heads(head_size: int, width: int) -> int:
    """Return width / head_size; a UserError where that is no whole number."""
    check_divides("model.head_size", head_size, "the inner width model.expand * model.d_model", width)
    return width // head_size


def check_divides(key: str, value: int, what: str, total: int, otherwise: str = "") -> None:
    """Raise a `UserError` that names the divisors of `total` on both sides of `value`, or `otherwise` what helps."""
    if total % value:
        small = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
        divisors = {*small, *(total // n for n in small)}
        nearest = [max(n for n in divisors if n < value), *sorted(n for n in divisors if n > value)[:1]]
        allowed = " or ".join(map(str, nearest))
        raise UserError(f"{key}={value} does not divide {what} = {total}; use {allowed}{otherwise}")


def check_ascends(key: str, range_: tuple[float, float]) -> None:
    """Raise a `UserError` where a range ends below its start."""
    if range_[0] > range_[1]:
        raise UserError(f"{key}={list(range_)} must ascend")
