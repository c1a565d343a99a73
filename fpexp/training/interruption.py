"""SIGINT and SIGTERM as a flag that the loops look at between steps and batches."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

from fpexp.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Inside the block the first signal is remembered and the second has its usual effect."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            self._previous[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
