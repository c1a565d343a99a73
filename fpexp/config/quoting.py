"""Values as words that Hydra's grammar and a shell read back as they are."""

from __future__ import annotations

import re
import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException


def override_word(key: str, value: str) -> str:
    """Return `key=value`, with quotes around the value where Hydra's grammar needs them."""
    return f"{key}={value}" if _reads_as(f"{key}={value}", value) else f"{key}={quoted(value)}"


def quoted(value: str) -> str:
    """Return a value in Hydra's single quotes; what looks like an interpolation is none."""
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    value = re.sub(r"(\\*)'", r"\1\1\\'", value)
    return "'" + re.sub(r"(\\+)\Z", r"\1\1", value) + "'"


def shell_word(word: str) -> str:
    """Return a word as it is written in a shell; around Hydra's single quotes double ones are easier to read."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)


def is_override(word: str) -> bool:
    """Tell whether Hydra's grammar has the word."""
    try:
        OverridesParser.create().parse_overrides([word])
    except OverrideParseException:
        return False
    return True


def _reads_as(word: str, value: str) -> bool:
    if "${" in value or not is_override(word):
        return False
    (override,) = OverridesParser.create().parse_overrides([word])
    return not override.is_sweep_override() and bool(override.value() == value)
