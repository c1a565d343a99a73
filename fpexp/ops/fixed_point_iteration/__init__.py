"""Picard's iteration on FP-Mamba's f as one call: evaluations, residuals, damping and stopping stay on the device.

Its truth is `fpexp.fixed_point.iterate` with `Damped`; `triton` makes the same iterates, counts and statuses with one
launch an iteration, and the host looks at the device once in several of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fpexp.ops.backend import choose, load, say_once
from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.mixers import MixerForm


@dataclass(frozen=True)
class IterationSettings:
    """When a batch or its sequences stop, and how their iterations are damped: `Stopping`, `Damped` and `Cap`."""

    tolerance: float
    relative: bool
    divergence_limit: float
    together: bool
    outlier_quantile: float
    damping: float
    damping_decay: float
    patience: int
    max_iterations: int
    stop_early: bool


@dataclass(frozen=True)
class IterationResult:
    """The iterate (B, T, d) that `residual` (B,) was measured at; of each sequence iterations and status code (B,).

    A sequence that is not solved is UNCONVERGED, also at the cap.
    """

    value: Tensor
    iterations: Tensor
    residual: Tensor
    status: Tensor


def iterate(
    terms: SweepTerms, form: MixerForm | None, settings: IterationSettings, backend: str = "auto"
) -> IterationResult | None:
    """Iterate y <- f(y) from zero, without gradient; None where no kernel knows the mixer or the device.

    UserError for a `backend` that is not to be had.
    """
    if choose("fixed_point_iteration", terms.x.device, backend) == "reference":
        return None
    if form is None:
        if backend == "auto":
            say_once("this layer has no fused iteration: it is iterated in plain torch")
        return None
    terms.check()
    found: IterationResult | None = load("fixed_point_iteration", terms.x.device, backend).iterate(
        terms, form, settings
    )
    return found
