"""Mamba-2 (Dao and Gu 2024): a diagonal recurrence with one decay for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.blocks import residual_model
from fpexp.models.initialisation import Delta, Rate, delta_bias
from fpexp.models.lm import LanguageModel, SequenceLayer
from fpexp.models.short_convolution import ShortConvolution, activate
from fpexp.models.sizes import check_ascends, check_divides, count_heads, inner_width
from fpexp.ops.ssd import ssd
from fpexp.ranges import Count, CountOrZero, Depth, NonNegative, Positive, Probability


@dataclass(frozen=True)
class Carried:
    """What the past leaves behind: the convolution's last inputs (B, conv_width - 1, .), H (B, heads, P, N)."""

    inputs: Tensor | None
    H: Tensor


class GatedNorm(nn.Module):
    """weight * rms_norm(y * silu(z)), normalised over the channels of each group by themselves; y, z: (..., d)."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """Return (..., d)."""
        gated = (y * functional.silu(z)).unflatten(-1, (self.groups, -1))
        return self.weight * functional.rms_norm(gated, gated.shape[-1:], eps=1e-5).flatten(-2)


class Mamba2Layer(SequenceLayer):
    """One Mamba-2 layer, (B, T, d_model) -> (B, T, d_model), inner width d = heads * head_size (sec. 7).

        z_t, xbc_t, dt_t = W_in u_t
        x_t, b_t, c_t    = silu(conv(xbc))_t
        Delta_t          = softplus(dt_t + dt_bias)
        y                = ssd(x, Delta, A, b, c, D)
        output_t         = W_out norm(y_t * silu(z_t))

    A and D are one number a head, b and c one vector of `state_size` a group of heads; the norm is RMSNorm, of each
    group by itself.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_size: int,
        state_size: int,
        groups: int,
        conv_width: int,
        a_range: tuple[float, float],
        delta_range: tuple[float, float],
    ) -> None:
        super().__init__()
        width, shared = heads * head_size, groups * state_size
        self.heads, self.groups, self.output_size = heads, groups, d_model
        self.state_numbers = width * state_size
        self.in_sizes = (width, width + 2 * shared, heads)
        self.conv_sizes = (width, shared, shared)
        self.in_projection = nn.Linear(d_model, sum(self.in_sizes), bias=False)
        self.convolution = ShortConvolution(width + 2 * shared, conv_width) if conv_width else None
        self.dt_bias = nn.Parameter(delta_bias(heads, delta_range))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(*a_range).log())
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = GatedNorm(width, groups)
        self.out_projection = nn.Linear(width, d_model, bias=False)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """There is nothing to solve, and padding on the right changes no real token."""
        output, solves, _ = self.decode(u, None)
        return output, solves

    def decode(self, u: Tensor, state: Carried | None) -> tuple[Tensor, tuple[SolveResult, ...], Carried]:
        """As `forward`, from the convolution's inputs and H before u to those after it."""
        z, xbc, dt = self.in_projection(u).split(self.in_sizes, dim=-1)
        xbc, inputs = activate(self.convolution, xbc, None if state is None else state.inputs)
        x, b, c = xbc.split(self.conv_sizes, dim=-1)
        y, H = ssd(
            x.unflatten(-1, (self.heads, -1)),
            functional.softplus(dt + self.dt_bias),
            -self.A_log.exp(),
            b.unflatten(-1, (self.groups, -1)),
            c.unflatten(-1, (self.groups, -1)),
            self.D,
            None if state is None else state.H,
        )
        return self.out_projection(self.norm(y.flatten(-2), z)), (), Carried(inputs, H)


def mamba2(
    vocabulary_size: int,
    *,
    d_model: Count,
    layers: Depth,
    expand: Positive,
    head_size: Count,
    state_size: Count,
    groups: Count,
    conv_width: CountOrZero,
    a_range: tuple[Rate, Rate],
    delta_range: tuple[Delta, Delta],
    mlp_expand: NonNegative,
    dropout: Probability,
) -> LanguageModel:
    """Return a Mamba-2 language model of inner width expand * d_model.

    At the start -A is uniform in `a_range` and Delta log-uniform in `delta_range`. UserError where a range does not
    ascend, where heads do not fill the inner width or where groups do not share the heads evenly.
    """
    width = inner_width(expand, d_model)
    heads = count_heads(head_size, width)
    check_divides("model.groups", groups, "the number of heads model.expand * model.d_model / model.head_size", heads)
    check_ascends("model.a_range", a_range)
    check_ascends("model.delta_range", delta_range)

    def layer() -> Mamba2Layer:
        return Mamba2Layer(d_model, heads, head_size, state_size, groups, conv_width, a_range, delta_range)

    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, layer)
