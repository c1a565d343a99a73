"""Benchmarks by name, one module each: `contenders(sizes, context)` and the dataclass `Sizes` of its keys.

Nothing heavy is imported here, so that they can be listed at once.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import NamedTuple

from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError


class Entry(NamedTuple):
    """Where a benchmark is, what it measures in one line, and its keys for the help."""

    module: str
    text: str
    keys: str


BENCHMARKS = {
    "training_step": Entry(
        "fpexp.bench.training_step",
        "a training step of FP-Mamba against torch's LSTM",
        "batch_size=256 length=16 run=<run id or folder>",
    ),
    "sampling": Entry(
        "fpexp.bench.sampling",
        "drawing a batch of each task against the training step with it",
        "model=fp_mamba_h sequences=0",
    ),
    "sequential_solve": Entry(
        "fpexp.bench.sequential_solve",
        "the sequential solver against Picard, with counts",
        "run=<run id or folder> lengths=[16,64] batch_size=64 tolerance=0.1",
    ),
    "solve_scaling": Entry(
        "fpexp.bench.solve_scaling",
        "time of the sequential solver as the length doubles",
        "run=<run id or folder> lengths=[16,32,...,1024] batch_size=16 tolerance=0.1",
    ),
    "complexity": Entry(
        "fpexp.bench.complexity",
        "time and memory of Mamba and FP-Mamba by length, forward and backward (table 2)",
        "scale=cpu lengths=[32,64,128,256,512] batch_size=8 memory=true",
    ),
    "selective_scan": Entry(
        "fpexp.bench.selective_scan",
        "the scan, forward and backward, against published packages",
        "batch_size=8 length=512 width=256 state_size=16",
    ),
    "ops": Entry(
        "fpexp.bench.ops",
        "each op, fused, against its loop over tokens, and as the length doubles",
        "ops=[selective_scan,ssd,delta_rule,delta_product,diagonal_scan] batch_size=8 length=512 width=256",
    ),
    "kernels": Entry(
        "fpexp.bench.kernels",
        "registers, shared memory and spills of Triton's kernels, compiled for GPUs that are not here (--compile-only)",
        "compile_only=true scales=[cpu,gpu,paper,copy,long] dtypes=[float32,bfloat16] architectures=[80,90,100]",
    ),
    "second_start": Entry(
        "fpexp.bench.second_start",
        "`fpexp train` to its first step, kernels compiled before",
        "model=fp_mamba_k",
    ),
}


def load(name: str) -> ModuleType:
    """Import the benchmark of this name; a `UserError` names the nearest one."""
    if name not in BENCHMARKS:
        raise UserError(f"unknown benchmark '{name}'{did_you_mean(name, BENCHMARKS)} ({', '.join(BENCHMARKS)})")
    return importlib.import_module(BENCHMARKS[name].module)
