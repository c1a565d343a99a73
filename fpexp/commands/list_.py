"""fpexp list: what conf/ offers."""

from __future__ import annotations

from fpexp.config.catalogue import choices
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError

KINDS = ("tasks", "models", "solvers", "schedules", "gradients", "scales", "experiments")


def run(arguments: list[str]) -> int:
    """Print one line for each choice of the kinds asked for, or of all."""
    for kind in arguments:
        if kind not in KINDS:
            raise UserError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS)} ({', '.join(KINDS)})")
    for kind in arguments or KINDS:
        if len(arguments) != 1:
            print(f"{kind}:")
        indent = "" if len(arguments) == 1 else "  "
        for name, text in choices(kind.removesuffix("s")).items():
            print(f"{indent}{name:<16} {text}")
    return 0
