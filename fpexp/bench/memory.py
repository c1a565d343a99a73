"""Peak extra memory of some work: how far the resident set of a fresh process grows above its inputs.

The kernel's own high-water mark is reset when the inputs are there and everything is imported, compiled and warmed up
on a tiny case, so that it sees what torch, numba and the packages ask for alike. glibc's allocator is told to give
large blocks back at once, since what it kept from before would be used again unseen. Linux only; None elsewhere.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fpexp.bench.context import child_environment
from fpexp.errors import FpexpError

_LARGE = 2**16  # bytes; smaller blocks come from a heap that is resident already

MOST_SECONDS = 90.0
"""For one process, most of which is its start: 5 to 9 beside two trainings on two cores."""


class OutOfTime(FpexpError):
    """A process took longer than MOST_SECONDS."""


def peak_extra(prepare: Callable[..., Callable[[], object]], **arguments: Any) -> int | None:
    """Return the bytes that the work which `prepare(**arguments)` returns needs beyond what is resident before it.

    `prepare` is a function of a module, its arguments are plain values. Results that the work returns count.
    """
    name = f"{prepare.__module__}:{prepare.__qualname__}"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fpexp.bench.memory", name, json.dumps(arguments)],
            env=child_environment(MALLOC_MMAP_THRESHOLD_=str(_LARGE)),
            capture_output=True,
            text=True,
            check=False,
            timeout=MOST_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise OutOfTime(f"not within {error.timeout:g} s") from error
    if done.returncode:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), f"exit code {done.returncode}")
        raise FpexpError(f"the memory of {name} could not be measured: {reason}")
    extra: int | None = json.loads(done.stdout.splitlines()[-1])
    return extra


def growth(work: Callable[[], object]) -> int | None:
    """Do the work and return how many bytes the resident set grew at most; None where the system does not tell."""
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM <- VmRSS
        before = _status("VmRSS")
    except OSError:
        return None
    kept = work()
    peak = _status("VmHWM")
    del kept
    return max(0, peak - before)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(name: str, arguments: str) -> None:
    """Measure in this process, and print the bytes."""
    module, _, function = name.partition(":")
    work = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    print(json.dumps(growth(work)))


if __name__ == "__main__":
    main(*sys.argv[1:])
