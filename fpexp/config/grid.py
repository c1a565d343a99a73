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
from dataclasses import dataclass
from typing import Any

from fpexp.config.catalogue import GROUPS
from fpexp.config.schema import did_you_mean
from fpexp.config.words import key_of, parse_overrides, product
from fpexp.errors import UserError

KEY = "sweep.grid"


@dataclass(frozen=True)
class GridJob:
    """One job: the name of its row, for messages, and its words."""

    row: str
    words: list[str]


def grid_jobs(grid: Any, given: Sequence[str], name: str = KEY) -> list[GridJob]:
    """Return each job of a grid beside the words that are `given`, one value each.

    `grid` is plain data; `name` says where it stands.
    """
    named = {key_of(word): _value(word) for word in given}
    rows = [job for index, row in enumerate(_list(grid, name)) for job in _jobs(row, f"{name}[{index}]")]
    chosen = [job for job in rows if all(named.get(key, value) == value for key, value in _groups(job.words))]
    if not chosen:
        raise UserError(_none_left(rows, named))
    jobs: dict[str, GridJob] = {}
    for job in chosen:
        words = [word for word in job.words if key_of(word) not in named]
        jobs.setdefault(repr([(key_of(word), _value(word)) for word in words]), GridJob(job.row, words))
    return list(jobs.values())


def _list(grid: Any, name: str) -> list[Any]:
    if not isinstance(grid, list) or not grid:
        raise UserError(f"{name}={grid!r} must be a list of rows, or null")
    return grid


def _jobs(row: Any, name: str) -> list[GridJob]:
    if not isinstance(row, Mapping) or not row:
        raise UserError(f"{name}={row!r} must be a row of keys and values, such as model: lstm")
    for key in row:
        if not isinstance(key, str) or re.split("[./]", key)[0] in ("hydra", "sweep", "experiment", "scale"):
            raise UserError(f"{name}: '{key}' is not of a single run; leave it to the command line")
    words = [f"{key}={_text(value, f'{name}.{key}')}" for key, value in row.items()]
    try:
        return [GridJob(name, job) for job in product(parse_overrides(words))]
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _text(value: Any, key: str) -> str:
    """Return a value as Hydra's grammar has it; text is in that grammar already, so that a comma means several."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(_text(item, key) for item in value)}]"
    raise UserError(f"{key}={value!r} must be a value; write its keys with dots")


def _value(word: str) -> Any:
    """Return the value of a word, whichever way it is written."""
    return parse_overrides([word])[0].value()


def _groups(words: Iterable[str]) -> list[tuple[str, Any]]:
    return [(key_of(word), _value(word)) for word in words if key_of(word) in GROUPS]


def _none_left(rows: list[GridJob], named: Mapping[str, Any]) -> str:
    """Say which group's value no row has, and which there are."""
    for group in GROUPS:
        known = list(dict.fromkeys(str(value) for job in rows for key, value in _groups(job.words) if key == group))
        if group in named and known and str(named[group]) not in known:
            near = did_you_mean(str(named[group]), known)
            return f"{group}={named[group]} is in no row of {KEY}{near} ({', '.join(known)}); {KEY}=null runs it alone"
    asked = " ".join(f"{key}={value}" for key, value in named.items() if key in GROUPS)
    return f"no row of {KEY} has all of {asked}; {KEY}=null runs that alone"
