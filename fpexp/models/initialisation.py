"""How the parameters of state-space layers start (Gu and Dao 2023, Dao and Gu 2024)."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor, nn

from fpexp.ranges import Range

Delta = Annotated[float, Range(minimum=1e-6, maximum=1e4)]
"""So that softplus, its inverse and float32 agree on it."""

Rate = Annotated[float, Range(minimum=1e-6, maximum=1e4)]
"""A decay rate -A whose logarithm and exponential float32 holds."""

FLOOR = (0.9, 0.999)
"""Least decay of a channel at initialisation."""


def delta_bias(size: int, delta_range: tuple[float, float]) -> Tensor:
    """Return the bias (size,) with which softplus(bias) is log-uniform in `delta_range`."""
    delta = _log_uniform(size, delta_range)
    return delta + torch.log(-torch.expm1(-delta))  # the inverse of softplus


def sigmoid_bias(size: int, delta_range: tuple[float, float]) -> Tensor:
    """Return the bias (size,) with which sigmoid(bias) is log-uniform in `delta_range`, which ends below 1."""
    return torch.logit(_log_uniform(size, delta_range))


def floored_decay(shape: torch.Size, scale: float) -> Tensor:
    """Return omega with which the floor exp(-scale softplus(omega)) is uniform in [0.9, 0.999], as in the RG-LRU.

    De et al. 2024, whose decay is of the same form.
    """
    rate = -torch.empty(shape).uniform_(*FLOOR).log() / scale
    return rate + torch.log(-torch.expm1(-rate))  # the inverse of softplus


def _log_uniform(size: int, delta_range: tuple[float, float]) -> Tensor:
    low, high = (math.log(value) for value in delta_range)
    return torch.empty(size).uniform_(low, high).exp()


def delta_projection(rank: int, width: int, delta_range: tuple[float, float]) -> nn.Linear:
    """Return W_dt and b_dt of Mamba: uniform at the scale of the rank, and a bias from `delta_bias`."""
    projection = nn.Linear(rank, width)
    nn.init.uniform_(projection.weight, -(rank**-0.5), rank**-0.5)
    with torch.no_grad():
        projection.bias.copy_(delta_bias(width, delta_range))
    return projection


def delta_logits(projection: nn.Linear, dt: Tensor) -> Tensor:
    """Return W_dt dt + b_dt; under autocast the product may be bfloat16, but not the bias, which keeps small Deltas."""
    return nn.functional.linear(dt, projection.weight) + projection.bias


def s4d_real(width: int, state_size: int) -> Tensor:
    """Return A_log (width, state_size) with which A = -exp(A_log) has the rates 1, 2, ..., state_size."""
    return torch.arange(1.0, state_size + 1).log().repeat(width, 1)
