"""What benchmarks of differentiated ops share: inputs, forward and backward, checks by gradient, and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpexp.bench.measure import Check
from fpexp.bench.memory import OutOfTime, peak_extra
from fpexp.errors import UserError
from fpexp.ops.backend import choose
from fpexp.randomness import seeded

Function = Callable[..., Tensor]
"""Inputs by name -> y (B, T, d)."""

TINY = 1e-30  # a gradient may be zero, such as that of a decay at length 1
LIMIT = 1e-4
"""Largest error of y or a gradient in float32, relative to its largest entry."""


@dataclass(frozen=True)
class Case:
    """Inputs by name, all of which ask for their gradient, and one given gradient of y."""

    inputs: Mapping[str, Tensor]
    grad_y: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs."""
        return sum(tensor.nbytes for tensor in self.inputs.values())


def draw(make: Callable[[], Mapping[str, Tensor]], *shape: int) -> Case:
    """Return the inputs that `make` draws and a gradient of y of this shape, the same every time."""
    with seeded(0, "bench"):
        inputs = {name: tensor.contiguous().requires_grad_() for name, tensor in make().items()}
        return Case(inputs, torch.randn(shape))


def log_uniform(low: float, high: float, *shape: int) -> Tensor:
    """Draw a tensor of this shape whose logarithm is uniform."""
    return low * (high / low) ** torch.rand(shape)


def forward_backward(function: Function, case: Case) -> tuple[Tensor, ...]:
    """Return y and the gradients of all inputs."""
    y = function(**case.inputs)
    return (y.detach(), *torch.autograd.grad(y, tuple(case.inputs.values()), case.grad_y))


def compare(
    work: Callable[[], tuple[Tensor, ...]], expected: Callable[[], tuple[Tensor, ...]], case: Case
) -> list[Check]:
    """Hold y and every gradient of `work` against those of the reference; both are `forward_backward` of one case."""
    names = ("y", *(f"the gradient of {name}" for name in case.inputs))
    return [
        Check(
            f"relative error of {name}", float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(TINY)), LIMIT
        )
        for name, ours, theirs in zip(names, work(), expected(), strict=True)
    ]


def extra_memory(
    prepare: Callable[..., Callable[[], object]], case: Case, **arguments: Any
) -> dict[str, float | str | None]:
    """Return the peak extra memory (see `memory`) of what `prepare` prepares, in MB and in units of the inputs."""
    try:
        extra = peak_extra(prepare, **arguments)
    except OutOfTime as error:
        return {"peak_extra_mb": str(error), "memory_of_inputs": None}
    return {
        "peak_extra_mb": None if extra is None else extra / 1e6,
        "memory_of_inputs": None if extra is None else extra / case.nbytes,
    }


def why_not_fused(op: str) -> str:
    """Return why the fused CPU backend of `op` cannot run; empty where it can."""
    try:
        choose(op, torch.device("cpu"), "cpu")
    except UserError as error:
        return str(error)
    return ""
