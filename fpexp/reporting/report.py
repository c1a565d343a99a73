"""All experiments of a report with what is recorded of them, and what is to be said beside their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fpexp.reporting.chart import Chart, chart_of
from fpexp.reporting.outcome import Outcome, Plan, match
from fpexp.reporting.paper import Paper
from fpexp.reporting.record import Record
from fpexp.reporting.table import REPORTED, Table, runs_of, table_of


@dataclass(frozen=True)
class Section:
    """One experiment: its table, its runs, its figure, and what is missing, unfinished or there twice."""

    outcome: Outcome
    table: Table
    runs: Table
    chart: Chart | None
    missing: tuple[str, ...]  # commands
    unfinished: tuple[tuple[str, str | None], ...]  # what it is, and the command that mends it
    remarks: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The experiment."""
        return self.outcome.plan


@dataclass(frozen=True)
class Report:
    """`others` are runs of none of the experiments, `papers` what is reported of none; `problems` are a line each."""

    sections: tuple[Section, ...]
    others: Table | None
    papers: Table | None
    problems: tuple[str, ...]


def make_report(plans: Sequence[Plan], records: Sequence[Record], problems: Sequence[str]) -> Report:
    """Match plans and records, for a report of these experiments alone."""
    return _report(plans, records, problems, {}, whole=False)


def make_whole_report(
    plans: Sequence[Plan], records: Sequence[Record], problems: Sequence[str], papers: Mapping[str, Paper]
) -> Report:
    """Match plans and records, and list the runs and the `papers` that belong to none of the experiments too."""
    return _report(plans, records, problems, papers, whole=True)


def _report(
    plans: Sequence[Plan],
    records: Sequence[Record],
    problems: Sequence[str],
    papers: Mapping[str, Paper],
    whole: bool,
) -> Report:
    sections = tuple(_section(match(plan, records)) for plan in plans)
    known = frozenset(identity for plan in plans for job in plan.jobs for identity in job.identities)
    told = [record for record in records if whole or record.identity is None or record.identity in known]
    lines = [f"{record.place}/{record.id}: {problem}" for record in told for problem in record.problems]
    rest = [r for r in records if r.identity is not None and r.identity not in known] if whole else []
    return Report(sections, _others(rest) if rest else None, _papers(papers), (*problems, *lines))


def _section(outcome: Outcome) -> Section:
    unfinished = [
        (
            f"{entry.record.place}/{entry.record.id} ({setting.label}, seed {entry.record.seed}): {entry.why}",
            entry.command,
        )
        for setting in outcome.settings
        for entry in setting.unfinished
    ]
    remarks = []
    for setting in outcome.settings:
        for used, others in setting.repeated:
            names = ", ".join(f"{other.place}/{other.id} ({other.state})" for other in others)
            remarks.append(
                f"{setting.label}, seed {used.seed}: {used.place}/{used.id} counts, as the newest finished run of this "
                f"config; not {names}"
            )
    return Section(
        outcome=outcome,
        table=table_of(outcome),
        runs=runs_of(outcome),
        chart=chart_of(outcome),
        missing=tuple(job.command for setting in outcome.settings for job in setting.missing),
        unfinished=tuple(unfinished),
        remarks=tuple(remarks),
    )


def _papers(papers: Mapping[str, Paper]) -> Table | None:
    rows = [
        (name, paper.source, label, paper.measure, text)
        for name, paper in papers.items()
        for label, text in [*(("", claim) for claim in paper.claims), *((row.label, row.text) for row in paper.rows)]
    ]
    return Table(("name", "source", "of", "measure", REPORTED), tuple(rows)) if rows else None


def _others(records: Sequence[Record]) -> Table:
    rows = []
    for record in records:
        choices = record.config["choices"]
        state = record.state + (f": {record.reason}" if record.reason else "")
        names = (str(choices[key]) for key in ("task", "model", "scale"))
        rows.append((f"{record.place}/{record.id}", *names, str(record.seed), state))
    return Table(("run", "task", "model", "scale", "seed", "state"), tuple(rows))
