"""The exceptions that reach a user as one line, each with the exit code of its kind."""

from __future__ import annotations

import signal


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, its type where it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


class FpexpError(Exception):
    """A failure that is ours or the machine's to explain: exit code 1."""

    exit_code = 1


class UserError(FpexpError):
    """A mistake in what was asked for; the message says what to write instead: exit code 2."""

    exit_code = 2


class Interrupted(FpexpError):
    """A signal ended the run, its state is saved: exit code 128 + signal (130 Ctrl-C, 143 SIGTERM, 140 SIGUSR2)."""

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(message or f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum
        self.exit_code = 128 + signum


class EndedElsewhere(FpexpError):
    """Another process of the same run ended with this exit code and has told the user why; this one is silent."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process of this run has ended it")
        self.exit_code = exit_code
