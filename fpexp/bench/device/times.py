"""Each launch of each kernel against its floor on an H200; each op, forward and backward, against public packages.

Nothing is tuned before it is timed. A floor of another card than an H200 is that of an H200 still.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from fpexp.bench.device import peers
from fpexp.bench.device.part import Finding, Item, Setup
from fpexp.bench.launches import KERNELS, SCALES, Shape
from fpexp.bench.roofline import floor_of, predict

SMALLEST = Shape(1, 3, 4, 2)


class Case(NamedTuple):
    """What is timed together."""

    kernels: str
    scale: str
    shape: Shape
    dtype: torch.dtype

    def named(self, launch: str = "") -> str:
        """Return its name, or that of one of its launches, for the table."""
        return f"{f'{self.kernels} {launch}'.strip()}, {self.scale}, {str(self.dtype).removeprefix('torch.')}"


def cases(setup: Setup) -> list[Case]:
    """Language at scale=gpu in both types; the other sizes, but for copying, in one."""
    if setup.rehearse:
        return [Case(name, "tiny", SMALLEST, torch.float32) for name in KERNELS]
    sizes = [("gpu", torch.bfloat16), ("gpu", torch.float32)]
    sizes += [(scale, torch.bfloat16) for scale in ("paper", "cpu", "long")]
    return [Case(name, scale, SCALES[scale], dtype) for scale, dtype in sizes for name in KERNELS]


def launches_of(case: Case, setup: Setup) -> dict[str, Any]:
    """Return a case's launches on the device, in the order in which training makes them."""
    return KERNELS[case.kernels].launches(case.shape, case.dtype, setup.device)


def items(setup: Setup) -> dict[str, Item]:
    """The launches, then the ops."""
    found: dict[str, Item] = {case.named(): partial(_time, case, setup) for case in cases(setup)}
    return found | peers.items(setup)


def _time(case: Case, setup: Setup) -> list[Finding]:
    rows = []
    for name, launch in launches_of(case, setup).items():
        measured = setup.milliseconds(launch.run)
        floor, resource = floor_of(case.kernels, name, launch)
        against = f"{measured / (1e3 * floor):.1f} x {1e3 * floor:.3g} of {resource}"
        predicted = predict(case.kernels, name, launch)
        if predicted is not None:
            against += f", predicted {1e3 * predicted[0]:.3g} to {1e3 * predicted[1]:.3g}"
        numbers = {"ms": measured, "floor_ms": 1e3 * floor, "bound_by": resource, "predicted_s": predicted}
        rows.append(Finding(case.named(name), f"{measured:.3g} ms", against, numbers=numbers))
    return rows
