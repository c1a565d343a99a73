"""What stands in conf/: groups, their choices and the line that each says of itself. Plain text, no Hydra."""

from __future__ import annotations

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


def choices(group: str) -> dict[str, str]:
    """Return each choice of a group with its one-line description, the first comment of its file."""
    return {path.stem: _first_comment(path) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def check_choice(group: str, value: str) -> None:
    """Raise a `UserError` with the alternatives when the group has no such choice."""
    known = choices(group)
    if value not in known:
        raise UserError(f"unknown {group} '{value}'{did_you_mean(value, known)} ({', '.join(known)})")


def _first_comment(path: Path) -> str:
    for line in path.read_text().splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line[2:].strip()
    return ""
