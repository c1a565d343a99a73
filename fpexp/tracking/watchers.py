"""Who watches a run: what `tracking` asks for."""

from __future__ import annotations

from fpexp.config.run import RunConfig
from fpexp.tracking.console import ConsoleTracker
from fpexp.tracking.jsonl import JsonlTracker
from fpexp.tracking.tracker import Tracker, Trackers


def trackers(config: RunConfig) -> Tracker:
    """Return JSONL and the console, always, and wandb where it is asked for."""
    watching: list[Tracker] = [JsonlTracker(), ConsoleTracker()]
    if config.tracking.wandb:
        from fpexp.tracking.wandb import WandbTracker

        watching.append(WandbTracker())
    return Trackers(watching)
