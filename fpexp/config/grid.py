"""`sweep.grid`: the jobs of an experiment that no single product gives, as a list of products.

    sweep:
      grid:
        - model: fp_mamba_k,lstm # two jobs, as on the command line
        - model: fp_mamba_h
          model.channel_mixer.rank: 1,2,4 # three jobs
          model.delta_range: [0.1, 1.0] # a value

A group that the command line names, such as `model=lstm`, chooses among the rows that name it; any other key that it
names takes the place of the rows' own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fpexp.config.catalogue import GROUPS
from fpexp.config.schema import did_you_mean
from fpexp.config.words import key_of, parse_overrides, product
from fpexp.errors import UserError

KEY = "sweep.grid"


def grid_jobs(grid: Any, given: Sequence[str]) -> list[list[str]]:
    """Return the words of each job of a grid beside those that are `given`, one value each; `grid` is plain data."""
    named = {key_of(word): word.partition("=")[2] for word in given}
    rows = [words for index, row in enumerate(_list(grid)) for words in product(parse_overrides(_words(row, index)))]
    chosen = [row for row in rows if all(named.get(key, value) == value for key, value in _groups(row))]
    if not chosen:
        raise UserError(_none_left(rows, named))
    jobs = dict.fromkeys(tuple(word for word in row if key_of(word) not in named) for row in chosen)
    return [list(job) for job in jobs]


def _list(grid: Any) -> list[Any]:
    if not isinstance(grid, list) or not grid:
        raise UserError(f"{KEY}={grid!r} must be a list of rows, or null")
    return grid


def _words(row: Any, index: int) -> list[str]:
    if not isinstance(row, Mapping) or not row:
        raise UserError(f"{KEY}[{index}]={row!r} must be a row of keys and values, such as model: lstm")
    for key in row:
        if not isinstance(key, str) or re.split("[./]", key)[0] in ("hydra", "sweep", "experiment", "scale"):
            raise UserError(f"{KEY}[{index}]: '{key}' is not of a single run; leave it to the command line")
    return [f"{key}={_text(value, f'{KEY}[{index}].{key}')}" for key, value in row.items()]


def _text(value: Any, key: str) -> str:
    """Return a value as Hydra's grammar has it; text is in that grammar already, so that a comma means several."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(_text(item, key) for item in value)}]"
    raise UserError(f"{key}={value!r} must be a value; write its keys with dots")


def _groups(words: Iterable[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition("=") for word in words) if key in GROUPS]


def _none_left(rows: list[list[str]], named: Mapping[str, str]) -> str:
    """Say which group's value no row has, and which there are."""
    for group in GROUPS:
        known = list(dict.fromkeys(value for row in rows for key, value in _groups(row) if key == group))
        if group in named and known and named[group] not in known:
            near = did_you_mean(named[group], known)
            return f"{group}={named[group]} is in no row of {KEY}{near} ({', '.join(known)}); {KEY}=null runs it alone"
    asked = " ".join(f"{key}={value}" for key, value in named.items() if key in GROUPS)
    return f"no row of {KEY} has all of {asked}; {KEY}=null runs that alone"
