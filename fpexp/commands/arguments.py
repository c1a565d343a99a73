"""`key=value` words that belong to a command and not to a run's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fpexp.config.schema import Checker, did_you_mean
from fpexp.config.values import parse_value
from fpexp.errors import UserError


def parse(arguments: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Parse words against `known`, key -> annotation; a `UserError` names an unknown key or a wrong value."""
    checker = Checker({})
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' is not understood; write <key>=<value> ({', '.join(known)})")
        if key not in known:
            raise UserError(f"unknown key '{key}'{did_you_mean(key, known)} ({', '.join(known)})")
        value = text if known[key] is str else parse_value(text, f"cannot read '{argument}'")
        values[key] = checker.check(known[key], value, key)
    return values


def take(arguments: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """Return the last value of `key=...` among the words, and the words without it."""
    prefix = f"{key}="
    found = [word.removeprefix(prefix) for word in arguments if word.startswith(prefix)]
    return (found[-1] if found else None), [word for word in arguments if not word.startswith(prefix)]
