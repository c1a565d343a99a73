"""What CPU backends share: kernels that survive a cache they cannot write, and the threads that run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import torch

from fpexp.ops.backend import say_once

_SLOW = 3.0
"""Seconds after which a kernel is being compiled and not read from disk."""

_LEAST_WORK = 2**19
"""Inner steps for which a thread is worth waking: 0.1 ms of the selective scan forward, 0.25 ms backward."""

_PIECES = 4
"""Pieces of work a thread, so that a core that is busy with something else does not hold up the rest."""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return what kernels compute in: float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flat(tensor: torch.Tensor) -> Any:
    """Return a tensor's numbers as an array of one dimension: its own memory where it is contiguous.

    Not by `Tensor.numpy`, which pins the size of the memory: FSDP lets go of a weight's by making it empty.
    """
    return np.from_dlpack(tensor.detach().contiguous().view(-1))


class Kernel:
    """A compiled loop over independent tasks, `function(first, last, *arguments)`; `jit` is numba's `njit`.

    The machine code is kept on disk (NUMBA_CACHE_DIR, __pycache__ beside the source or the user's cache folder).
    It is compiled anew when a file of `fpexp.ops` changes, but for Triton's. Where no folder can be written, every
    process compiles for itself, and says so.
    """

    def __init__(self, jit: Callable[..., Any], function: Callable[..., None], **options: Any) -> None:
        self._called = False
        self._compile_in_memory = lambda: jit(**options)(function)
        try:
            self._compiled = _stamp(jit(cache=True, **options)(function))
        except RuntimeError:  # numba's "no locator available"
            self._give_up_cache("no folder that can be written")

    def run(self, tasks: int, work: int, *arguments: Any) -> None:
        """Do tasks 0 to `tasks`, of `work` inner steps in all, on at most torch's number of threads.

        A task must write where no other does. These are threads of Python and not numba's: a kernel holds no lock
        of Python's, and neither a fork nor two callers at once end the process, as they do with OpenMP and numba's
        own pool; nothing spins while torch computes.
        """
        threads = min(torch.get_num_threads(), tasks, work // _LEAST_WORK)
        if threads > 1 or not self._called:
            with nullcontext() if self._called else _told_when_slow():
                self(0, 0, *arguments)  # compiles, or reads what is kept; for other types than before in this thread
            self._called = True
        if threads <= 1:
            self(0, tasks, *arguments)
            return
        pieces = min(tasks, _PIECES * threads)
        bounds = [tasks * i // pieces for i in range(pieces + 1)]
        numbers = iter(range(pieces))

        def work_off() -> None:
            for i in numbers:
                self(bounds[i], bounds[i + 1], *arguments)

        helpers = [_pool().submit(work_off) for _ in range(threads - 1)]
        try:
            work_off()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()

    def __call__(self, first: int, last: int, *arguments: Any) -> None:
        """Do tasks `first` to `last` (not included) in this thread."""
        try:
            self._compiled(first, last, *arguments)
        except OSError as error:  # a kernel does no input or output: the cache could not be read or written
            self._give_up_cache(str(error.strerror))
            self._compiled(first, last, *arguments)

    def _give_up_cache(self, reason: str) -> None:
        say_once(
            f"compiled kernels cannot be kept on disk ({reason}): every start compiles again, for some seconds; "
            "set NUMBA_CACHE_DIR to a folder with some space that can be written"
        )
        self._compiled = self._compile_in_memory()


def _stamp(compiled: Any) -> Any:
    """Let what is cached be valid for all that kernels are made of: numba looks at the kernel's own file alone."""
    if hasattr(compiled, "_cache"):
        files = [file for file in sorted(Path(__file__).parent.rglob("*.py")) if file.name != "triton.py"]
        sources = [file.stat() for file in files]
        compiled._cache._cache_file._source_stamp = tuple((stat.st_mtime, stat.st_size) for stat in sources)
    return compiled


@contextmanager
def _told_when_slow() -> Iterator[None]:
    timer = Timer(_SLOW, say_once, ["compiling kernels: up to two minutes, once for each kind of model"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


_pools: list[ThreadPoolExecutor] = []


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="fpexp-ops"))
    return _pools[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)  # the threads stay with the parent
