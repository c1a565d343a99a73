"""Settings of a process: what `deterministic` pins, and what it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Recorder, tiny

from fpexp.machine import apply_settings
from fpexp.run import start_run


@pytest.fixture(autouse=True)
def _give_back() -> Iterator[None]:
    """Leave torch as it was."""
    benchmark, threads = torch.backends.cudnn.benchmark, torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
    torch.set_num_threads(threads)


def test_on_a_gpu_it_pins_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    """CASES.md 27."""
    torch.backends.cudnn.benchmark = True
    (line,) = apply_settings(tiny(tmp_path, "deterministic=true").replace(device="cuda"))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled(), "what is not pinned is no error"
    assert not torch.backends.cudnn.benchmark
    assert line.startswith("deterministic=true: ")
    assert line.endswith(" are not pinned")
    assert "cuDNN's LSTM" in line
    assert apply_settings(tiny(tmp_path).replace(device="cuda")) == ()
    assert not torch.are_deterministic_algorithms_enabled(), "the run after it is as it asks"


def test_on_a_cpu_there_is_nothing_to_pin(tmp_path: Path) -> None:
    assert apply_settings(tiny(tmp_path, "deterministic=true").replace(device="cpu")) == ()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_tells_what_is_not_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Notes(Recorder):
        def start(self, start: Any) -> None:
            told.extend(start.notes)
            super().start(start)

    monkeypatch.setattr("fpexp.run.apply_settings", lambda config: ("not pinned",))
    start_run(tiny(tmp_path), Notes())
    assert "not pinned" in told
