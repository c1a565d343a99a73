"""Mamba (Gu and Dao 2023): the diagonal baseline, whose scan FP-Mamba iterates."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.blocks import residual_model
from fpexp.models.initialisation import Delta, delta_logits, delta_projection, s4d_real
from fpexp.models.lm import LanguageModel, SequenceLayer
from fpexp.models.short_convolution import ShortConvolution, activate
from fpexp.models.sizes import check_ascends, inner_width
from fpexp.ops.selective_scan import selective_scan
from fpexp.ranges import Count, CountOrZero, Depth, NonNegative, Positive, Probability


@dataclass(frozen=True)
class Carried:
    """What the past leaves behind: `H` (B, d, N), and the convolution's last inputs (B, conv_width - 1, d)."""

    H: Tensor
    inputs: Tensor | None


class MambaLayer(SequenceLayer):
    """One Mamba layer, (B, T, d_model) -> (B, T, d_model), inner width d.

    x, z = W_in u;  x = silu(conv(x));  delta = softplus(W_dt W_r x + b_dt);  b, c = W x
    H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T;  output W_out(silu(z_t) * (H_t c_t + D * x_t))
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        state_size: int,
        dt_rank: int,
        conv_width: int,
        delta_range: tuple[float, float],
    ) -> None:
        super().__init__()
        self.output_size = d_model
        self.state_numbers = width * state_size
        self.x_sizes = (dt_rank, state_size, state_size)
        self.in_projection = nn.Linear(d_model, 2 * width, bias=False)
        self.convolution = ShortConvolution(width, conv_width) if conv_width else None
        self.x_projection = nn.Linear(width, sum(self.x_sizes), bias=False)
        self.dt_projection = delta_projection(dt_rank, width, delta_range)
        self.A_log = nn.Parameter(s4d_real(width, state_size))
        self.D = nn.Parameter(torch.ones(width))
        self.out_projection = nn.Linear(width, d_model, bias=False)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the output; there is nothing to solve, and padding on the right changes nothing before it."""
        output, solves, _ = self.decode(u, None)
        return output, solves

    def decode(self, u: Tensor, state: Carried | None) -> tuple[Tensor, tuple[SolveResult, ...], Carried]:
        """Return the output, no solves, and what the tokens so far leave behind."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        x, inputs = activate(self.convolution, x, None if state is None else state.inputs)
        dt, b, c = self.x_projection(x).split(self.x_sizes, dim=-1)
        delta = functional.softplus(delta_logits(self.dt_projection, dt))
        y, H = selective_scan(x, delta, -self.A_log.exp(), b, c, self.D, None if state is None else state.H)
        return self.out_projection(functional.silu(z) * y), (), Carried(H, inputs)


def mamba(
    vocabulary_size: int,
    *,
    d_model: Count,
    layers: Depth,
    expand: Positive,
    state_size: Count,
    dt_rank: Count | None,
    conv_width: CountOrZero,
    delta_range: tuple[Delta, Delta],
    mlp_expand: NonNegative,
    dropout: Probability,
) -> LanguageModel:
    """Return a Mamba language model of inner width expand * d_model."""
    width = inner_width(expand, d_model)
    check_ascends("model.delta_range", delta_range)

    def layer() -> MambaLayer:
        return MambaLayer(d_model, width, state_size, dt_rank or math.ceil(d_model / 16), conv_width, delta_range)

    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, layer)
