"""SIGINT and SIGTERM as a flag that the loops look at between steps and batches."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from fpexp.errors import Interrupted

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Inside the block the first signal is remembered and the second has its usual effect."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._at_once = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for signum in SIGNALS:
            self._previous[signum] = signal.signal(signum, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Interrupted` inside the block as soon as a signal comes: for what may be dropped half-way."""
        self.check()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def between(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items; a signal ends their computation at once, but not what is done with them."""
        while True:
            with self.at_once():
                item = next(items, None)
            if item is None:
                return
            yield item

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.signum is not None:
            raise Interrupted(self.signum)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()
        if self._at_once:
            raise Interrupted(signum)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
