"""Which job of which sweep has a config: `<results_dir>/claims/<fingerprint>`, there as long as the job goes on.

The file is locked by its process, so that of two sweeps that start at one moment one has it, and that of a process
which has died is free again. Locks may not reach from one host to another: what another host has left behind, dead or
not, is not taken over.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fpexp.errors import FpexpError


class Claimed(FpexpError):
    """Another process has the config; the message says which, and where that cannot be known what to delete."""


@contextmanager
def claim(results_dir: str | Path, fingerprint: str, holder: str) -> Iterator[None]:
    """Have a config for this process inside the block; raise `Claimed` where another one has it."""
    path = Path(results_dir) / "claims" / fingerprint
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path) as file:
        host, _, told = file.read().partition("\n")
        if host not in ("", socket.gethostname()):
            age = (time.time() - path.stat().st_mtime) / 3600
            raise Claimed(f"{told}, since {age:.1f} h; if that has died, delete {path}")
        file.truncate(0)
        file.write(f"{socket.gethostname()}\n{holder} (process {os.getpid()} on {socket.gethostname()})")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Open and lock the file of this name; one that its holder deletes in the meantime is not the one."""
    while True:
        with path.open("a+") as file:
            file.seek(0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Claimed(file.read().partition("\n")[2] or "another sweep") from error
            except OSError as error:
                raise FpexpError(f"cannot lock {path}: {error.strerror}") from error
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
