"""Our ops, forward and backward: the fused CPU kernels against the plain loop over tokens, and as the length doubles.

One group an op. Its `reference` is the loop in plain torch at `length`, which the fused one has to beat; the fused one
is timed at a quarter, a half and twice that length as well, and each is held against the length before. Every fused one
is checked against the loop at its own length: y and the gradient of every input, in float32.

    selective_scan  N = 16
    ssd             heads of P = 64, N = 128, one group of b and c
    delta_rule      the gated one: heads of K = V = 64, a step a token
    delta_product   the same without a gate, two steps a token
    diagonal_scan   one state a channel

Roofline a token: multiply-adds of the forward, of which the backward takes about twice as many, and 4-byte numbers that
forward and backward read and write at least, each argument once a pass (d = heads * 64; L: the steps of a chunk):

    selective_scan  3 d N, and d N exponentials           8 d + 6 N
    ssd             L (N + d) + 2 d N                     5 d + 6 N
    delta rule      L d (1.5 n + 2) + (2 n + 1) d V       5 d + 6 n d, n steps a token
    diagonal_scan   d                                     8 d

So diagonal_scan is bound by memory, 32 B T d bytes / bandwidth, and selective_scan by instructions (see it).
ssd and the delta rule are matrix products, bound by multiply-adds / (cores * lanes * 2 * clock) where the blocks are
large enough; the delta rule also solves a triangular system a chunk, less parallel than a product. The loops make some
5 to 10 calls of torch a step and twice that backward, which cost a call each where the state is small (diagonal_scan,
B d numbers), and else passes over arrays of a state, B d N or B d V numbers, that autograd keeps for every step and
that come back from main memory.

All of it is T times a constant, so a doubling costs 2, less what a call costs once, more where the inputs of the longer
sequence no longer fit a cache that those of the shorter did. And more where the allocator asks the system for fresh
pages: one fault each 4 KB, which costs diagonal_scan several times its own work and is there in some rounds and not in
others, by what the contender before gave back. glibc keeps its blocks, for all contenders alike, with
MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000 in the environment.

Peak extra memory is measured in a child process (see `memory`) at `length`, y and the gradients included, in units of
the inputs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fpexp.bench import selective_scan
from fpexp.bench.context import Context
from fpexp.bench.differentiated import (
    Case,
    compare,
    draw,
    extra_memory,
    forward_backward,
    log_uniform,
    why_not_fused,
)
from fpexp.bench.measure import Contender, Target, stopwatch
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError
from fpexp.machine import set_threads
from fpexp.ranges import Count

FASTER = Target("ratio", at_least=5.0)
DOUBLED = Target("ratio", at_most=2.2)

HEAD = 64
"""Channels of a head, fewer where the width is no multiple."""

WARM_LENGTH = 32
"""Tokens of the tiny case before memory is measured: enough for every op to take the way that long sequences do."""


class Op(NamedTuple):
    """Something to time: the function `name` of `fpexp.ops.<name>`, and what draws its inputs by name from B, T, d."""

    name: str
    inputs: Callable[[int, int, int], dict[str, Tensor]]

    def call(self, backend: str, **inputs: Tensor) -> Tensor:
        """Return what it puts out for every token, (B, T, d), without the last state."""
        found: Any = getattr(importlib.import_module(f"fpexp.ops.{self.name}"), self.name)(**inputs, backend=backend)
        y: Tensor = found if isinstance(found, Tensor) else found[0]
        return y.flatten(2)


def scan_inputs(batch: int, length: int, width: int) -> dict[str, Tensor]:
    """Draw the inputs of Mamba's scan, N = 16."""
    return selective_scan.make_inputs(batch, length, width, state_size=16)


def ssd_inputs(batch: int, length: int, width: int) -> dict[str, Tensor]:
    """Draw x (B, T, heads, P), delta (B, T, heads), A and D (heads,), b and c (B, T, 1, N) as Mamba-2 starts."""
    heads, size = _heads(width)
    return {
        "x": torch.randn(batch, length, heads, size),
        "delta": log_uniform(1e-3, 1e-1, batch, length, heads),
        "A": -torch.empty(heads).uniform_(1, 16),
        "b": torch.randn(batch, length, 1, 128),
        "c": torch.randn(batch, length, 1, 128),
        "D": torch.ones(heads),
    }


def delta_inputs(
    batch: int, length: int, width: int, size: int | None = None, value_size: int | None = None
) -> dict[str, Tensor]:
    """Draw those of `product_inputs` for one step, beta in [0, 1], and log_decay (B, T, heads) as Mamba-2's delta A."""
    inputs = product_inputs(batch, length, width, size, value_size, steps=1, beta=1.0)
    heads = inputs["q"].shape[2]
    decay = -log_uniform(1e-3, 1e-1, batch, length, heads) * torch.empty(heads).uniform_(1, 16)
    return {**inputs, "log_decay": decay}


