"""What the tests of all rooms share."""

from __future__ import annotations

import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # the cores are shared among processes; read when torch and numba are imported
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from runs import CommandLine

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run in Python, on the CPU


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """`fpexp` in this process, in an empty folder, with nothing recorded anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fpexp.kept.repository_results", lambda: tmp_path / "results")
    return CommandLine(capsys, tmp_path)
