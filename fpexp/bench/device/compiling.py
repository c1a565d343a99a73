"""Every launch that is timed, once: compiled by Triton, in several processes, so that timing finds it in the cache."""

from __future__ import annotations

import time
from functools import partial

from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.device.times import cases, launches_of


def items(setup: Setup) -> dict[str, Item]:
    """One for each case that is timed."""
    return {case.name: partial(_run_once, case.name, setup) for case in cases(setup)}


def _run_once(name: str, setup: Setup) -> list[Finding]:
    case = next(case for case in cases(setup) if case.name == name)
    began = time.perf_counter()
    for launch in launches_of(case, setup).values():
        launch.run()
    setup.synchronize()
    seconds = time.perf_counter() - began
    return [Finding(case.name, f"{seconds:.1f} s with compiling", numbers={"seconds": seconds})]
