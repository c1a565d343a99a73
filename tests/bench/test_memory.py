"""Peak extra memory, of work whose need is known."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from fpexp.bench import memory, selective_scan
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


def test_elsewhere_there_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "write_text", refuse)
    assert memory.growth(lambda: None) is None


@needs_linux
def test_a_scan_needs_at_least_its_results() -> None:
    sizes = {"batch_size": 2, "length": 256, "width": 256, "state_size": 4}
    extra = memory.peak_extra(selective_scan.prepare_memory, name="reference", threads=1, **sizes)
    assert extra is not None
    assert extra > selective_scan.make_case(**sizes).nbytes
