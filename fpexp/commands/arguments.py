"""`key=value` words that belong to a command and not to a run's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fpexp.config.schema import Checker, did_you_mean
from fpexp.errors import UserError


def parse(arguments: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Parse words against `known`, key -> annotation; a `UserError` names an unknown key or a wrong value."""
    import yaml

    checker = Checker({})
    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals:
            raise UserError(f"'{argument}' is not understood; write <key>=<value> ({', '.join(known)})")
        if key not in known:
            raise UserError(f"unknown key '{key}'{did_you_mean(key, known)} ({', '.join(known)})")
        try:
            value = text if known[key] is str else yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"cannot read '{argument}'; write lists as {key}=[1,2]") from error
        values[key] = checker.check(known[key], value, key)
    return values


def take(arguments: Sequence[str], key: str) -> tuple[str | None, list[str]]:
    """Return the last value of `key=...` among the words, and the words without it."""
    prefix = f"{key}="
    found = [word.removeprefix(prefix) for word in arguments if word.startswith(prefix)]
    return (found[-1] if found else None), [word for word in arguments if not word.startswith(prefix)]
