"""Scans, sweeps and what else has kernels, a folder each, and what the kernels share (`mixers`, `simd`, `sweep`)."""

from __future__ import annotations

import torch

from fpexp.ops.backend import choose

OPS = (
    "delta_rule",
    "diagonal_scan",
    "fixed_point_sweep",
    "selective_scan",
    "ssd",
    "token_mixing",
    "token_residual",
    "vector_sweep",
)


def backends() -> dict[str, str]:
    """Return, for each op, the backend that `auto` uses on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {op: choose(op, device) for op in OPS}
