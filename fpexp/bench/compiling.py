"""Triton's compiler in several processes: each launch that differs from the others is compiled once.

What it leaves in Triton's cache is found there by later calls, and by training on such a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import Any, NamedTuple

import torch

from fpexp.bench.launches import KERNELS, Shape
from fpexp.bench.progress import Progress


class Code(NamedTuple):
    """A launch to compile, by what it is made from: kernels, the launch's name, shape, type and architecture."""

    kernels: str
    launch: str
    shape: Shape
    dtype: str
    architecture: int


class Compiled(NamedTuple):
    """How long it took, `fpexp.ops.launch.triton.Usage`, and why it failed; empty where it did not."""

    seconds: float
    usage: Any
    failure: str = ""


def why_not_compiled() -> str:
    """Return why kernels cannot be compiled in this process; empty where they can."""
    if os.environ.get("TRITON_INTERPRET"):
        return "TRITON_INTERPRET is set: there are no kernels to compile"
    try:
        importlib.import_module("fpexp.ops.launch.triton")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"triton does not import ({error}): pip install triton"
    return ""


def compile_all(codes: Mapping[Code, str], processes: int) -> dict[Code, Compiled]:
    """Compile all, those with the same key and architecture once; tell how far it is where that takes long."""
    first: dict[tuple[str, int], Code] = {}
    for code, key in codes.items():
        first.setdefault((key, code.architecture), code)
    found = _in_processes(list(first.values()), processes)
    return {code: found[first[key, code.architecture]] for code, key in codes.items()}


def compile_one(code: Code) -> Compiled:
    """Compile in this process."""
    began = time.perf_counter()
    try:
        launch = KERNELS[code.kernels].launches(code.shape, getattr(torch, code.dtype))[code.launch]
        usage = launch.compile(code.architecture)
    except Exception as error:  # of Triton's compiler, which raises errors of many kinds
        return Compiled(
            0.0, None, f"does not compile: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}"
        )
    return Compiled(time.perf_counter() - began, usage)


def _in_processes(codes: Sequence[Code], processes: int) -> dict[Code, Compiled]:
    """Each process begins anew: a fork would take torch's threads along without their locks."""
    pool = ProcessPoolExecutor(
        processes,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    with contextlib.ExitStack() as at_end:
        at_end.callback(pool.shutdown, wait=False, cancel_futures=True)
        waiting: dict[Future[Compiled], Code] = {pool.submit(compile_one, code): code for code in codes}
        found: dict[Code, Compiled] = {}
        say = Progress()
        for future in as_completed(waiting):
            found[waiting[future]] = future.result()
            say(f"compiled {len(found)} of {len(codes)}")
    return found
