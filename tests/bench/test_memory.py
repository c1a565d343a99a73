"""Peak extra memory, of work whose need is known."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fpexp.bench import complexity, memory, selective_scan
from fpexp.bench.differentiated import extra_memory
from fpexp.errors import FpexpError

WORK = """
def prepare(kept, dropped):
    inputs = bytearray(64 * 2**20)
    def work():
        temporary = b"x" * dropped
        del temporary
        return b"x" * kept, inputs
    return work

def fail():
    raise ValueError("no such thing")

def hang():
    import time
    time.sleep(600)
"""

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "work_of_test.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    import work_of_test  # type: ignore[import-not-found]

    return work_of_test  # type: ignore[no-any-return]


@needs_linux
@pytest.mark.parametrize(("kept", "dropped"), [(20, 0), (5, 40)])
def test_what_is_kept_and_what_is_dropped_both_count(work: ModuleType, kept: int, dropped: int) -> None:
    extra = memory.peak_extra(work.prepare, kept=kept * 2**20, dropped=dropped * 2**20)
    assert extra is not None
    assert abs(extra - max(kept, dropped) * 2**20) < 2 * 2**20


def test_a_failure_says_what_happened(work: ModuleType) -> None:
    with pytest.raises(FpexpError, match="work_of_test:fail could not be measured: ValueError: no such thing"):
        memory.peak_extra(work.fail)


def test_what_hangs_is_ended_and_the_row_says_so(work: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST_SECONDS", 0.5)
    with pytest.raises(memory.OutOfTime, match=r"not within 0\.5 s"):
        memory.peak_extra(work.hang)
    numbers = complexity._memory(["experiment=table2_complexity"], size=1, length=16, threads=1)
    assert numbers == {"peak_MB": "not within 0.5 s"}
    case = selective_scan.make_case(1, 2, 3, 4)
    assert extra_memory(work.hang, case) == {"peak_extra_mb": "not within 0.5 s", "memory_of_inputs": None}


def test_elsewhere_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert memory.growth(lambda: None) is None
    monkeypatch.setattr(complexity, "peak_extra", lambda *_, **__: None)
    assert complexity._memory([], size=1, length=16, threads=1) == {"peak_MB": "not told by this system"}


@needs_linux
def test_a_scan_needs_at_least_its_results() -> None:
    sizes = {"batch_size": 2, "length": 256, "width": 256, "state_size": 4}
    extra = memory.peak_extra(selective_scan.prepare_memory, name="reference", threads=1, **sizes)
    assert extra is not None
    assert extra > selective_scan.make_case(**sizes).nbytes
