"""The words of a command line in Hydra's grammar: parsed, and multiplied out where they name several values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from fpexp.config.quoting import is_override, quoted, shell_word
from fpexp.errors import UserError


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parse `key=value` words by Hydra's grammar; a `UserError` quotes the word that is not one."""
    overrides = []
    for argument in arguments:
        if "=" not in argument and not argument.startswith("~"):
            raise UserError(f"'{argument}' is not an override; write <key>=<value>, such as task=a5")
        try:
            overrides += OverridesParser.create().parse_overrides([argument])
        except OverrideParseException as error:
            raise UserError(_unread(argument, error)) from error
    return overrides


def values(override: Override) -> list[str]:
    """Return the words that an override stands for, one for each of its values."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def product(overrides: Iterable[Override]) -> list[list[str]]:
    """Return the words of every combination; the last override varies fastest."""
    return [list(words) for words in itertools.product(*map(values, overrides))]


def key_of(word: str) -> str:
    """Return the key or group of a word without the signs that force, add or delete it."""
    return word.partition("=")[0].lstrip("+~")


def _unread(argument: str, error: OverrideParseException) -> str:
    """Say what the grammar does not take, and how to write the value as it is."""
    key, _, value = argument.partition("=")
    word = f"{key}={quoted(value)}"
    example = f": {shell_word(word)}" if is_override(word) else ""
    reason = str(error).splitlines()[0]
    only_repeats = argument.splitlines()[0] in reason  # behind the name of an exception
    return f"cannot read '{argument}'{'' if only_repeats else f': {reason}'}; quote special characters{example}"
