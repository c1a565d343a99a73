"""Which recorded run answers which job of an experiment, and what is missing."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fpexp.reporting.layout import Layout
from fpexp.reporting.names import RANK, label_of
from fpexp.reporting.paper import Paper, look_up
from fpexp.reporting.record import Record


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment asks for. `identities` are what a `Record` of it may have, one for each kind of device.

    `settings` are its own words, key -> value, beside those of the whole experiment and the seed; `words` all but the
    seed, for a shell.
    """

    seed: int
    settings: Mapping[str, str]
    words: str
    config: Mapping[str, Any]
    identities: frozenset[str]


@dataclass(frozen=True)
class PlannedBenchmark:
    """A benchmark that an experiment asks for.

    `needed` are the numbers without which it is partial: how a row's group begins, the row, the name (None: its time).
    """

    name: str
    command: str
    needed: tuple[tuple[str, str, str | None], ...] = ()


@dataclass(frozen=True)
class Plan:
    """An experiment: what it asks for, how it is reported, what the paper has.

    `command` runs all that is missing, `resume` (with an id behind it) goes on with a run, `measure` measures its
    curve anew; `where` is a word with the results folder, if it is another one. `evaluations` are what it has measured
    of every finished run, its sweep.evaluate: kind -> what is asked for.
    """

    name: str
    description: str
    command: str
    jobs: tuple[PlannedRun, ...]
    layout: Layout
    paper: Paper | None = None
    resume: str = "fpexp train resume="
    measure: str = "fpexp evaluate run="
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    benchmarks: tuple[PlannedBenchmark, ...] = ()
    where: str = ""

    @property
    def title(self) -> str:
        """What stands above its part of the report."""
        return ": ".join(part for part in (self.layout.paper, self.layout.title or self.name) if part)

    def train(self, runs: Sequence[PlannedRun]) -> str:
        """Return the command that makes some runs that differ in nothing but the seed, and measures what is asked for.

        It is a sweep without the experiment's grid, which might have more rows with the same words.
        """
        seeds = ",".join(str(run.seed) for run in runs)
        words = [runs[0].words, f"seed={seeds}", *([self.where] if self.where else [])]
        sweep = ["fpexp train -m", *words, "sweep.grid=null"]
        return " ".join(sweep if len(runs) > 1 or self.evaluations else ["fpexp train", *words])


@dataclass(frozen=True)
class Unfinished:
    """A run that was begun and has no whole curve, and the command that goes on with it or makes it anew, if one does.

    `asked`: the grid has its seed.
    """

    record: Record
    why: str
    command: str | None
    asked: bool


@dataclass(frozen=True)
class Setting:
    """What differs in nothing but the seed: the runs that count, and what stands in their place elsewhere.

    `repeated` are runs beside one that counts, of the same config and seed: (the one that counts, the others).
    """

    label: str
    values: Mapping[str, str]
    config: Mapping[str, Any]
    runs: tuple[Record, ...]  # by seed
    asked: int
    missing: tuple[PlannedRun, ...]
    unfinished: tuple[Unfinished, ...]
    repeated: tuple[tuple[Record, tuple[Record, ...]], ...]


@dataclass(frozen=True)
class Outcome:
    """An experiment with what is recorded of it."""

    plan: Plan
    settings: tuple[Setting, ...]

    @property
    def asked(self) -> int:
        """Runs that the grid asks for."""
        return sum(setting.asked for setting in self.settings)

    @property
    def done(self) -> int:
        """Those of them that are finished."""
        begun = sum(entry.asked for setting in self.settings for entry in setting.unfinished)
        return self.asked - begun - sum(len(setting.missing) for setting in self.settings)

    @property
    def runs(self) -> list[Record]:
        """All runs that count."""
        return [run for setting in self.settings for run in setting.runs]

    def evaluated(self, run: Record, kind: str) -> Sequence[Mapping[str, Any]]:
        """Return the rows of the evaluation that the experiment asks for, whatever else the run was measured for."""
        asked = self.plan.evaluations.get(kind)
        return () if asked is None else run.evaluated(kind, asked)


def match(plan: Plan, records: Sequence[Record]) -> Outcome:
    """Give each setting of a plan its runs: those with the same config, of whatever seed."""
    groups: dict[frozenset[str], list[PlannedRun]] = {}
    for job in plan.jobs:
        groups.setdefault(job.identities, []).append(job)
    names = plan.layout.names or _varying(plan.jobs)
    settings = [_setting(jobs, names, plan, records) for jobs in groups.values()]
    return Outcome(plan, tuple(_distinct(settings)))


def _varying(jobs: Iterable[PlannedRun]) -> list[str]:
    """Return the keys whose words are not the same in all jobs, in the order in which they come."""
    jobs = list(jobs)
    keys = dict.fromkeys(key for job in jobs for key in job.settings)
    return [key for key in keys if len({job.settings.get(key) for job in jobs}) > 1]


def _setting(jobs: Sequence[PlannedRun], names: Sequence[str], plan: Plan, records: Sequence[Record]) -> Setting:
    (first, *_), layout = jobs, plan.layout
    by_seed: dict[int, list[Record]] = {}
    for record in records:
        if record.identity in first.identities:
            by_seed.setdefault(record.seed, []).append(record)
    jobs_of_seed = {job.seed: job for job in jobs}
    runs, unfinished, repeated = [], [], []
    for seed, candidates in sorted(by_seed.items()):
        best, *others = sorted(candidates, key=lambda r: (r.finished, r.ended, r.id, r.place), reverse=True)
        if best.finished:
            runs.append(best)
            if others:
                repeated.append((best, tuple(others)))
        else:
            unfinished.append(_unfinished(best, jobs_of_seed.get(seed), plan))
    values = _with_rank({key: first.settings[key] for key in names if key in first.settings}, first.config)
    alone = _with_rank({"model": str(first.config["choices"]["model"])}, first.config)
    return Setting(
        label=label_of(values or alone, layout),
        values=values,
        config=first.config,
        runs=tuple(runs),
        asked=len(jobs_of_seed),
        missing=tuple(job for seed, job in jobs_of_seed.items() if seed not in by_seed),
        unfinished=tuple(unfinished),
        repeated=tuple(repeated),
    )


def _unfinished(record: Record, job: PlannedRun | None, plan: Plan) -> Unfinished:
    why = record.state + (f": {record.reason}" if record.reason else "")
    command = plan.train([job]) if job else None
    if record.state == "running":
        command = None
    elif record.state in ("interrupted", "lost") and record.place == "runs":
        command = plan.resume + shlex.quote(record.id)
    elif record.state == "damaged" and record.place == "runs" and record.has_weights:
        command = plan.measure + shlex.quote(record.id)
    return Unfinished(record, why, command, asked=job is not None)


def _with_rank(values: dict[str, str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the values with the rank of a model's channel mixer, which is a part of its name: FP-Mamba-H r=2."""
    rank = look_up(config, RANK)
    if "model" not in values or RANK in values or rank is None:
        return values
    pairs = [[(key, value), *([(RANK, str(rank))] if key == "model" else [])] for key, value in values.items()]
    return dict(pair for own in pairs for pair in own)


def _distinct(settings: Sequence[Setting]) -> list[Setting]:
    """Number labels that are the same, so that no two settings share a line."""
    seen: dict[str, int] = {}
    result = []
    for setting in settings:
        seen[setting.label] = seen.get(setting.label, 0) + 1
        again = seen[setting.label]
        result.append(setting if again == 1 else dataclasses.replace(setting, label=f"{setting.label} ({again})"))
    return result
