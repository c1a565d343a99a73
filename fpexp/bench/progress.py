"""How far something long is, said now and then."""

from __future__ import annotations

import time

from fpexp.tracking.console import note

SAY_EVERY = 10.0
"""Seconds between two lines, at least; what is over before says nothing."""


class Progress:
    """Call it with a line as often as there is news."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, line: str) -> None:
        """Say it, or nothing where the last line is not old enough."""
        if time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            note(line)
