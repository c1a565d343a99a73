"""SIGINT, SIGTERM and SIGUSR2 as a flag that the loops look at between steps and batches.

Processes that train together have to end together, or those that go on would wait for the others: each time they look,
they agree. So none is ended in the middle of anything, and all look equally often.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from fpexp.errors import Interrupted
from fpexp.world import ALONE, World

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
"""SIGUSR2 is how submitit has Slurm announce the end of a job's time."""


class Interruption:
    """Inside the block the first signal is remembered and the second has its usual effect.

    With other processes the later ones have no effect at all, up to the end of the process: torchrun hands on a Ctrl-C
    that every process has already had, and what it sends to those that outlive a failed one must not cut their last
    words short. It kills them itself, 30 seconds later.
    """

    def __init__(self, world: World = ALONE) -> None:
        self.world = world
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
        if self.world.is_alone:
            self._restore()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise `Interrupted` inside the block as soon as a signal comes: for what may be dropped half-way.

        With other processes, before it only.
        """
        self.check()
        self._at_once = self.world.is_alone
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
        """Raise `Interrupted` if a signal has come, to any of the processes: all look at the same places."""
        signum = self.world.largest(self.signum or 0)
        if signum:
            raise Interrupted(signum)

    def look(self) -> None:
        """Check between the parts of what `at_once` would end in the middle, had this process been alone."""
        if not self.world.is_alone:
            self.check()

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if self.world.is_alone:
            self._restore()
        if self._at_once:
            raise Interrupted(signum)

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
