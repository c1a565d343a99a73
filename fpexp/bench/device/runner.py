"""Runs the parts of the check, each in processes of its own that may fail, hang or crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fpexp.bench.context import child_environment

STDERR = 2
"""Stdout is for the table."""

POLL = 0.05
"""Seconds between two looks at a child."""

START = 45.0
"""Seconds that a child may take to import torch and find the device."""

REHEARSAL = {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning:triton.runtime.interpreter"}
"""Variables of its children: NumPy warns of infinities and of NaN in unused memory, which kernels mask as on a GPU."""

Row = dict[str, Any]
"""A finding (see `part.Finding`), with `part`, `item` and `error`, which is empty where there is none."""


@dataclass(frozen=True)
class Part:
    """A module with `items(setup)`, seconds for all of them and for one, and how many processes share them."""

    name: str
    module: str
    limit: float
    item_limit: float = 60.0
    lanes: int = 1


def run_part(part: Part, left: float, rehearse: bool) -> list[Row]:
    """Do a part in at most its own limit and the seconds that are left."""
    end = time.monotonic() + min(part.limit, left)
    count = 1 if rehearse else part.lanes
    with ThreadPoolExecutor(count) as pool:
        lanes = pool.map(lambda lane: list(_run_lane(part, f"{lane}/{count}", end, rehearse)), range(count))
        return [{"part": part.name, **row} for rows in lanes for row in rows]


def _run_lane(part: Part, lane: str, end: float, rehearse: bool) -> Iterator[Row]:
    """Do a lane's items; where a child dies or hangs over one, another goes on with the next."""
    skip = 0
    while True:
        steps, how = _do(part, lane, skip, end, rehearse)
        yield from _rows(steps, how)
        names: list[str] = next((step["items"] for step in steps if "items" in step), [])
        begun = sum("began" in step for step in steps)
        skip += begun
        if skip >= len(names):
            return
        if not begun or time.monotonic() >= end:
            yield from (_failure(name, "not tried: the part's time was over") for name in names[skip:])
            return


def _do(part: Part, lane: str, skip: int, end: float, rehearse: bool) -> tuple[list[dict[str, Any]], str]:
    """Return the steps that a child has written down, and how it ended; empty where all went well."""
    with tempfile.TemporaryDirectory(prefix="fpexp-device-") as folder:
        log = Path(folder) / "steps"
        log.touch()
        words = [part.module, str(log), lane, str(skip), str(rehearse)]
        command = [sys.executable, "-m", "fpexp.bench.device.child", *words]
        how = _watch(command, log, end, part.item_limit, rehearse)
        whole = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole], how


def _rows(steps: Sequence[Mapping[str, Any]], how: str) -> Iterator[Row]:
    """Yield what a child has found; what it was at when it ended has failed."""
    under_way: str | None = ""
    for step in steps:
        under_way = step.get("began")
        if "failed" in step:
            yield _failure("", step["failed"])
        elif "error" in step:
            yield _failure(step["done"], step["error"])
        elif "rows" in step:
            yield from ({"item": step["done"], "error": "", **row} for row in step["rows"])
    if under_way is not None:
        yield _failure(under_way, how or "ended without a word")


def _failure(item: str, error: str) -> Row:
    return {"item": item, "error": error, "what": item, "found": "", "against": "", "good": False, "numbers": {}}


def _watch(command: list[str], log: Path, end: float, item_limit: float, rehearse: bool) -> str:
    """Wait for a child; return how it ended, or empty where all went well. Its whole group ends with it."""
    environment = child_environment(**(REHEARSAL if rehearse else {}))
    child = subprocess.Popen(command, env=environment, start_new_session=True, stdout=STDERR)
    size, moved, how = 0, time.monotonic(), ""
    try:
        while child.poll() is None and not how:
            time.sleep(POLL)
            now = time.monotonic()
            if log.stat().st_size != size:
                size, moved = log.stat().st_size, now
            if now >= end:
                how = "stopped: the part's time was over"
            elif now - moved >= (item_limit if size else max(item_limit, START)):
                how = f"stopped after {item_limit:g} s" if size else "stopped: it did not begin"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver is left behind
            child.wait(5)
    return how or _told(child.returncode)


def _told(code: int | None) -> str:
    if not code:
        return ""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def run_parts(
    parts: Sequence[Part], budget: float, rehearse: bool, after: Callable[[Part, list[Row]], None]
) -> list[Row]:
    """Do all parts in order; `after` is called with the rows so far when one is over."""
    end, rows = time.monotonic() + budget, []
    for part in parts:
        rows += run_part(part, end - time.monotonic(), rehearse)
        after(part, list(rows))
    return rows
