"""What the parts of the check share: what an item is told, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from fpexp.errors import first_line

FLUSH = 256 * 2**20
"""Bytes that are written before each timing, so that nothing is found in the L2 cache."""


LEAST, MOST, ENOUGH = 3, 20, 500.0
"""Calls that are timed, at least and at most, and milliseconds that they may take together beyond the least."""


@dataclass(frozen=True)
class Setup:
    """Where to compute. A rehearsal has sizes that say nothing, for a CPU and Triton's interpreter."""

    device: str
    rehearse: bool

    def synchronize(self) -> None:
        """Wait for the device; an error that a kernel has left behind is raised here."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return the median time of some work on the device, of some calls after two; of one call in a rehearsal."""
        if self.rehearse:
            return _clocked(work)
        work()
        self.synchronize()
        began_at = time.perf_counter()
        work()
        self.synchronize()
        repeats = max(LEAST, min(MOST, int(ENOUGH / (1e3 * (time.perf_counter() - began_at)))))
        if self.device == "cpu":
            return median(_clocked(work) for _ in range(repeats))
        cache = torch.empty(FLUSH, dtype=torch.int8, device=self.device)
        began, ended = ([torch.cuda.Event(enable_timing=True) for _ in range(repeats)] for _ in range(2))
        for begin, end in zip(began, ended, strict=True):
            cache.zero_()  # also gives the host time to queue the work
            begin.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return median(begin.elapsed_time(end) for begin, end in zip(began, ended, strict=True))


def _clocked(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


@dataclass(frozen=True)
class Finding:
    """A row of the table: what was looked at, what was found and what it is held against; `good` is None where
    nothing is. `numbers` are for the JSON file."""

    what: str
    found: str
    against: str = ""
    good: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


def describe(error: BaseException) -> str:
    """Return what an exception says, in a line."""
    return f"{type(error).__name__}: {first_line(error)}"


Item = Callable[[], list[Finding]]
