"""What there is to choose: groups, their choices and the line that each says of itself. Plain text, no Hydra.

`own` are folders beside conf/ (fpexp.config.search_path); of two files with one name that in conf/ is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError

GROUPS = ("task", "model", "solver", "schedule", "gradient", "scale", "tracking", "experiment")


def conf_dir() -> Path:
    """Return conf/: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise UserError(f"the installation is incomplete: no conf/ beside {package}; install fpexp again")


def choices(group: str, own: Sequence[Path] = ()) -> dict[str, str]:
    """Return each choice of a group with its one-line description, the first comment of its file."""
    return {name: _first_comment(path) for name, path in sorted(_files(group, own).items())}


def check_choice(group: str, value: str, own: Sequence[Path] = ()) -> None:
    """Raise a `UserError` with the alternatives when the group has no such choice."""
    known = sorted(_files(group, own))
    if value not in known:
        near = did_you_mean(value, known)
        here = _files(group, [Path("conf")]).get(value)
        if here is not None:
            near = f"; {here} is known with hydra.searchpath=[file://conf]"
        raise UserError(f"unknown {group} '{value}'{near} ({', '.join(known)})")


def choice_file(group: str, value: str, own: Sequence[Path] = ()) -> Path:
    """Return the file of a choice."""
    check_choice(group, value, own)
    return _files(group, own)[value]


def _files(group: str, own: Sequence[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in (*reversed(own), conf_dir()) for path in (folder / group).glob("*.yaml")}


def _first_comment(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line[2:].strip()
    return ""
