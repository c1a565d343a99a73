"""Kernels: pieces of work over threads, and caches that fail."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_python

import fpexp
from fpexp.ops import backend
from fpexp.ops.kernel import Kernel

LARGE = 2**30


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Let things be said again, and give torch its threads back."""
    before = torch.get_num_threads()
    backend.say_once.cache_clear()
    yield
    backend.say_once.cache_clear()
    torch.set_num_threads(before)


def plain(cache: bool = False) -> Callable[..., Any]:
    """A `jit` that compiles nothing."""
    return lambda function: function


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [1, 2, 7, 100])
@pytest.mark.parametrize("work", [0, LARGE])
def test_every_task_is_done_once(tasks: int, threads: int, work: int) -> None:
    torch.set_num_threads(threads)
    done: list[int] = []
    kernel = Kernel(plain, lambda first, last, out: out.extend(range(first, last)))
    kernel.run(tasks, work, done)
    assert sorted(done) == list(range(tasks))


def test_one_thread_is_the_caller() -> None:
    torch.set_num_threads(1)
    seen: list[threading.Thread] = []
    Kernel(plain, lambda first, last: seen.append(threading.current_thread())).run(50, LARGE)
    assert seen == [threading.current_thread()] * 2  # the first call, of no task, compiles


def test_an_error_in_a_helper_is_raised() -> None:
    torch.set_num_threads(2)
    helping = threading.Event()

    def fail_in_helpers(first: int, last: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            helping.set()
            raise ArithmeticError("in a helper")
        if first < last:
            assert helping.wait(timeout=10)

    with pytest.raises(ArithmeticError, match="in a helper"):
        Kernel(plain, fail_in_helpers).run(8, LARGE)


def test_no_folder_for_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """numba's words at the time of decoration."""

    def jit(cache: bool = False) -> Callable[..., Any]:
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    done: list[int] = []
    for _ in range(2):
        Kernel(jit, lambda first, last: done.append(last))(0, 3)
    assert done == [3, 3]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no folder that can be written" in record.getMessage()
    assert "NUMBA_CACHE_DIR" in record.getMessage()


def test_a_full_disk_while_the_cache_is_written(caplog: pytest.LogCaptureFixture) -> None:
    def jit(cache: bool = False) -> Callable[..., Any]:
        def compiled(function: Callable[..., None]) -> Callable[..., None]:
            def call(first: int, last: int) -> None:
                if cache:
                    raise OSError(28, "No space left on device")
                function(first, last)

            return call

        return compiled

    done: list[int] = []
    for _ in range(2):
        kernel = Kernel(jit, lambda first, last: done.append(last))
        kernel(0, 3)
        kernel(0, 4)
    assert done == [3, 4, 3, 4]
    assert ["No space left" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_has_threads_of_its_own() -> None:
    """A forked process that used the parent's pool would wait for ever."""
    torch.set_num_threads(2)
    done: list[int] = []
    kernel = Kernel(plain, lambda first, last: done.extend(range(first, last)))
    kernel.run(8, LARGE)
    child = os.fork()
    if not child:
        done.clear()
        kernel.run(8, LARGE)
        os._exit(sorted(done) != list(range(8)))
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The package where its files may be changed."""
    ignored = shutil.ignore_patterns("__pycache__", "conf")
    return Path(shutil.copytree(Path(fpexp.__file__).parent, tmp_path / "fpexp", ignore=ignored))


TINY_KERNEL = """
from numba import njit
from fpexp.ops.kernel import Kernel
from fpexp.ops.simd.cpu import copy

def _copy(first, last, source, target):
    copy(source, first, target, first, last - first)

kernel = Kernel(njit, _copy)
"""

RUN_TINY_KERNEL = """
import numpy as np
from fpexp.ops.tiny.cpu import kernel
target = np.zeros(3)
kernel(0, 3, np.arange(3.0), target)
stats = kernel._compiled.stats
print(*target, "compiled", sum(stats.cache_misses.values()), "loaded", sum(stats.cache_hits.values()))
"""


def test_a_change_in_a_helper_compiles_anew(copied: Path) -> None:
    """numba itself looks at the kernel's own file alone, and would go on with the helper of before.

    What is Triton's is no helper of a CPU's kernel.
    """
    tiny, helper = copied / "ops" / "tiny", copied / "ops" / "simd" / "cpu.py"
    tiny.mkdir()
    (tiny / "cpu.py").write_text(TINY_KERNEL)

    def run() -> str:
        answer = run_python(RUN_TINY_KERNEL, copied.parent, PYTHONPATH=str(copied.parent), NUMBA_CACHE_DIR="cache")
        assert (answer.code, answer.err) == (0, "")
        return answer.out

    assert run() == "0.0 1.0 2.0 compiled 1 loaded 0\n"
    with (copied / "ops" / "mixers" / "triton.py").open("a") as file:
        file.write("# longer\n")
    assert run() == "0.0 1.0 2.0 compiled 0 loaded 1\n"
    before = helper.read_text()
    line = "        target[to + i] = source[at + i]\n"
    assert before.count(line) == 1
    helper.write_text(before.replace(line, "        target[to + i] = source[at + i] + 5\n"))
    assert run() == "5.0 6.0 7.0 compiled 1 loaded 0\n"


IMPORT_KERNELS = """
import importlib, pathlib, fpexp.ops
from fpexp.ops.kernel import Kernel
root = pathlib.Path(fpexp.ops.__path__[0])
modules = [importlib.import_module(f"fpexp.ops.{file.parent.name}.cpu") for file in sorted(root.glob("*/cpu.py"))]
kernels = {id(k): k for module in modules for k in vars(module).values() if isinstance(k, Kernel)}.values()
print(len(kernels), {type(kernel._compiled._cache).__name__ for kernel in kernels})
"""


def test_no_kernel_can_be_kept_and_that_is_said_once(copied: Path) -> None:
    """NUMBA_CACHE_DIR that cannot be made, a read-only install and no folder of the user's, for every kernel."""
    for folder in (copied / "ops").iterdir():
        if folder.is_dir():
            (folder / "__pycache__").write_text("in the way, also for root")
    nowhere = str(copied / "errors.py" / "cache")
    places = {"NUMBA_CACHE_DIR": nowhere, "XDG_CACHE_HOME": nowhere, "HOME": nowhere}
    answer = run_python(IMPORT_KERNELS, copied.parent, PYTHONPATH=str(copied.parent), **places)
    assert answer.code == 0, answer.err
    number, found = answer.out.split(maxsplit=1)
    assert int(number) >= 5
    assert found == "{'NullCache'}\n"
    (line,) = answer.err.splitlines()
    assert "no folder that can be written" in line
    assert "NUMBA_CACHE_DIR" in line
