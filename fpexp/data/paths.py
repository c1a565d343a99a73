"""Paths as they are given in settings."""

from __future__ import annotations

import os

from fpexp.errors import UserError


def expand(path: str, key: str) -> str:
    """Return a path or pattern with its `~` or `~user` as a folder; a `UserError` names `key` where there is none."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise UserError(f"{key}={path}: '{user}' is nobody's home folder; write the whole path, or ./{path}")
    return expanded
