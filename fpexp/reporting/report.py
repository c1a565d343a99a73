"""All experiments of a report with what is recorded of them, and what is to be said beside their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fpexp.reporting.benchmark import Benchmark
from fpexp.reporting.chart import Chart
from fpexp.reporting.measured import metric_of, own_lengths
from fpexp.reporting.outcome import Outcome, Plan, PlannedBenchmark, Setting, match
from fpexp.reporting.panels import charts_of
from fpexp.reporting.paper import Paper
from fpexp.reporting.record import EVALUATIONS, Record, number
from fpexp.reporting.table import NOTHING, REPORTED, Table, count, duration, runs_of, table_of, trained

KEY_NUMBERS = "accuracy of tokens, of text perplexity"


@dataclass(frozen=True)
class Section:
    """One experiment: its table, its runs, its figures, and what is missing, unfinished or there twice.

    An experiment of benchmarks has these in the place of runs.
    """

    outcome: Outcome
    table: Table
    runs: Table
    charts: tuple[Chart, ...]
    benchmarks: tuple[Benchmark, ...]
    missing: tuple[str, ...]  # commands
    unfinished: tuple[tuple[str, str | None], ...]  # what it is, and the command that mends it
    remarks: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The experiment."""
        return self.outcome.plan

    @property
    def done(self) -> str:
        """How many of its runs or benchmarks are there."""
        asked = self.plan.benchmarks
        if asked:
            return f"{len(self.benchmarks)} of {len(asked)}"
        return f"{self.outcome.done} of {self.outcome.asked}"


@dataclass(frozen=True)
class Found:
    """What is recorded under a results folder; `problems` are one line each."""

    records: Sequence[Record]
    benchmarks: Mapping[str, Sequence[Benchmark]]  # of each name the newest first
    papers: Mapping[str, Paper]  # of no experiment
    problems: Sequence[str]


@dataclass(frozen=True)
class Report:
    """`benchmarks`, `papers` and `others` (runs) are what belongs to none of the experiments, in a whole report."""

    sections: tuple[Section, ...]
    benchmarks: tuple[Benchmark, ...]
    papers: Table | None
    others: Table | None
    problems: tuple[str, ...]


def make_report(plans: Sequence[Plan], found: Found, whole: bool) -> Report:
    """Give every experiment what is recorded of it; a `whole` report also has what belongs to none."""
    sections = tuple(_section(plan, found) for plan in plans)
    known = frozenset(identity for plan in plans for job in plan.jobs for identity in job.identities)
    told = [record for record in found.records if whole or record.identity is None or record.identity in known]
    lines = [f"{record.place}/{record.id}: {problem}" for record in told for problem in record.problems]
    problems = (*found.problems, *lines)
    if not whole:
        return Report(sections, (), None, None, problems)
    used = {planned.name for plan in plans for planned in plan.benchmarks}
    benchmarks = tuple(newest for name, (newest, *_) in found.benchmarks.items() if name not in used)
    rest = [record for record in found.records if record.identity is not None and record.identity not in known]
    return Report(sections, benchmarks, _papers(found.papers), _others(rest), problems)


def _section(plan: Plan, found: Found) -> Section:
    outcome = match(plan, found.records)
    missing = [plan.train(setting.missing) for setting in outcome.settings if setting.missing]
    unfinished = [
        (
            f"{entry.record.place}/{entry.record.id} ({setting.label}, seed {entry.record.seed}): {entry.why}",
            entry.command,
        )
        for setting in outcome.settings
        for entry in setting.unfinished
    ]
    unfinished += _unmeasured(outcome)
    benchmarks = []
    for planned in plan.benchmarks:
        made = found.benchmarks.get(planned.name, [])
        whole = [benchmark for benchmark in made if not benchmark.lacks(planned)]
        benchmarks += whole[:1]
        if not made:
            missing.append(planned.command)
        elif not whole:
            unfinished.append((_partial(made[0], planned), planned.command))
    return Section(
        outcome=outcome,
        table=table_of(outcome),
        runs=runs_of(outcome),
        charts=charts_of(outcome),
        benchmarks=tuple(benchmarks),
        missing=tuple(missing),
        unfinished=tuple(unfinished),
        remarks=tuple(_repeated(setting, *entry) for setting in outcome.settings for entry in setting.repeated),
    )


def _partial(benchmark: Benchmark, planned: PlannedBenchmark) -> str:
    lacks = benchmark.lacks(planned)
    return f"{benchmark.file}: lacks {len(lacks)} of the {len(planned.needed)} numbers of this table, first {lacks[0]}"


def _unmeasured(outcome: Outcome) -> list[tuple[str, str | None]]:
    """Return the runs that a figure needs another evaluation of; what is under reference/ has no weights for it."""
    plan = outcome.plan
    kinds = [figure.kind for figure in plan.layout.figures if figure.kind in EVALUATIONS]
    return [
        (
            f"{run.place}/{run.id}: no evaluation of {kind}"
            + ("" if kind in plan.evaluations else ", which the experiment's sweep.evaluate does not ask for"),
            plan.command if run.place == "runs" and kind in plan.evaluations else None,
        )
        for run in outcome.runs
        for kind in kinds
        if not outcome.evaluated(run, kind) and any(number(row, "iterations_mean") is not None for row in run.curve)
    ]


def _repeated(setting: Setting, used: Record, others: Sequence[Record]) -> str:
    names = ", ".join(f"{other.place}/{other.id} ({other.state})" for other in others)
    return (
        f"{setting.label}, seed {used.seed}: {used.place}/{used.id} counts, as the newest finished run of this config; "
        f"not {names}"
    )


def _papers(papers: Mapping[str, Paper]) -> Table | None:
    rows = [
        (name, paper.source, label, paper.measure, text)
        for name, paper in papers.items()
        for label, text in [*(("", claim) for claim in paper.claims), *((row.label, row.text) for row in paper.rows)]
    ]
    return Table(("name", "source", "of", "measure", REPORTED), tuple(rows)) if rows else None


def _others(records: Sequence[Record]) -> Table | None:
    rows = []
    for record in records:
        choices = record.config["choices"]
        state = record.state + (f": {record.reason}" if record.reason else "")
        names = (str(choices[key]) for key in ("task", "model", "scale"))
        about = (str(record.seed), count(record.steps), duration(record.seconds), trained(record.config, [record]))
        rows.append((f"{record.place}/{record.id}", *names, *about, _key_numbers(record), state))
    columns = ("run", "task", "model", "scale", "seed", "steps", "wall time", "trained to", KEY_NUMBERS, "state")
    return Table(columns, tuple(rows)) if rows else None


def _key_numbers(record: Record) -> str:
    """Return accuracies, or perplexities of text, at about 1, 2 and 4 times the training length."""
    rows = [record.by_length[length] for length in own_lengths(record.config) if length in record.by_length]
    found = [(number(row, metric_of(rows)), row["length"]) for row in rows]
    return ", ".join(f"{value:.3f} at {length}" for value, length in found if value is not None) or NOTHING
