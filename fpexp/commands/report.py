"""fpexp report: tables, figures and a page from recorded runs, beside what the paper reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from fpexp.commands.arguments import take
from fpexp.commands.experiments import identify, plan
from fpexp.config.catalogue import check_choice, choices
from fpexp.config.search_path import own_folders
from fpexp.errors import UserError
from fpexp.reporting.benchmark import read_benchmarks
from fpexp.reporting.outcome import Plan
from fpexp.reporting.paper import papers_beside
from fpexp.reporting.record import read_records
from fpexp.reporting.report import Found, Report, make_report
from fpexp.reporting.writing import check_place, write_report
from fpexp.tracking.console import note, print_table, warn


def run(arguments: list[str]) -> int:
    """Write the report of the experiments that are named, or of all; runs that are not there are its content too."""
    named, words = take(arguments, "experiment")
    out, words = take(words, "out")
    where, words = take(words, "results_dir")
    results_dir = Path(where or "results")
    folder = Path(out) if out else results_dir / "report"
    names = list(dict.fromkeys(named.split(","))) if named is not None else []
    own = own_folders(words)
    for name in names:
        check_choice("experiment", name, own)
    for word in words:
        if "=" not in word:
            raise UserError(f"'{word}' is not understood; write experiment=<name>, out=<folder> or <key>=<value>")
    check_place(folder)
    every = choices("experiment", own)
    plans, problems = _plans(names, every, words, results_dir)
    found = _find(results_dir, every, problems)
    report = make_report(plans, found, whole=not names)
    write_report(report, folder)
    _say(report, folder, bool(found.records), results_dir)
    return 0


def _plans(
    names: Sequence[str], every: Iterable[str], words: Sequence[str], results_dir: Path
) -> tuple[list[Plan], list[str]]:
    """Return the plans of named experiments; of all, those that can be composed, and what is wrong with the others."""
    if names:
        return [plan(name, words, results_dir) for name in names], []
    plans, problems = [], []
    for name in every:
        try:
            made = plan(name, words, results_dir)
        except UserError as error:
            problems.append(f"experiment={name}: {error}")
            continue
        if not made.layout.on_request:
            plans.append(made)
    return sorted(plans, key=lambda made: (made.layout.paper is None, _natural(made.name))), problems


def _find(results_dir: Path, every: Iterable[str], problems: Sequence[str]) -> Found:
    benchmarks, unread = read_benchmarks(results_dir)
    problems = [*problems, *unread]
    papers = {}
    try:
        papers = papers_beside(results_dir, every)
    except UserError as error:
        problems.append(str(error))
    return Found(read_records(results_dir, identify), benchmarks, papers, problems)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort fig4 before fig11."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _say(report: Report, folder: Path, recorded: bool, results_dir: Path) -> None:
    rows = [[section.plan.name, section.done, section.plan.title] for section in report.sections]
    if rows:
        print_table("experiments", ["experiment", "finished", "what"], rows)
    if not recorded:
        note(f"no runs under {results_dir}/runs or {results_dir}/reference/runs yet: the report says how to make them")
    for problem in report.problems:
        warn(problem)
    note(f"report: {folder / 'report.html'}")
