"""What people read while a run goes on: rich on a terminal, plain lines elsewhere or without rich."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from fpexp.run_folder import Row
from fpexp.tracking.tracker import RunStart

GENERATED = ("generated_token_accuracy", "generated_sequence_accuracy")
"""Of answers that the model has written by itself."""

REFRESH = 4  # redraws a second: enough for the eye, next to nothing for two cores that train


def note(message: str) -> None:
    """Tell the user something, on stdout; where nobody can read it, no more: a run's numbers are in its files."""
    try:
        print(message, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(message: str) -> None:
    """Tell the user that something is not as asked for, on stderr."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a rich table on a terminal, aligned columns elsewhere; an empty title is left out."""
    if has_rich_terminal():
        _print_rich_table(title, columns, rows)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = [title] if title else []
    for cells in (columns, *rows):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    note("\n".join(lines))


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Show on stderr which of so many things are done: a bar that rich draws on a terminal, elsewhere a line each."""
    if not has_rich_terminal() or not sys.stderr.isatty():
        done = itertools.count(1)
        yield lambda name: print(f"{next(done)} of {total}: {name}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def print_curve(rows: Sequence[Row]) -> None:
    """Print the length curve as a table, with what only some rows have in columns where it is."""
    columns = [column for column in _CURVE_COLUMNS if column.always or any(column.key in row for row in rows)]
    cells = [[*(_number(row.get(c.key), c.spec) for c in columns), "".join(_trained(row))] for row in rows]
    print_table("accuracy by length", [*(column.title for column in columns), ""], cells)


@dataclass(frozen=True)
class _Column:
    key: str
    title: str
    spec: str
    always: bool = False


_CURVE_COLUMNS = (
    _Column("length", "length", "d", always=True),
    _Column("token_accuracy", "token", ".3f", always=True),
    _Column("last_token_accuracy", "last token", ".3f", always=True),
    _Column("sequence_accuracy", "sequence", ".3f", always=True),
    *(_Column(name, name.removesuffix("_accuracy").replace("_", " "), ".3f") for name in GENERATED),
    _Column("perplexity", "perplexity", ".4g"),
    _Column("byte_perplexity", "of a byte", ".4g"),
    _Column("unigram_perplexity", "unigram", ".4g"),
    _Column("iterations_mean", "iterations", ".1f"),
    _Column("iterations_max", "max", ".0f"),
    _Column("n", "n", "d", always=True),
)


class ConsoleTracker:
    """Header, progress and curve for people; `quiet` prints nothing of them."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._display: _Display | None = None

    def start(self, start: RunStart) -> None:
        """Print what runs, and begin to show how far it is."""
        if self.quiet:
            return
        note("\n".join(_header(start)))
        pace = Pace(start.resumed_from or 0, start.config.training.steps)
        self._display = _Live(pace) if has_rich_terminal() else _Plain(pace)

    def log(self, row: Row) -> None:
        """Show one row."""
        if self._display:
            self._display.log(row)

    def progress(self, step: int) -> None:
        """Move the bar."""
        if self._display:
            self._display.progress(step)

    def finish(self, state: str) -> None:
        """Give the terminal back; the curve's table follows if there is a curve. Harmless when called again."""
        if self._display:
            self._display.finish()
            self._display = None


class Pace:
    """Time spent and left, from what this process has measured itself, validation included.

    The pace counts from the end of the first step, which also compiles and waits for other trackers to start.
    """

    def __init__(self, first: int, total: int) -> None:
        self.first = first
        self.total = total
        self._began = time.monotonic()
        self._first_done: tuple[int, float] | None = None  # step, seconds

    def elapsed(self) -> float:
        """Return the seconds since the start of this process's part of the run."""
        return time.monotonic() - self._began

    def take(self, step: int) -> None:
        """Take note that `step` is done."""
        if self._first_done is None:
            self._first_done = (step, self.elapsed())

    def left(self, step: int) -> float | None:
        """Return the seconds that the steps after `step` will take; None before there is a pace."""
        if self._first_done is None or step <= self._first_done[0]:
            return None
        first, seconds = self._first_done
        return (self.elapsed() - seconds) / (step - first) * max(self.total - step, 0)


class _Display(Protocol):
    def log(self, row: Row) -> None: ...

    def progress(self, step: int) -> None: ...

    def finish(self) -> None: ...


class _Plain:
    """A line for each row."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def log(self, row: Row) -> None:
        if row["kind"] == "train":
            note("  ".join([f"step {row['step']}/{self._pace.total}", _train_text(row), self._times(row["step"])]))
        elif row["kind"] == "validation":
            note(_validation_text(row))
        else:
            note(_curve_text(row))

    def progress(self, step: int) -> None:
        self._pace.take(step)

    def finish(self) -> None:
        pass

    def _times(self, step: int) -> str:
        elapsed = f"{format_duration(self._pace.elapsed())} elapsed"
        left = self._pace.left(step)
        return elapsed if left is None else f"{elapsed}, {format_duration(left)} left"


class _Live:
    """A bar with the newest numbers below it; validations scroll by above."""

    def __init__(self, pace: Pace) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._pace = pace
        self._numbers = self._trained = ""
        self._curve: list[Row] = []
        left = TextColumn("{task.fields[left]}", markup=False)
        self._bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), left)
        self._task = self._bar.add_task("", total=pace.total, completed=pace.first, left="")
        self._live = Live(
            get_renderable=lambda: Group(self._bar, *self._lines()),
            console=Console(highlight=False),
            refresh_per_second=REFRESH,
            redirect_stderr=sys.stderr.isatty(),  # else warnings would go to stdout
        )
        self._live.start()

    def log(self, row: Row) -> None:
        if row["kind"] == "train":
            self._numbers = self._trained = _train_text(row)
        elif row["kind"] == "validation":
            self._live.console.print(_validation_text(row), markup=False)
        else:
            self._curve.append(row)
            self._numbers = _curve_text(row)

    def progress(self, step: int) -> None:
        self._pace.take(step)
        left = self._pace.left(step)
        text = "" if left is None else f"{format_duration(left)} left"
        self._bar.update(self._task, completed=step, left=text)

    def finish(self) -> None:
        self._numbers = self._trained
        self._live.stop()
        if self._curve:
            print_curve(self._curve)

    def _lines(self) -> list[Any]:
        from rich.text import Text

        return [Text(self._numbers, no_wrap=True, overflow="ellipsis")] if self._numbers else []


def has_rich_terminal() -> bool:
    """Tell whether stdout is a terminal that rich can draw on, and rich is there."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb" and importlib.util.find_spec("rich") is not None


def format_duration(seconds: float) -> str:
    """Return m:ss, or h:mm:ss from an hour on."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _print_rich_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))
    Console().print(table)


def _header(start: RunStart) -> list[str]:
    config = start.config
    lines = [
        f"run {start.run.id}",
        f"task {config.choices.task}, model {config.choices.model}, {start.parameters:,} parameters",
        f"device {config.device}, precision {config.precision}",
        *start.notes,
    ]
    return lines if start.resumed_from is None else [*lines, f"resumed from step {start.resumed_from}"]


def _train_text(row: Row) -> str:
    parts = [
        f"loss {_number(row.get('loss'), '.3g')}",
        f"token accuracy {_number(row.get('token_accuracy'), '.2f')} (length {row['length']})",
    ]
    if "iterations_mean" in row:
        parts.append(f"iterations {_number(row['iterations_mean'], '.1f')}")
    return "  ".join(parts)


def _validation_text(row: Row) -> str:
    return "  ".join(
        [
            f"step {row['step']} validation",
            f"loss {_number(row.get('loss'), '.3g')}",
            f"token accuracy {_number(row.get('token_accuracy'), '.3f')}",
            f"sequence {_number(row.get('sequence_accuracy'), '.3f')} (length {row['length']})",
            *_perplexity(row),
        ]
    )


def _curve_text(row: Row) -> str:
    parts = [
        f"length {row['length']}",
        f"token accuracy {_number(row['token_accuracy'], '.3f')}",
        f"last token {_number(row['last_token_accuracy'], '.3f')}",
        f"sequence {_number(row['sequence_accuracy'], '.3f')}",
        *_perplexity(row),
    ]
    if GENERATED[0] in row:
        token, sequence = (_number(row.get(name), ".3f") for name in GENERATED)
        parts.append(f"generated token {token} sequence {sequence}")
    if "iterations_mean" in row:
        most = _number(row.get("iterations_max"), ".0f")
        parts.append(f"iterations {_number(row['iterations_mean'], '.1f')} (max {most})")
    return "  ".join([*parts, f"n {row['n']}", *_trained(row)])


def _trained(row: Row) -> list[str]:
    return ["trained"] if row.get("seen_in_training") else []


def _perplexity(row: Row) -> list[str]:
    if "perplexity" not in row:
        return []
    names = ("perplexity", "byte_perplexity", "unigram_perplexity")
    token, byte, unigram = (_number(row[name], ".4g") for name in names)
    return [f"perplexity {token} (of a byte {byte}, unigram {unigram})"]


def _number(value: Any, spec: str) -> str:
    """Format a number; a dash stands for one that does not exist, such as an accuracy where nothing was scored."""
    return "-" if value is None else format(value, spec)
