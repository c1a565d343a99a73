"""Every launch that is timed, once: compiled by Triton, in several processes, so that timing finds it in the cache."""

from __future__ import annotations

import time
from functools import partial

from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.device.times import Case, cases, launches_of


def items(setup: Setup) -> dict[str, Item]:
    """One for each case that is timed."""
    return {case.named(): partial(_run_once, case, setup) for case in cases(setup)}


def _run_once(case: Case, setup: Setup) -> list[Finding]:
    began = time.perf_counter()
    for launch in launches_of(case, setup).values():
        launch.run()
    setup.synchronize()
    seconds = time.perf_counter() - began
    return [Finding(case.named(), f"{seconds:.1f} s with compiling", numbers={"seconds": seconds})]
