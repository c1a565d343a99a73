"""Tensors of more than 2^31 numbers (CASES.md 13): the last sequences come out as they do by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpexp.bench.device.correctness import Case, cases
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.launches import KERNELS, Shape
from fpexp.machine import is_out_of_memory

WEIGHTS = ("A", "D")


def items(setup: Setup) -> dict[str, Item]:
    """One for each op."""
    ops = {case.op.__name__: case for case in cases(setup).values()}
    return {f"offsets of {name}": partial(_check, name, case, setup) for name, case in ops.items()}


def _check(name: str, case: Case, setup: Setup) -> list[Finding]:
    shape, limit = (Shape(1, 3, 4, 2), 12) if setup.rehearse else (Shape(64, 64, 1024, 16), 2**31)
    with torch.device(setup.device):
        few = KERNELS[name].arguments(shape, torch.bfloat16)
    times = limit // (shape.batch * shape.length * shape.width) + 1
    many = {key: t if key in WEIGHTS else t.repeat(times, *[1] * (t.dim() - 1)) for key, t in few.items()}
    what = f"{name} past {limit:,} numbers"
    try:
        found = {key: t[-shape.batch :] for key, t in _results(case.op, many).items()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return [Finding(what, "not tried: more memory than there is")]
    expected = _results(case.op, few)
    different = [key for key, tensor in expected.items() if not torch.equal(tensor, found[key])]
    said = f"other numbers in {', '.join(different)}" if different else "the same"
    return [Finding(what, said, "the same sequences alone", not different)]


def _results(op: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the output and the gradients of what grows with the batch."""
    leaves = {key: tensor.detach().requires_grad_(key not in WEIGHTS) for key, tensor in inputs.items()}
    found = op(**leaves, backend="triton")
    y = found if isinstance(found, Tensor) else found[0]
    asked = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(y.sum(), tuple(asked.values()))
    return {"y": y.detach(), **{f"d{key}": gradient for key, gradient in zip(asked, gradients, strict=True)}}
