"""Triton's kernels, compiled ahead of time for GPUs that need not be there: what a program of each takes.

One group a size and an architecture, whose contenders are what training launches, with a carried state; the time is
that of compiling, or of finding the result in Triton's cache. The check is that a program's shared memory fits a
multiprocessor, the target that nothing spills from registers to local memory. Nothing is run.

    cpu    word problems on two cores: B 256, T 16, d 128, N 16
    gpu    language on one GPU: B 64, T 1024, d 512, N 16
    paper  language as in the paper: B 2, T 2048, d 2048, N 16
    copy   copying as in the paper: B 128, T 128, d 2048, N 32
    long   one long sequence, where the scans cut time into pieces: B 1, T 16384, d 1024, N 16

Roofline: nothing is computed here; the docstring of each backend has that of its kernels, and how many programs it
wants on a multiprocessor. Registers (65536 a multiprocessor) and shared memory say how many there is room for.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpexp.bench import selective_scan
from fpexp.bench.context import Context
from fpexp.bench.measure import Check, Contender, Target
from fpexp.bench.ops import diagonal_inputs, ssd_inputs
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError

SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes of shared memory that a program may have, by compute capability (CUDA programming guide)."""

DTYPES = ("float32", "bfloat16", "float16", "float64")

NO_SPILLS = Target("spilled_bytes", at_most=0)


class Shape(NamedTuple):
    """Of a layer's scan: B, T, d, and the N of the selective scan; SSD has heads of 64 and N 128."""

    batch: int
    length: int
    width: int
    N: int

    def inputs(self, op: str) -> dict[str, Tensor]:
        """Return arguments of an op that have no numbers."""
        batch, length, width, N = self
        with torch.device("meta"):
            if op == "diagonal_scan":
                return {**diagonal_inputs(batch, length, width), "state": torch.empty(batch, width)}
            if op == "ssd":
                inputs = ssd_inputs(batch, length, width)
                _, _, heads, P = inputs["x"].shape
                return {**inputs, "state": torch.empty(batch, heads, P, inputs["b"].shape[3])}
            inputs = selective_scan.make_inputs(batch, length, width, state_size=N)
            return {**inputs, "state": torch.empty(batch, width, N)}


SCALES = {
    "cpu": Shape(256, 16, 128, 16),
    "gpu": Shape(64, 1024, 512, 16),
    "paper": Shape(2, 2048, 2048, 16),
    "copy": Shape(128, 128, 2048, 32),
    "long": Shape(1, 16384, 1024, 16),
}

OPS = ("diagonal_scan", "selective_scan", "ssd")


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
        raise UserError("compile_only=false: kernels are not timed yet; use compile_only=true")
    known = {"scales": SCALES, "dtypes": DTYPES, "architectures": SHARED}
    for key, alternatives in known.items():
        for value in getattr(sizes, key):
            if value not in alternatives:
                hint = did_you_mean(str(value), list(map(str, alternatives)))
                raise UserError(f"{key}: unknown '{value}'{hint} ({', '.join(map(str, alternatives))})")
    for scale in dict.fromkeys(sizes.scales):
        for architecture in dict.fromkeys(sizes.architectures):
            for dtype in dict.fromkeys(sizes.dtypes):
                for op in OPS:
                    yield from _of_op(op, scale, dtype, architecture)


def _of_op(op: str, scale: str, dtype: str, architecture: int) -> Iterator[Contender]:
    shape = SCALES[scale]
    described = ", ".join(f"{name} {size}" for name, size in zip("BTdN", shape, strict=True))
    group = f"{scale} ({described}), sm_{architecture}"
    missing = why_not_compiled()
    launches = {"kernels": None} if missing else prepare(op, shape, getattr(torch, dtype))
    for name, launch in launches.items():
        compiled = cache(partial(Compiled.of, launch, architecture))
        failure = missing or why_it_fails(compiled)
        yield Contender(
            f"{op} {name}, {dtype}",
            group,
            partial(_seconds, compiled),
            check=partial(_fits, compiled, architecture),
            target=NO_SPILLS,
            numbers=partial(_numbers, compiled),
            once=True,
            missing=failure,
        )


def why_not_compiled() -> str:
    """Return why kernels cannot be compiled in this process; empty where they can."""
    if os.environ.get("TRITON_INTERPRET"):
        return "TRITON_INTERPRET is set: there are no kernels to compile"
    try:
        importlib.import_module("fpexp.ops.launch.triton")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return f"triton does not import ({error}): pip install triton"
    return ""


def prepare(op: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Return what training launches, by name; weights and states are float32, all else is in `dtype`."""
    typed = {
        name: tensor if name in ("A", "D", "state") else tensor.to(dtype) for name, tensor in shape.inputs(op).items()
    }
    return dict(importlib.import_module(f"fpexp.ops.{op}.triton").launches(**typed))


class Compiled(NamedTuple):
    """How long it took, and `fpexp.ops.launch.triton.Usage`."""

    seconds: float
    usage: Any

    @classmethod
    def of(cls, launch: Any, architecture: int) -> Compiled:
        """Compile a launch."""
        began = time.perf_counter()
        usage = launch.compile(architecture)
        return cls(time.perf_counter() - began, usage)


def why_it_fails(compiled: Callable[[], Compiled]) -> str:
    """Compile, and return why that cannot be done; empty where it can."""
    try:
        compiled()
    except Exception as error:  # of Triton's compiler, which raises errors of many kinds
        return f"does not compile: {str(error).strip().splitlines()[-1]}"
    return ""


def _seconds(compiled: Callable[[], Compiled]) -> float:
    return compiled().seconds


def _fits(compiled: Callable[[], Compiled], architecture: int) -> list[Check]:
    return [Check("bytes of shared memory of a program:", compiled().usage.shared, SHARED[architecture])]


def _numbers(compiled: Callable[[], Compiled]) -> dict[str, int]:
    usage = compiled().usage
    return {"registers": usage.registers, "shared_bytes": usage.shared, "spilled_bytes": usage.spilled}
