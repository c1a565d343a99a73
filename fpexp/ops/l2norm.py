"""Vectors of unit length, with the epsilon that the kernels and their truth agree on."""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def l2norm(v: Tensor) -> Tensor:
    """v / sqrt(|v|^2 + eps) over the last axis; the epsilon keeps value and gradient finite at v = 0."""
    return v * torch.rsqrt(v.square().sum(-1, keepdim=True) + EPSILON)
