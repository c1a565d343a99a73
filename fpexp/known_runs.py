"""Which runs there are of a config: a run is known by its settled config's fingerprint."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fpexp.config.run import RunConfig
from fpexp.errors import FpexpError
from fpexp.run_folder import RunFolder, all_runs

ORDER = ("finished", "recorded", "running", "interrupted", "lost", "failed")
"""Of several runs of one config the first of these states counts; `recorded` is finished, in another results folder."""


@dataclass(frozen=True)
class Known:
    """What there is of a config: a state of ORDER or `missing`, and the newest run in it."""

    state: str
    run: RunFolder | None = None


class KnownRuns:
    """The runs under a results folder, and the finished ones of another that is kept for reference."""

    def __init__(self, results_dir: str | Path, recorded: str | Path | None = None) -> None:
        self._own = _by_fingerprint(results_dir)
        self._recorded = _by_fingerprint(recorded) if recorded is not None else {}

    def of(self, settled: RunConfig) -> Known:
        """Return what there is of a config that has no `auto` left."""
        fingerprint = settled.fingerprint()
        found = [Known(str(run.status()["state"]), run) for run in self._own.get(fingerprint, [])]
        finished = [run for run in self._recorded.get(fingerprint, []) if run.status()["state"] == "finished"]
        found += [Known("recorded", run) for run in finished]
        known = [known for known in found if known.state in ORDER]
        return min(known, key=lambda known: ORDER.index(known.state), default=Known("missing"))


def _by_fingerprint(results_dir: str | Path) -> dict[str | None, list[RunFolder]]:
    """Return the runs, newest first."""
    runs = defaultdict(list)
    for folder in reversed(all_runs(results_dir)):
        config = readable_config(folder)
        runs[None if config is None else config.fingerprint()].append(folder)
    return runs


def readable_config(run: RunFolder) -> RunConfig | None:
    """Return a run's config as the present version reads it, None where it cannot; it is read once for each change."""
    return _config(run.path, (run.path / "config.yaml").stat().st_mtime_ns)


@cache
def _config(path: Path, changed: int) -> RunConfig | None:
    try:
        return RunFolder(path).config()
    except (OSError, FpexpError):
        return None
