"""What the fused sequential sweeps take and return, of whatever scan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fpexp.ops.mixers import KnownTokens


@dataclass(frozen=True)
class SweepSettings:
    """When a token is solved, and how its iteration is damped; the settings of `Sequential`."""

    tolerance: float
    relative: bool
    inner_max_iterations: int
    damping: float
    damping_decay: float
    patience: int
    divergence_limit: float


@dataclass(frozen=True)
class SweepResult:
    """y* (B, T, d); of each token (B, T) its iterations, residual and status code; the last H (B, d, N)."""

    value: Tensor
    iterations: Tensor
    residual: Tensor
    status: Tensor
    H: Tensor
    known: KnownTokens | None = None
