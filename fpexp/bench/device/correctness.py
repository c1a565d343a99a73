"""Every kernel against the float64 reference, forward and backward, on the device itself (CASES.md 7, 11, 14, 16).

Some versions of Triton gave wrong gradients of the delta rule on Hopper: it is looked at with heads of 64, 100 and 128.
Room for results is full of NaN, so that a number that no kernel writes is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpexp.bench import selective_scan as scan_inputs
from fpexp.bench.device import solves, subjects
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.ops import delta_inputs, diagonal_inputs, product_inputs, ssd_inputs
from fpexp.bench.truth import posed, step_checks
from fpexp.fixed_point import Cap
from fpexp.ops.backend import available
from fpexp.ops.delta_rule import delta_rule
from fpexp.ops.diagonal_scan import diagonal_scan
from fpexp.ops.selective_scan import selective_scan
from fpexp.ops.ssd import ssd
from fpexp.randomness import generator

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Largest error of an output or a gradient, relative to its largest entry."""

MODELS = (*subjects.FIXED_POINTS, "mamba", "mamba2", "gdn", "deltaproduct")
SEQUENCES = 16

WIDE = ("A", "D", "state")
"""Weights and states: float32 beside narrower inputs."""


class Case(NamedTuple):
    """An op and what draws its inputs; gradients go by the letters of `letters` where a paper has others."""

    op: Callable[..., Any]
    draw: Callable[[], Mapping[str, Tensor]]
    letters: Mapping[str, str] = {}


def cases(setup: Setup) -> dict[str, Case]:
    """Lengths that are no multiple of a chunk, and widths that are no multiple of a tile."""
    B, T = (1, 3) if setup.rehearse else (2, 129)
    d, N, heads = (3, 2, (4,)) if setup.rehearse else (100, 16, (64, 100, 128))
    found = {
        f"diagonal_scan, d {d}": Case(diagonal_scan, lambda: diagonal_inputs(B, T, d) | {"state": torch.randn(B, d)}),
        f"selective_scan, d {d}, N {N}": Case(
            selective_scan, lambda: scan_inputs.make_inputs(B, T, d, N) | {"state": torch.randn(B, d, N)}
        ),
    }
    for size in heads:
        found[f"ssd, heads of {size}"] = Case(ssd, partial(_ssd, B, T, size))
        for name, draw in (("delta_rule", delta_inputs), ("delta_product", product_inputs)):
            found[f"{name}, heads of {size}"] = Case(delta_rule, partial(_delta, draw, B, T, size), {"log_decay": "g"})
    return {name: case for name, case in found.items() if "triton" in available(case.op.__name__)}


def _ssd(batch: int, length: int, size: int) -> dict[str, Tensor]:
    inputs = ssd_inputs(batch, length, 128)
    inputs["x"] = torch.randn(batch, length, inputs["delta"].shape[2], size)
    return inputs | {"state": torch.randn(batch, *inputs["x"].shape[2:], inputs["b"].shape[3])}


def _delta(draw: Callable[..., dict[str, Tensor]], batch: int, length: int, size: int) -> dict[str, Tensor]:
    return draw(batch, length, 2 * size, size) | {"state": torch.randn(batch, 2, size, size)}


def items(setup: Setup) -> dict[str, Item]:
    """One for each case in each type, and one for each model."""
    dtypes = [torch.float32] if setup.rehearse else list(LIMITS)
    found: dict[str, Item] = {
        f"{name}, {str(dtype).removeprefix('torch.')}": partial(_check, name, case, dtype, setup)
        for name, case in cases(setup).items()
        for dtype in dtypes
    }
    for name in subjects.FIXED_POINTS:
        found |= {f"{name}, {way}": partial(_check_solve, name, way, setup) for way in solves.FUSED}
    return found | {f"a step of {name}": partial(_check_step, name, setup) for name in MODELS}


def _check_solve(name: str, way: str, setup: Setup) -> list[Finding]:
    """Tell whether the residual that a fused solver reports is that of the reference where it has stopped."""
    experiment = subjects.make(name, setup.device, setup.rehearse, precision="float32")
    count, length = (2, 3) if setup.rehearse else (SEQUENCES, 65)
    tokens = experiment.task.sample(count, length, generator(0, "bench")).inputs.to(setup.device)
    (layer,) = posed(experiment.model.eval(), tokens)
    check = layer.check(solves.FUSED[way].solve(layer.problem(), Cap(1000), training=False), "relative")
    said, numbers = f"{check.what} {check.value:.0e}", {check.what: check.value}
    return [Finding(f"{name}, {way}", said, f"at most {check.limit:g}", check.passed, numbers)]


def _check_step(name: str, setup: Setup) -> list[Finding]:
    """Loss and gradients of a training step, at the fixed points that were found."""
    torch.backends.cudnn.allow_tf32 = False
    experiment = subjects.make(name, setup.device, setup.rehearse, precision="float32")
    length = experiment.task.lengths.max
    batch = experiment.task.sample(4 if setup.rehearse else SEQUENCES, length, generator(0, "bench")).to(setup.device)
    cap = experiment.schedule.training_cap(length, generator(0, "bench", 1))
    checks = step_checks(experiment.model, batch, cap)
    said = ", ".join(f"{check.what.removeprefix('relative ')} {check.value:.0e}" for check in checks)
    limits = ", ".join(f"{check.limit:g}" for check in checks)
    numbers = {check.what: check.value for check in checks}
    return [Finding(f"a step of {name}", said, f"at most {limits}", all(c.passed for c in checks), numbers)]


def _check(name: str, case: Case, dtype: torch.dtype, setup: Setup) -> list[Finding]:
    torch.manual_seed(0)
    with torch.device(setup.device):
        drawn = case.draw()
    inputs = {key: tensor if key in WIDE else tensor.to(dtype) for key, tensor in drawn.items()}
    with poisoned():
        found = results(case.op, inputs, "triton", case.letters)
    exact = results(case.op, {key: tensor.double() for key, tensor in inputs.items()}, "reference", case.letters)
    errors = {key: relative_error(found[key], exact[key]) for key in exact}
    limit = LIMITS[dtype]
    return [
        Finding(
            f"{name}, {str(dtype).removeprefix('torch.')}",
            ", ".join(f"{key} {error:.0e}" for key, error in errors.items()),
            f"at most {limit:g}",
            all(error <= limit for error in errors.values()),
            errors,
        )
    ]


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block, torch fills what is empty with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def results(
    op: Callable[..., Any], inputs: Mapping[str, Tensor], backend: str, letters: Mapping[str, str]
) -> dict[str, Tensor]:
    """Return outputs and, for random gradients of them that any type can hold, the gradient of every input."""
    leaves = {key: tensor.detach().requires_grad_() for key, tensor in inputs.items()}
    found = op(**leaves, backend=backend)
    outputs = (found,) if isinstance(found, Tensor) else tuple(found)
    source = torch.Generator().manual_seed(1)
    gradients = [torch.randn(out.shape, generator=source).bfloat16().to(out) for out in outputs]
    asked = torch.autograd.grad(outputs, tuple(leaves.values()), gradients)
    named = {f"d{letters.get(key, key)}": gradient for key, gradient in zip(leaves, asked, strict=True)}
    return {name: out.detach() for name, out in zip(("y", "last"), outputs, strict=False)} | named


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference, relative to the largest entry; NaN where there is one."""
    return float((found.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
