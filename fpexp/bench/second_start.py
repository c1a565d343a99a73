"""Wall time of `fpexp train` from the start of its process to its first step, with kernels compiled before.

The first start has an empty kernel cache of its own and compiles into it; the second ones find it filled, and the check
is that they leave it as it was, to each file's size and time: nothing was compiled. All come from a warm disk, since
the benchmark itself has loaded the same libraries.

Roofline: nothing is computed. What is paid are the interpreter, the imports of torch, numba and Hydra, the composition
of a config, reading machine code back from disk, and one step of a small batch. Of the compiling, the first start shows
all that a cache saves.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from fpexp.bench.context import Context, child_environment
from fpexp.bench.measure import Check, Contender, Target
from fpexp.errors import FpexpError

AT_MOST = 8.0
"""Seconds to the first step."""

FIRST_STEP = "step 1/1"
"""How the console's line of the first step begins, where stdout is no terminal."""


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark."""

    model: str = "fp_mamba_k"


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """A first start, made once, and second starts."""
    kernels = context.scratch / "kernels"
    words = _words(sizes.model, context.scratch / "results", context.threads)
    start = partial(seconds_to_first_step, words, kernels)
    first = cache(start)
    group = " ".join(["fpexp", *words[:4]])
    yield Contender("first start", group, first, once=True, numbers=lambda: {"cache_files": len(contents(kernels))})
    yield Contender(
        "second start",
        group,
        start,
        check=lambda: [_check_cache(kernels, first, start)],
        baseline="first start",
        target=Target("median_s", at_most=AT_MOST),
    )


def _words(model: str, results: Path, threads: int) -> list[str]:
    """One step, and after it an evaluation of next to nothing."""
    words = ["train", "task=a4", f"model={model}", "training.steps=1", "device=cpu", f"threads={threads}"]
    words += [f"results_dir={results}", "evaluation.lengths=[2]", "evaluation.samples=8"]
    return [*words, "evaluation.validation_samples=8"]


def seconds_to_first_step(words: list[str], kernels: Path) -> float:
    """Run `fpexp` to its end in a process of its own; return the seconds to the line of its first step."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fpexp", *words],
        env=child_environment(NUMBA_CACHE_DIR=str(kernels)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seconds, last = None, ""
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if seconds is None and line.startswith(FIRST_STEP):
                    seconds = time.perf_counter() - began
                last = line.strip() or last
        except BaseException:  # a signal: its run goes with us
            process.kill()
            raise
    if process.returncode or seconds is None:
        raise FpexpError(f"`fpexp {' '.join(words)}` ended with exit code {process.returncode}: {last}")
    return seconds


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of modification of every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


def _check_cache(kernels: Path, first: Callable[[], float], second: Callable[[], float]) -> Check:
    first()
    before = contents(kernels)
    second()
    changed = before.items() ^ contents(kernels).items()
    return Check("files of the kernel cache that a second start changed:", len({name for name, _ in changed}), 0)
