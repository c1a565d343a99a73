"""Rows to Weights & Biases, when asked for. It can fail in any way without taking the run with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fpexp.config.run import Tracking
from fpexp.errors import FpexpError
from fpexp.run_folder import Row, write_json
from fpexp.tracking.console import note, warn
from fpexp.tracking.tracker import RunStart

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT = 15.0  # seconds until the run goes on offline
FINISH_TIMEOUT = 60.0  # seconds for the last upload; what is left stays on disk for `wandb sync`


class WandbTracker:
    """One wandb run, its id the run's id, its files in the run's folder.

    Each row is a history entry of its own, under `<kind>/`. `define_metric` gives train and validation rows `step`
    as their x-axis and curve rows their length: all curve rows share one step, so that on a step axis, or in one
    entry, only the last length would survive. wandb's own step only counts entries.
    """

    def __init__(self) -> None:
        self._run: wandb.Run | None = None
        self._logged: Logged

    def start(self, start: RunStart) -> None:
        """Open the run online, or offline without a key or network, each said once."""
        try:
            import wandb
        except ImportError:
            warn("wandb is not installed (`pip install wandb`): metrics go to the run's folder alone")
            return
        try:
            self._logged = Logged.read(start.run.path / "wandb.json")
            self._run = _open(wandb, start)
            if self._run:
                _define_axes(self._run)
        except Exception as error:
            self._give_up(error)

    def log(self, row: Row) -> None:
        """Log a row, unless an earlier process of this run has."""
        if self._run is None or self._logged.has(row):
            return
        try:
            # Written down first: a crash in between loses this row for wandb, where the other order doubles it.
            self._logged.add(row)
            entry = {f"{row['kind']}/{name}": value for name, value in flatten(row).items()}
            self._run.log({"step": row["step"], **entry}, step=self._logged.entries)
        except Exception as error:
            self._give_up(error)

    def progress(self, step: int) -> None:
        """Nothing to send between rows."""

    def finish(self, state: str) -> None:
        """Close the run, with exit code 1 unless it finished, and end wandb's process."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=0 if state == "finished" else 1)
        except Exception as error:
            warn(f"wandb did not finish ({_one_line(error)}); {_how_to_sync(run)} sends what is missing")
        _end_service()

    def _give_up(self, error: Exception) -> None:
        self._run = None
        _end_service()
        warn(f"wandb failed ({_one_line(error)}); the run goes on without it")


@dataclass
class Logged:
    """What has been handed to wandb, kept in `<run>/wandb.json` across the processes of a resumed run."""

    path: Path
    entries: int = 0
    last_steps: dict[str, int] = field(default_factory=dict)  # kind -> step
    curve: list[tuple[int, int]] = field(default_factory=list)  # step, length

    def __post_init__(self) -> None:
        self._before = dict(self.last_steps)

    @classmethod
    def read(cls, path: Path) -> Logged:
        """Return what `path` remembers; nothing for a fresh run."""
        if not path.exists():
            return cls(path)
        saved = json.loads(path.read_text())
        return cls(path, saved["entries"], saved["last_steps"], [(step, length) for step, length in saved["curve"]])

    def has(self, row: Row) -> bool:
        """Tell whether an earlier process logged this row; for the curve, whether anyone did."""
        if row["kind"] == "curve":
            return (row["step"], row["length"]) in self.curve
        return row["step"] <= self._before.get(row["kind"], -1)

    def add(self, row: Row) -> None:
        """Remember a row, on disk."""
        if row["kind"] == "curve":
            self.curve.append((row["step"], row["length"]))
        else:
            self.last_steps[row["kind"]] = row["step"]
        self.entries += 1
        write_json(self.path, {name: value for name, value in asdict(self).items() if name != "path"})


def flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `{"layers": [{"a": 1}]}` as `{"layer0/a": 1}`; drop kind, step and what is None."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "layers":
            for i, layer in enumerate(value):
                flat |= {f"layer{i}/{key}": item for key, item in flatten(layer).items()}
        elif name not in ("kind", "step") and value is not None:
            flat[name] = value
    return flat


def _open(wandb: Any, start: RunStart) -> wandb.Run | None:
    mode = _wanted_mode(wandb, start.config.tracking)
    if mode == "disabled":
        return None
    if mode in ("offline", "dryrun"):
        return _init(wandb, start, "offline")
    try:
        return _open_online(wandb, start, mode)
    except Exception as error:
        _end_service()
        run = _init(wandb, start, "offline")
        warn(f"wandb runs offline ({_one_line(error)}); {_how_to_sync(run)} sends it later")
        return run


def _wanted_mode(wandb: Any, tracking: Tracking) -> str:
    """Return the mode asked for; `auto` is what WANDB_MODE or wandb's settings file says, which is online without."""
    wanted = {} if tracking.mode == "auto" else {"mode": tracking.mode}
    return wandb.setup(settings=wandb.Settings(silent=True, **wanted)).settings.mode


def _open_online(wandb: Any, start: RunStart, mode: str) -> wandb.Run:
    if not wandb.login(prompt=False, verify=False):  # `init` would prompt
        raise FpexpError("no API key, `wandb login` stores one")
    run = _init(wandb, start, mode)
    note(f"wandb: {run.url}")
    return run


def _init(wandb: Any, start: RunStart, mode: str) -> wandb.Run:
    choices = start.config.choices
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,  # environment.json has the commit
        disable_code=True,
        x_disable_stats=True,
        x_save_requirements=False,
        init_timeout=INIT_TIMEOUT,
        finish_timeout=FINISH_TIMEOUT,
        finish_timeout_raises=True,
    )
    return wandb.init(
        project=start.config.tracking.project,
        entity=start.config.tracking.entity,
        dir=start.run.path,
        id=start.run.id,
        name=start.run.id,
        tags=[choices.task, choices.model],
        config={**start.config.to_dict(), "parameters": start.parameters},
        allow_val_change=True,
        resume="allow",
        reinit="finish_previous",
        mode=mode,
        settings=settings,
    )


def _define_axes(run: wandb.Run) -> None:
    for kind, axis in (("train", "step"), ("validation", "step"), ("curve", "curve/length")):
        run.define_metric(axis)
        run.define_metric(f"{kind}/*", step_metric=axis)


def _end_service() -> None:
    """End wandb's process, which frees the run's id. Left to wandb's exit hook, a failure of it is a traceback."""
    import wandb

    with suppress(Exception):
        wandb.teardown()


def _how_to_sync(run: wandb.Run) -> str:
    return f"`wandb sync {run.settings.sync_dir}`"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
