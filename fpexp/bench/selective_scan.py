"""The selective scan of Mamba, forward and backward, against our reference and the published pure-torch packages.

All compute y_t = H_t . c_t + D * x_t, H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T, from the same x and
delta (B, T, d), A (d, N), b and c (B, T, N), D (d), and the gradients of all six from one given gradient of y:

    cpu           our fused kernels
    reference     our loop over tokens in plain torch
    mambapy       exp(delta A) and delta b x as (B, T, d, N), mambapy.pscan (H at every t), read-out with c and D;
                  the lines of its MambaBlock.selective_scan
    transformers  mamba_selective_scan of its Mamba, the plain torch path that the model takes without CUDA kernels:
                  a loop over time on (B, d, T) views, as the model's own transposes leave them

Roofline, E = B T d N elements. Forward: an exponential, 3 multiply-adds; backward: those again and about 6 more, so
2 exponentials (some 10 instructions each as a polynomial) and 9 multiply-adds an element. Bytes at least: x, delta, y
and their three gradients, 24 B T d, once. At B 8, T 512, d 256, N 16, E is 16.8 million: instructions, not bytes,
bound the fused kernel, at E * (instructions an element) / (cores * lanes * instructions a cycle * clock) seconds.
What keeps H writes arrays of E elements, 67 MB each in float32, several of them, and pscan goes over them again at
every level of its tree, 2 log2(T) of them of halving size and so about 4 E reads and writes a scan: main memory bounds
it, at that many bytes / bandwidth. transformers' loop reads its arrays by an index a token, whose backward writes an
array of E elements, zero but for that token, and adds it up: T E elements twice, so its time is quadratic in T, in the
package's own layout too.

Peak extra memory is measured in a child process (see `memory`), gradients and results included, in units of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fpexp.bench.context import NOT_INSTALLED, Context
from fpexp.bench.differentiated import (
    Case,
    Function,
    compare,
    draw,
    extra_memory,
    forward_backward,
    log_uniform,
    why_not_fused,
)
from fpexp.bench.measure import Contender, Target, stopwatch
from fpexp.machine import set_threads
from fpexp.ops.selective_scan import selective_scan
from fpexp.ranges import Count

SPEED = Target("ratio", at_least=5.0)
MEMORY = Target("memory_of_inputs", at_most=4.0)
TARGETS = {"cpu": MEMORY, "mambapy": SPEED, "transformers": SPEED}


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark."""

    batch_size: Count = 8
    length: Count = 512
    width: Count = 256
    state_size: Count = 16


def cpu() -> Function:
    """Our fused backend; ImportError where it cannot run."""
    if reason := why_not_fused("selective_scan"):
        raise ImportError(reason)
    return partial(_ours, "cpu")


def reference() -> Function:
    """Our loop in plain torch."""
    return partial(_ours, "reference")


def _ours(backend: str, x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
    return selective_scan(x, delta, A, b, c, D, backend=backend)[0]


def mambapy() -> Function:
    """mambapy's parallel scan; its H (B, T, d, N) starts from zero as ours does."""
    try:
        from mambapy.pscan import pscan
    except ImportError as error:
        raise ImportError(NOT_INSTALLED) from error

    def scan(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
        decay = torch.exp(delta.unsqueeze(-1) * A)
        write = delta.unsqueeze(-1) * b.unsqueeze(2) * x.unsqueeze(-1)
        H = pscan(decay, write)
        return (H @ c.unsqueeze(-1)).squeeze(3) + D * x

    return scan


def transformers() -> Function:
    """The scan of transformers' Mamba, which has time last."""
    try:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError(NOT_INSTALLED) from error
    logging.set_verbosity_error()  # that there are faster kernels for CUDA is known

    def scan(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
        return mamba_selective_scan(x.mT, delta.mT, A, b.mT, c.mT, D).mT

    return scan


SCANS: dict[str, Callable[[], Function]] = {
    "cpu": cpu,
    "reference": reference,
    "mambapy": mambapy,
    "transformers": transformers,
}


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """Our two backends and the two packages; the fused one is the baseline."""
    group = ", ".join(f"{name} {value}" for name, value in asdict(sizes).items()).replace("_", " ")
    case = make_case(**asdict(sizes))
    expected = cache(partial(forward_backward, reference(), case))
    for name, make in SCANS.items():
        common: dict[str, Any] = {"baseline": "cpu" if name != "cpu" else None, "target": TARGETS.get(name)}
        try:
            scan = make()
        except ImportError as error:
            yield Contender(name, group, lambda: 0.0, **common, missing=str(error))
            continue
        work = partial(forward_backward, scan, case)
        yield Contender(
            name,
            group,
            stopwatch(work),
            check=partial(compare, work, expected, case),
            numbers=partial(extra_memory, prepare_memory, case, name=name, threads=context.threads, **asdict(sizes)),
            **common,
        )


def make_case(batch_size: int, length: int, width: int, state_size: int) -> Case:
    """Return x, delta, A, b, c, D and a gradient of y (B, T, d)."""
    return draw(partial(make_inputs, batch_size, length, width, state_size), batch_size, length, width)


def make_inputs(batch_size: int, length: int, width: int, state_size: int) -> dict[str, Tensor]:
    """Draw x, delta, A, b, c, D; delta is log-uniform in [1e-3, 1e-1], A as Mamba starts."""
    return {
        "x": torch.randn(batch_size, length, width),
        "delta": log_uniform(1e-3, 1e-1, batch_size, length, width),
        "A": -torch.arange(1.0, state_size + 1).repeat(width, 1),
        "b": torch.randn(batch_size, length, state_size),
        "c": torch.randn(batch_size, length, state_size),
        "D": torch.ones(width),
    }


def prepare_memory(name: str, threads: int, **sizes: int) -> Callable[[], object]:
    """Load a scan, use it once on a tiny case, and return its work on inputs that are there already."""
    set_threads(threads)
    scan = SCANS[name]()
    forward_backward(scan, make_case(**{**sizes, "batch_size": 1, "length": 2}))
    return partial(forward_backward, scan, make_case(**sizes))
