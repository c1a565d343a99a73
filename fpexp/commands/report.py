"""fpexp report: tables, figures and a page from recorded runs, beside what the paper reports."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path

from fpexp.commands.arguments import take
from fpexp.commands.experiments import identify, plan
from fpexp.config.catalogue import check_choice, choices
from fpexp.config.search_path import own_folders
from fpexp.errors import FpexpError, UserError
from fpexp.reporting.benchmark import read_benchmarks
from fpexp.reporting.outcome import Plan
from fpexp.reporting.paper import papers_beside
from fpexp.reporting.record import read_records
from fpexp.reporting.report import Found, Report, make_report
from fpexp.reporting.writing import check_place, write_report
from fpexp.tracking.console import note, print_table, progress, warn

Composer = Callable[[str], Plan | UserError]

FOR_A_PROCESS = 4
"""Experiments that are composed while another process starts."""


def run(arguments: list[str]) -> int:
    """Write the report of the experiments that are named, or of all; runs that are not there are its content too."""
    named, words = take(arguments, "experiment")
    out, words = take(words, "out")
    where, words = take(words, "results_dir")
    results_dir = Path(where or "results")
    folder = Path(out) if out else results_dir / "report"
    names = list(dict.fromkeys(named.split(","))) if named is not None else []
    own = own_folders(words)
    every = choices("experiment", own)
    for name in names:
        _check_experiment(name, every, own)
    for word in words:
        if "=" not in word:
            raise UserError(f"'{word}' is not understood; write experiment=<name>, out=<folder> or <key>=<value>")
    check_place(folder)
    plans, problems = _plans(names, every, words, results_dir)
    found = _find(results_dir, every, problems)
    report = make_report(plans, found, whole=not names)
    write_report(report, folder)
    _say(report, folder, bool(found.records), results_dir)
    return 0


def _check_experiment(name: str, known: Iterable[str], own: Sequence[Path]) -> None:
    """Raise a `UserError` for an unknown name; the beginning of one, such as fig4, is enough to be told the whole."""
    begun = [whole for whole in known if whole.startswith(f"{name}_")] or [w for w in known if w.startswith(name)]
    if name and name not in known and begun:
        raise UserError(f"unknown experiment '{name}'; did you mean '{begun[0]}'? ({', '.join(known)})")
    check_choice("experiment", name, own)


def _plans(
    names: Sequence[str], every: Iterable[str], words: Sequence[str], results_dir: Path
) -> tuple[list[Plan], list[str]]:
    """Return the plans of named experiments; of all, those that can be composed, and what is wrong with the others."""
    made = _compose(names or list(every), words, results_dir)
    plans = [one for one in made.values() if isinstance(one, Plan)]
    errors = {name: one for name, one in made.items() if isinstance(one, UserError)}
    if not names:
        shown = [one for one in plans if not one.layout.on_request]
        problems = [f"experiment={name}: {error}" for name, error in errors.items()]
        return sorted(shown, key=lambda one: (one.layout.paper is None, _natural(one.name))), problems
    for error in errors.values():
        raise error
    return plans, []


def _compose(names: Sequence[str], words: Sequence[str], results_dir: Path) -> dict[str, Plan | UserError]:
    """Compose experiments by name, many of them in several processes: Hydra takes most of a report's time."""
    compose = partial(_composed, words=words, results_dir=results_dir)
    if len(names) == 1:
        return {names[0]: compose(names[0])}
    made = {}
    with progress(len(names)) as tell:
        for name, one in _in_processes(compose, names):
            made[name] = one
            tell(name)
    return {name: made[name] for name in names}


def _in_processes(compose: Composer, names: Sequence[str]) -> Iterator[tuple[str, Plan | UserError]]:
    """Yield experiments as they are done. Processes are forks of one that has only imported: ours may have threads.

    A Ctrl-C ends them at once, without a word.
    """
    processes = min(os.cpu_count() or 1, len(names) // FOR_A_PROCESS)
    if processes < 2:
        yield from ((name, compose(name)) for name in names)
        return
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([plan.__module__])
    pool = ProcessPoolExecutor(processes, server, signal.signal, (signal.SIGINT, signal.SIG_DFL))
    try:
        waiting = {pool.submit(compose, name): name for name in names}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    except BrokenProcessPool as error:
        raise FpexpError("a process that composes experiments was killed; name fewer of them") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _composed(name: str, words: Sequence[str], results_dir: Path) -> Plan | UserError:
    """Return a plan, or what is wrong with it."""
    try:
        return plan(name, words, results_dir)
    except UserError as error:
        return error


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
    note(f"report: {folder / 'report.html'}; report.md, csv/ and figures/ beside it")
