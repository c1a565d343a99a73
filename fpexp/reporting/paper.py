"""What the paper reports: `paper/<experiment>.yaml` (fpexp.kept), read only; never a number of ours.

source: Table 4                                  # where it stands in the paper
measure: scaled accuracy                         # what the values are, and at which length
claims: [what is reported in words only]
rows:
  - {label: Mamba, when: {model: mamba}, value: 0.136}                 # spread: its standard deviation, if reported
  - {label: FP-Mamba-K, when: {model: fp_mamba_k}, range: [0.45, 0.55]}
  - {label: LSTM, when: {model: lstm}, says: solves both}              # a direction, no number

`when` names keys of a run's config; a row without it is a model that is not ours. A row belongs to every setting that
has all of these values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpexp.config.schema import Checker
from fpexp.config.values import parse_value
from fpexp.errors import UserError
from fpexp.kept import kept

FOLDER = "paper"


@dataclass(frozen=True)
class Reported:
    """One row: a value with its spread, a range, or words."""

    label: str
    when: Any = None  # key -> value
    value: float | None = None
    spread: float | None = None
    range: tuple[float, float] | None = None
    says: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("value", "range", "says") if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(f"'{self.label}' needs one of value, range and says, not {given or 'none'}")
        if self.when is not None and not isinstance(self.when, Mapping):
            raise UserError(f"'{self.label}': when is a mapping from keys to values, not {self.when!r}")

    @property
    def kind(self) -> str:
        """`value`, `range` or `claim`."""
        return "value" if self.value is not None else "range" if self.range is not None else "claim"

    @property
    def text(self) -> str:
        """The cell of the table."""
        if self.value is not None:
            return f"{self.value:g}" + (f" ± {self.spread:g}" if self.spread is not None else "")
        return f"{self.range[0]:g} to {self.range[1]:g}" if self.range is not None else str(self.says)

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Tell whether the row is of the setting that a config has."""
        return bool(self.when) and all(look_up(config, key) == value for key, value in self.when.items())


@dataclass(frozen=True)
class Paper:
    """What is reported of one table or figure."""

    source: str = ""
    measure: str = ""
    claims: tuple[str, ...] = ()
    rows: tuple[Reported, ...] = ()


def read_paper(results_dir: Path, experiment: str) -> Paper | None:
    """Read what the paper reports of an experiment; None where nothing is kept. A `UserError` names the file."""
    path = kept(FOLDER, results_dir) / f"{experiment}.yaml"
    if not path.is_file():
        return None
    try:
        raw = parse_value(path.read_text(), f"{path}: not YAML")
        paper: Paper = Checker({}).check(Paper, raw, "")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return paper


def papers_beside(results_dir: Path, names: Iterable[str]) -> dict[str, Paper]:
    """Read what the paper reports under other names than these: that for which there is no experiment."""
    known = set(names)
    found = sorted(path.stem for path in kept(FOLDER, results_dir).glob("*.yaml") if path.stem not in known)
    return {name: paper for name in found if (paper := read_paper(results_dir, name))}


def look_up(config: Mapping[str, Any], key: str) -> Any:
    """Return a config's value of a key as it is written on the command line: a group's is the name that was chosen."""
    choices = config.get("choices") or {}
    if key in choices:
        return choices[key]
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
