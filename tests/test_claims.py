"""One process has a config: what another live one has is refused, what a dead one has left is taken over."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest
from runs import run_python

from fpexp.claims import Claimed, claim
from fpexp.errors import FpexpError, UserError
from fpexp.run_folder import RunFolder


def test_what_another_has_is_refused_until_it_is_done(tmp_path: Path) -> None:
    with claim(tmp_path, "config", "job 1 of here"):
        with pytest.raises(Claimed, match=r"^job 1 of here \(process \d+ on "), claim(tmp_path, "config", "job 2"):
            pass
        with claim(tmp_path, "another", "job 2 of here"):
            pass
    with claim(tmp_path, "config", "job 2 of here"):
        pass
    assert list((tmp_path / "claims").iterdir()) == []


def test_an_error_inside_goes_through_and_frees_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), claim(tmp_path, "config", "job 1"):
        raise FileNotFoundError
    with claim(tmp_path, "config", "job 2"):
        pass


def test_of_many_that_ask_at_once_one_has_it_at_a_time(tmp_path: Path) -> None:
    inside, most, taken = 0, 0, 0
    count = threading.Lock()

    def ask() -> None:
        nonlocal inside, most, taken
        for _ in range(200):
            with ExitStack() as held:
                try:
                    held.enter_context(claim(tmp_path, "config", "job"))
                except Claimed:
                    continue
                with count:
                    inside, taken = inside + 1, taken + 1
                    most = max(most, inside)
                time.sleep(1e-4)  # long enough for another to come in
                with count:
                    inside -= 1

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken >= 4


def test_a_file_that_is_deleted_before_it_is_locked_is_not_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flock = tmp_path / "claims" / "config", fcntl.flock

    def late(file: IO[str], how: int) -> None:
        monkeypatch.undo()
        path.unlink()
        path.touch()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with claim(tmp_path, "config", "job 1"), pytest.raises(Claimed), claim(tmp_path, "config", "job 2"):
        pass


def test_that_of_a_process_which_was_killed_is_taken_over(tmp_path: Path) -> None:
    code = f"from fpexp.claims import claim\nwith claim({str(tmp_path)!r}, 'config', 'job 1'):\n    print(flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", f"{code}    input()"], stdin=-1, stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(Claimed, match=f"process {process.pid} on"), claim(tmp_path, "config", "job 2"):
        pass
    process.kill()
    process.communicate()
    assert (tmp_path / "claims" / "config").exists()
    with claim(tmp_path, "config", "job 2"):
        pass


def test_that_of_another_host_is_not_and_what_to_delete_is_said(tmp_path: Path) -> None:
    code = "import socket; socket.gethostname = lambda: 'elsewhere'; import os\n"
    code += (
        f"from fpexp.claims import claim\nwith claim({str(tmp_path)!r}, 'config', 'job 1 of there'):\n    os._exit(0)"
    )
    assert run_python(code, tmp_path).code == 0
    path = tmp_path / "claims" / "config"
    said = rf"job 1 of there \(process \d+ on elsewhere\), since 0.0 h; if that has died, delete {path}"
    for _ in range(2):
        with pytest.raises(Claimed, match=said), claim(tmp_path, "config", "job 2"):
            pass
    path.unlink()
    with claim(tmp_path, "config", "job 2"):
        pass


def test_where_nothing_can_be_locked_that_is_said_and_not_another_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: IO[str], how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    run = RunFolder(tmp_path)
    for lock, file in ((claim(tmp_path, "config", "job 1"), "claims/config"), (run.lock(), ".lock")):
        with pytest.raises(FpexpError, match=f"^cannot lock {tmp_path / file}: No locks available$") as caught, lock:
            pass
        assert not isinstance(caught.value, (Claimed, UserError))
