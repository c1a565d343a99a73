"""Triton's kernels, compiled ahead of time for GPUs that need not be there: what a program of each takes.

One group a scale (see `launches`) and an architecture, whose contenders are what training launches, with a carried
state. Processes, as many as cores or `threads`, share the compiling; launches that are the same code compile once, and
what is in Triton's cache is found in no time. Of one that does not compile, or that takes more shared memory than the
chip has, that is said; the target is that nothing spills from registers to local memory. Nothing is run.

Roofline: nothing is computed here. Beside each row for sm_90 stand the bytes and operations of the launch, the floor
that they give on an H200, the resource that sets it, and the time that is predicted (see `roofline`). Registers (65536
a multiprocessor) and shared memory say how many programs there is room for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from fpexp.bench.compiling import Code, Compiled, compile_all, why_not_compiled
from fpexp.bench.context import Context
from fpexp.bench.launches import KERNELS, SCALES
from fpexp.bench.measure import Contender, Target
from fpexp.bench.roofline import floor_of, predict, work_of
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability (CUDA programming guide)."""

DTYPES = ("float32", "bfloat16", "float16", "float64")

NO_SPILLS = Target("spilled_bytes", at_most=0)

H200 = 90
"""The architecture whose rows have a floor."""


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark."""

    compile_only: bool = True
    scales: list[str] = field(default_factory=lambda: list(SCALES))
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    architectures: list[int] = field(default_factory=lambda: [80, 90, 100])


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """Each kernel at each size for each architecture."""
    if not sizes.compile_only:
        raise UserError("compile_only=false: kernels are timed by scripts/gpu_check.sh; use --compile-only")
    known = {"scales": SCALES, "dtypes": DTYPES, "architectures": SHARED}
    for key, alternatives in known.items():
        for value in getattr(sizes, key):
            if value not in alternatives:
                hint = did_you_mean(str(value), list(map(str, alternatives)))
                raise UserError(f"{key}: unknown '{value}'{hint} ({', '.join(map(str, alternatives))})")
    missing = why_not_compiled()
    rows = list(_rows(sizes, missing))
    if not missing:
        launched = {row.code: row.launch.key for row in rows}
        compiled = compile_all(launched, context.threads or len(os.sched_getaffinity(0)))
    for row in rows:
        yield row.contender(Compiled(0.0, None, missing) if missing else compiled[row.code])


class _Row(NamedTuple):
    scale: str
    code: Code
    launch: Any

    def contender(self, compiled: Compiled) -> Contender:
        """Return the row of the table."""
        code = self.code
        return Contender(
            f"{code.kernels} {code.launch}, {code.dtype}",
            f"{self.scale} ({code.shape}), sm_{code.architecture}",
            target=NO_SPILLS,
            numbers=partial(self._numbers, compiled),
            missing=compiled.failure or _why_too_large(compiled.usage.shared, code.architecture),
        )

    def _numbers(self, compiled: Compiled) -> dict[str, Any]:
        usage = compiled.usage
        numbers: dict[str, Any] = {
            "registers": usage.registers,
            "shared_bytes": usage.shared,
            "spilled_bytes": usage.spilled,
        }
        if self.code.architecture == H200:
            numbers |= self._of_hopper()
        return numbers | {"compile_seconds": compiled.seconds}

    def _of_hopper(self) -> dict[str, Any]:
        kernels, name = self.code.kernels, self.code.launch
        work, (floor, resource) = work_of(kernels, name, self.launch), floor_of(kernels, name, self.launch)
        numbers = {
            "megabytes": work.bytes / 1e6,
            "gigaoperations": work.operations / 1e9,
            "floor_us": floor * 1e6,
            "bound_by": resource,
        }
        predicted = predict(kernels, name, self.launch)
        if predicted is None:
            return numbers
        return {**numbers, "predicted_us_low": predicted[0] * 1e6, "predicted_us_high": predicted[1] * 1e6}


def _why_too_large(shared: int, architecture: int) -> str:
    limit = SHARED[architecture]
    return f"does not fit: {shared} bytes of shared memory, of {limit}" if shared > limit else ""


def _rows(sizes: Sizes, missing: str) -> Iterator[_Row]:
    """Where launches cannot be made, a row for each kernels says so."""
    for scale in dict.fromkeys(sizes.scales):
        shape = SCALES[scale]
        for architecture in dict.fromkeys(sizes.architectures):
            for dtype in dict.fromkeys(sizes.dtypes):
                for name, kernels in KERNELS.items():
                    launches = {"kernels": None} if missing else kernels.launches(shape, getattr(torch, dtype))
                    for launch, made in launches.items():
                        yield _Row(scale, Code(name, launch, shape, dtype, architecture), made)
