"""How long jobs train, from finished runs of their kind; where there is none it is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property

from fpexp.config.run import RunConfig
from fpexp.errors import UserError
from fpexp.known_runs import readable_config
from fpexp.run_folder import RunFolder, read_rows


class Paces:
    """How fast runs have trained, each on its machine and threads; of several of a kind the first one counts."""

    def __init__(self, runs: Iterable[RunFolder]) -> None:
        self._runs = runs

    def seconds(self, settled: RunConfig, steps: int) -> float | None:
        """Return what so many steps of a run with this config take, validation included; None where no run tells."""
        run = self._by_kind.get(_kind_of_step(settled))
        pace = None if run is None else _seconds_a_step(run)
        return None if pace is None else pace * steps

    @cached_property
    def _by_kind(self) -> dict[str, RunFolder]:
        found: dict[str, RunFolder] = {}
        for run in self._runs:
            config = readable_config(run)
            if config is not None and run.status()["state"] == "finished":
                found.setdefault(_kind_of_step(config), run)
        return found


def _kind_of_step(config: RunConfig) -> str:
    """Return what decides the work of a training step: all but the seed, and of `training` only the batches."""
    from fpexp.build import uses_solver

    names = ("task", "model", "precision", *(("solver", "schedule", "gradient") if uses_solver(config.model) else ()))
    tree, training = config.to_dict(), config.training
    device = config.device.partition(":")[0]
    kind = [device, training.batch_size, training.accumulation, *(tree[name] for name in names)]
    return json.dumps(kind, sort_keys=True)


def _seconds_a_step(run: RunFolder) -> float | None:
    try:
        last = read_rows(run.metrics)[-1]
        return float(last["seconds"] / last["step"])
    except (UserError, OSError, ValueError, LookupError, TypeError, ZeroDivisionError):
        return None


def say_duration(seconds: Sequence[float | None]) -> str:
    """Say how many jobs are to be run and how long all of them train, one after another."""
    count = f"{len(seconds)} {'job' if len(seconds) == 1 else 'jobs'} to run"
    known = [value for value in seconds if value is not None]
    if not known:
        return f"{count}; no finished run of {'its' if len(seconds) == 1 else 'their'} kind tells how long"
    if all(value == 0 for value in seconds):
        return f"{count}, only to be measured: nothing to train"
    unknown = f", and {len(seconds) - len(known)} of unknown duration" if len(known) < len(seconds) else ""
    return f"{count}: about {_roughly(sum(known))} of training at the speed of earlier runs, one at a time{unknown}"


def _roughly(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{round(seconds / 3600, 1):g} h"