def product_inputs(
    batch: int,
    length: int,
    width: int,
    size: int | None = None,
    value_size: int | None = None,
    steps: int = 2,
    beta: float = 2.0,
) -> dict[str, Tensor]:
    """Draw q (B, T, heads, K), k and v (B, T, n, heads, K or V), beta (B, T, n, heads) up to `beta`; |q| = |k| = 1.

    There are width / K heads. `size` is K, that of `HEAD` where it is None, and `value_size` V, K where it is None.
    """
    K = size or _heads(width)[1]
    heads, V = width // K, value_size or K
    return {
        "q": normalize(torch.randn(batch, length, heads, K), dim=-1),
        "k": normalize(torch.randn(batch, length, steps, heads, K), dim=-1),
        "v": torch.randn(batch, length, steps, heads, V),
        "beta": beta * torch.rand(batch, length, steps, heads),
    }


def diagonal_inputs(batch: int, length: int, width: int) -> dict[str, Tensor]:
    """Draw a and x (B, T, d); a is between exp(-1) and exp(-0.001)."""
    return {
        "a": torch.exp(-log_uniform(1e-3, 1.0, batch, length, width)),
        "x": torch.randn(batch, length, width),
    }


def _heads(width: int) -> tuple[int, int]:
    """Return the number of heads and their channels."""
    size = math.gcd(width, HEAD)
    return width // size, size


OPS = {
    "selective_scan": Op("selective_scan", scan_inputs),
    "ssd": Op("ssd", ssd_inputs),
    "delta_rule": Op("delta_rule", delta_inputs),
    "delta_product": Op("delta_rule", product_inputs),
    "diagonal_scan": Op("diagonal_scan", diagonal_inputs),
}


@dataclass(frozen=True)
class Sizes:
    """Keys of this benchmark."""

    ops: list[str] = field(default_factory=lambda: list(OPS))
    batch_size: Count = 8
    length: Count = 512
    width: Count = 256


def contenders(sizes: Sizes, context: Context) -> Iterator[Contender]:
    """For each op the fused backend at every length, then the reference at `length`."""
    for name in sizes.ops:
        if name not in OPS:
            raise UserError(f"unknown op '{name}'{did_you_mean(name, OPS)} ({', '.join(OPS)})")
    for name in dict.fromkeys(sizes.ops):
        yield from _of_op(name, sizes, context.threads)


def _of_op(name: str, sizes: Sizes, threads: int) -> Iterator[Contender]:
    group = f"{name}, batch size {sizes.batch_size}, width {sizes.width}"
    missing = why_not_fused(OPS[name].name)
    shorter = [sizes.length // part for part in (4, 2) if sizes.length % part == 0]
    lengths = [*shorter, sizes.length, 2 * sizes.length]
    cases = {length: make_case(name, sizes.batch_size, length, sizes.width) for length in lengths}
    memory = {"name": name, "threads": threads, "batch_size": sizes.batch_size, "length": sizes.length}
    measured = partial(extra_memory, prepare_memory, cases[sizes.length], width=sizes.width, **memory)
    for i, (length, case) in enumerate(cases.items()):
        fused, reference = (partial(_work, name, backend, case) for backend in ("cpu", "reference"))
        yield Contender(
            f"cpu, length {length}",
            group,
            stopwatch(fused),
            check=partial(compare, fused, reference, case),
            baseline=f"cpu, length {lengths[i - 1]}" if i else None,
            target=DOUBLED if i else None,
            numbers=partial(measured, backend="cpu") if length == sizes.length else dict,
            missing=missing,
        )
    yield Contender(
        f"reference, length {sizes.length}",
        group,
        stopwatch(partial(_work, name, "reference", cases[sizes.length])),
        baseline=f"cpu, length {sizes.length}",
        target=FASTER,
        numbers=partial(measured, backend="reference"),
    )


def make_case(name: str, batch_size: int, length: int, width: int) -> Case:
    """Return the inputs of an op and a gradient of its y (B, T, d)."""
    return draw(partial(OPS[name].inputs, batch_size, length, width), batch_size, length, width)


def _work(name: str, backend: str, case: Case) -> tuple[Tensor, ...]:
    return forward_backward(partial(OPS[name].call, backend), case)


def prepare_memory(
    name: str, backend: str, threads: int, batch_size: int, length: int, width: int
) -> Callable[[], object]:
    """Use an op once on a tiny case, and return its work on inputs that are there already."""
    set_threads(threads)
    _work(name, backend, make_case(name, 1, WARM_LENGTH, width))
    return partial(_work, name, backend, make_case(name, batch_size, length, width))
