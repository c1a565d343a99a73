"""How a signal to a sweep reaches its jobs, each in a process of its own or not, and how a job ends by one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from fpexp.errors import Interrupted
from fpexp.sweep_folder import SweepFolder


@contextmanager
def handing_on(sweep: SweepFolder, received: list[int]) -> Iterator[None]:
    """Hand the first signal on to the processes of the jobs, which save and end; the second has its usual effect.

    It is added to `received`: a job that it ends before there is anything to save cannot tell of it.

    They are in groups of their own (`stand_apart`), so that a Ctrl-C of the terminal does not reach them a second time.
    """
    previous: dict[int, Any] = {}

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

    def hand_on(signum: int, frame: FrameType | None) -> None:
        restore()
        received.append(signum)
        sweep.stop()
        for job in sweep.jobs():
            if job["state"] == "running":
                with suppress(ProcessLookupError):
                    os.kill(job["pid"], signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        previous[signum] = signal.signal(signum, hand_on)
    try:
        yield
    finally:
        restore()


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM interrupt a job before training, which saves first, has begun to listen to it."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signum)

    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # a launcher's own: a cluster's asks for the job again
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def stand_apart(sweep_pid: int) -> None:
    """Make this process, one of several that a sweep has started, listen to the sweep alone, and end with it."""
    with suppress(PermissionError):
        os.setpgid(0, 0)

    def watch() -> None:
        while os.getppid() == sweep_pid:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    if not any(thread.name == stand_apart.__name__ for thread in threading.enumerate()):
        threading.Thread(target=watch, name=stand_apart.__name__, daemon=True).start()


def hand_on_to_launcher(signum: int) -> None:
    """Let a launcher that put this job on a cluster, and wants to know of the signal, queue the job again."""
    if signum == signal.SIGUSR2 and callable(signal.getsignal(signum)):
        signal.raise_signal(signum)
