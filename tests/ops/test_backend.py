"""Which backend an op gets: chosen for the user, asked for, or not to be had."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from fpexp.errors import UserError
from fpexp.ops import OPS, backend, backends
from fpexp.ops.selective_scan import selective_scan

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what was chosen and said, before and after."""
    for remembered in (backend.choose, backend.say_once):
        remembered.cache_clear()
    yield
    for remembered in (backend.choose, backend.say_once):
        remembered.cache_clear()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for op in OPS:
        monkeypatch.delitem(sys.modules, f"fpexp.ops.{op}.cpu", raising=False)
    monkeypatch.delitem(sys.modules, "fpexp.ops.cpu_math", raising=False)


def test_auto_takes_the_fused_one() -> None:
    pytest.importorskip("numba")
    assert backend.choose("selective_scan", CPU) == "cpu"
    assert backend.choose("selective_scan", CPU, "cpu") == "cpu"
    assert backend.choose("selective_scan", CPU, "reference") == "reference"
    assert backend.load("selective_scan", CPU).__name__ == "fpexp.ops.selective_scan.cpu"


def test_auto_where_there_is_no_fused_one(caplog: pytest.LogCaptureFixture) -> None:
    """Not worth a warning: there is nothing to mend."""
    assert backend.choose("selective_scan", torch.device("meta")) == "reference"
    assert not caplog.records


def test_auto_without_numba_is_said_once(without_numba: None, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert backend.choose("selective_scan", CPU) == "reference"
        fused = {op for op, name in backends().items() if name != "reference"}
        assert fused == {"delta_rule", "ssd"}, "matrix products of torch"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "backend=reference" in record.getMessage()
    assert "pip install numba" in record.getMessage()
    x = torch.ones(1, 2, 3)
    y, _ = selective_scan(x, x, -torch.ones(3, 1), x[..., :1], x[..., :1], x[0, 0])
    assert y.isfinite().all()


def test_numba_asked_for_and_missing(without_numba: None) -> None:
    with pytest.raises(UserError, match=r"backend=cpu needs numba.*pip install numba, or use backend=reference"):
        backend.choose("selective_scan", CPU, "cpu")


@pytest.mark.parametrize("requested", ["zz", ""])
def test_unknown_backends_name_those_there_are(requested: str) -> None:
    with pytest.raises(UserError, match=r"selective_scan has no such backend \(auto, cpu, triton, reference\)"):
        backend.choose("selective_scan", CPU, requested)
    with pytest.raises(UserError, match=r"token_residual has no such backend \(auto, cpu, reference\)"):
        backend.choose("token_residual", CPU, "triton")


def test_triton_is_chosen_on_a_gpu() -> None:
    pytest.importorskip("triton")
    for op in ("diagonal_scan", "selective_scan", "delta_rule", "ssd"):
        assert backend.choose(op, CUDA) == backend.choose(op, CUDA, "triton") == "triton"


def test_triton_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES.md 38; its interpreter takes the place of a GPU where it is asked for."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match="backend=triton is for cuda tensors, not cpu; use backend=auto"):
        backend.choose("diagonal_scan", CPU, "triton")
    backend.choose.cache_clear()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.choose("diagonal_scan", CPU, "triton") == "triton"
    assert backend.choose("diagonal_scan", CPU) != "triton"


def test_triton_is_missing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """CASES.md 38."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in ("launch", "pieces", "diagonal_scan", "selective_scan", "ssd.kernels", "ssd"):
        monkeypatch.delitem(sys.modules, f"fpexp.ops.{name}.triton", raising=False)
    with pytest.raises(UserError, match=r"backend=triton needs triton.*pip install triton, or use backend=reference"):
        backend.choose("diagonal_scan", CUDA, "triton")
    for _ in range(2):
        assert backend.choose("diagonal_scan", CUDA) == "reference"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "backend=reference" in record.getMessage()


def test_a_backend_for_another_device() -> None:
    with pytest.raises(UserError, match="backend=cpu is for cpu tensors, not cuda"):
        backend.choose("selective_scan", CUDA, "cpu")


def test_errors_reach_the_caller_of_an_op() -> None:
    x = torch.ones(1, 2, 3)
    with pytest.raises(UserError, match="backend=zz"):
        selective_scan(x, x, -torch.ones(3, 1), x[..., :1], x[..., :1], x[0, 0], backend="zz")


def test_only_the_reference_inside_the_block() -> None:
    """What is asked for by name stays so."""
    outside = backend.choose("selective_scan", CPU)
    with backend.only_reference():
        assert set(backends().values()) == {"reference"}
        assert backend.load("selective_scan", CPU).__name__ == "fpexp.ops.selective_scan.reference"
        if outside == "cpu":
            assert backend.choose("selective_scan", CPU, "cpu") == "cpu"
    assert backend.choose("selective_scan", CPU) == outside


def test_the_block_ends_with_an_exception_too() -> None:
    outside = backend.choose("selective_scan", CPU)
    with pytest.raises(UserError), backend.only_reference():
        backend.choose("selective_scan", CPU, "zz")
    assert backend.choose("selective_scan", CPU) == outside
