"""scripts/reproduce.sh: what it asks for is there, and what goes wrong does not stop the rest."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fpexp.config.compose import expand

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "reproduce.sh"


def calls(folder: Path, *words: str, code: int = 0) -> tuple[int, list[list[str]]]:
    """Run the script with an `fpexp` that notes its words and ends with `code`; return the script's code and these."""
    stub = folder / "fpexp"
    stub.write_text(
        f'#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done >> calls\necho >> calls\nexit {code}\n'
    )
    stub.chmod(0o755)
    (folder / "calls").unlink(missing_ok=True)
    path = os.pathsep.join([str(folder), os.environ["PATH"]])
    done = subprocess.run(
        [SCRIPT, *words], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    found = [call.splitlines() for call in (folder / "calls").read_text().split("\n\n") if call]
    sweeps = [line for line in done.stdout.splitlines() if line.startswith("fpexp ")]
    assert len(sweeps) == sum(call[0] != "bench" for call in found)
    return done.returncode, found


def test_status_and_training_ask_for_the_same_jobs(tmp_path: Path) -> None:
    code, asked = calls(tmp_path, "--status", "seed=0", "results_dir=elsewhere")
    assert code == 0
    assert {tuple(call[:2]) for call in asked} == {("sweep", "status")}
    code, trained = calls(tmp_path, "seed=0", "results_dir=elsewhere")
    assert code == 0
    assert [call[2:] for call in trained if call[0] != "bench"] == [call[2:] for call in asked]
    assert {call[1] for call in trained if call[0] == "train"} == {"-m"}
    for call in asked:
        assert call[-4:] == ["scale=cpu", "threads=1", "seed=0", "results_dir=elsewhere"]
        assert expand(call[2:]), shlex.join(call)


@pytest.mark.parametrize(("code", "all_run"), [(1, True), (2, True), (130, False), (143, False)])
def test_a_failure_does_not_stop_the_others_and_a_signal_does(tmp_path: Path, code: int, all_run: bool) -> None:
    ended, found = calls(tmp_path, code=code)
    assert ended == code
    assert (len(found) > 10) is all_run
    assert all_run or len(found) == 1
