"""What a tracker is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fpexp.config.run import RunConfig
from fpexp.run_folder import Row, RunFolder


@dataclass(frozen=True)
class RunStart:
    """What is known when a run starts; `resumed_from` is the step it goes on from, None for a fresh run."""

    run: RunFolder
    config: RunConfig
    parameters: int
    resumed_from: int | None
    notes: tuple[str, ...] = ()


class Tracker(Protocol):
    """Receives rows. Every row has `kind` (train, validation, curve) and `step`; a curve row also its `length`."""

    def start(self, start: RunStart) -> None:
        """Begin or go on with a run."""
        ...

    def log(self, row: Row) -> None:
        """Take one row."""
        ...

    def progress(self, step: int) -> None:
        """Take note that `step` training steps are done; called after every one."""
        ...

    def finish(self, state: str) -> None:
        """End with the run's state (finished, failed, interrupted)."""
        ...


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self.trackers = trackers

    def start(self, start: RunStart) -> None:
        """Begin or go on with a run."""
        for tracker in self.trackers:
            tracker.start(start)

    def log(self, row: Row) -> None:
        """Hand one row to each."""
        for tracker in self.trackers:
            tracker.log(row)

    def progress(self, step: int) -> None:
        """Tell each the number of steps done."""
        for tracker in self.trackers:
            tracker.progress(step)

    def finish(self, state: str) -> None:
        """End each."""
        for tracker in self.trackers:
            tracker.finish(state)
