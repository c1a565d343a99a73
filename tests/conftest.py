"""What the tests of all rooms share."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import CommandLine


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """`fpexp` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys, tmp_path)
