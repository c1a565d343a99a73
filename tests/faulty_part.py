"""A part of the GPU check in which everything goes wrong, for `bench/test_gpu_check.py`."""

from __future__ import annotations

import os
import signal
import time

from fpexp.bench.device.part import Finding, Item, Setup


def items(setup: Setup) -> dict[str, Item]:
    """Do well, raise, crash, hang, do well, hang."""
    return {"good": good, "raises": fail, "crashes": crash, "hangs": hang, "after": good, "last": hang}


def good() -> list[Finding]:
    return [Finding("good", "1 ms", numbers={"ms": 1.0})]


def fail() -> list[Finding]:
    raise ValueError("a wrong number\nand more")


def crash() -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def hang() -> list[Finding]:
    time.sleep(1000)
    return []
