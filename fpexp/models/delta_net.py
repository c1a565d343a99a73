"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024) and DeltaProduct (Siems et al. 2025)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.errors import UserError
from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.blocks import residual_model
from fpexp.models.initialisation import Delta, delta_bias
from fpexp.models.lm import LanguageModel, SequenceLayer
from fpexp.models.short_convolution import ShortConvolution, activate
from fpexp.models.sizes import check_ascends, check_divides
from fpexp.ops.delta_rule import delta_rule
from fpexp.ops.l2norm import l2norm
from fpexp.ranges import Count, CountOrZero, Depth, NonNegative, Positive, Probability


@dataclass(frozen=True)
class Carried:
    """What the past leaves behind for decoding.

    `S` (B, heads, key_size, value_size) is the delta rule's state; `inputs` (B, conv_width - 1, channels) are the
    convolution's last ones, None without one.
    """

    S: Tensor
    inputs: Tensor | None


class DeltaNetLayer(SequenceLayer):
    """One layer of n Householder steps a token, (B, T, d_model) -> (B, T, d_model); of each head

        q, k_i, v_i = silu(conv(W_q u)), silu(conv(W_ki u)), silu(conv(W_vi u)),   i = 1 .. n
        beta_i      = beta_max * sigmoid(w_bi . u)
        log_decay   = -A softplus(w_a . u + dt_bias)
        o           = delta_rule(l2norm(q) / sqrt(key_size), l2norm(k), v, beta, log_decay)

    and the output W_out(rms_norm(o) * silu(W_g u)), the norm over a head's channels, with one weight for all heads.
    With `beta_max` 2 the eigenvalue along a k can reach -1 (Grazzi et al. 2024); without `decay` it is DeltaNet.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        key_size: int,
        value_size: int,
        householder_steps: int,
        conv_width: int,
        negative_eigenvalues: bool,
        decay: bool,
        delta_range: tuple[float, float],
    ) -> None:
        super().__init__()
        self.heads, self.steps = heads, householder_steps
        self.beta_max = 2.0 if negative_eigenvalues else 1.0
        self.output_size = d_model
        self.state_numbers, self.state_key = heads * key_size * value_size, "head_size"
        keys, values = heads * key_size, heads * value_size
        self.convolved = (keys, householder_steps * keys, householder_steps * values)
        self.sizes = (sum(self.convolved), values, householder_steps * heads, heads if decay else 0)
        self.in_projection = nn.Linear(d_model, sum(self.sizes), bias=False)
        self.convolution = ShortConvolution(sum(self.convolved), conv_width) if conv_width else None
        if decay:
            A = torch.empty(heads).uniform_(0, 16)
            self.A_log = nn.Parameter(A.clamp_(min=1e-4).log_())  # as Mamba-2's; 0 has no logarithm
            self.dt_bias = nn.Parameter(delta_bias(heads, delta_range))
        self.norm = nn.RMSNorm(value_size, eps=1e-5)
        self.out_projection = nn.Linear(values, d_model, bias=False)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return (B, T, d_model); there is nothing to solve."""
        output, solves, _ = self.decode(u, None)
        return output, solves

    def decode(self, u: Tensor, state: Carried | None) -> tuple[Tensor, tuple[SolveResult, ...], Carried]:
        """As `forward`, on from `state`. Rates and norms are computed in the type of the parameters."""
        dtype = self.in_projection.weight.dtype
        x, gate, b, a = self.in_projection(u).split(self.sizes, dim=-1)
        x, inputs = activate(self.convolution, x, None if state is None else state.inputs)
        q, k, v = x.split(self.convolved, dim=-1)
        q = l2norm(q.unflatten(-1, (self.heads, -1)).to(dtype))
        k, v = (part.unflatten(-1, (self.steps, self.heads, -1)) for part in (k, v))
        beta = self.beta_max * b.to(dtype).sigmoid().unflatten(-1, (self.steps, self.heads))
        S = None if state is None else state.S
        o, S = delta_rule(q * q.shape[-1] ** -0.5, l2norm(k.to(dtype)), v, beta, self._log_decay(a), S)
        o = self.norm(o.to(dtype)) * functional.silu(gate).unflatten(-1, (self.heads, -1))
        return self.out_projection(o.flatten(-2)), (), Carried(S, inputs)

    def _log_decay(self, a: Tensor) -> Tensor | None:
        """Return (B, T, heads), not above 0."""
        if not a.shape[-1]:
            return None
        return -self.A_log.exp() * functional.softplus(a.to(self.dt_bias.dtype) + self.dt_bias)


def gated_delta_net(
    vocabulary_size: int,
    *,
    d_model: Count,
    layers: Depth,
    heads: Count | None,
    head_size: Count | None,
    expand_v: Positive,
    conv_width: CountOrZero,
    negative_eigenvalues: bool,
    decay: bool,
    delta_range: tuple[Delta, Delta],
    mlp_expand: NonNegative = 0.0,
    dropout: Probability,
) -> LanguageModel:
    """Return a Gated DeltaNet language model; with `decay` false, a DeltaNet.

    A head's q and k are of size `head_size`, its v of `expand_v * head_size`. See `delta_product` for the defaults.
    """
    return delta_product(
        vocabulary_size,
        d_model=d_model,
        layers=layers,
        heads=heads,
        head_size=head_size,
        expand_v=expand_v,
        householder_steps=1,
        conv_width=conv_width,
        negative_eigenvalues=negative_eigenvalues,
        decay=decay,
        delta_range=delta_range,
        mlp_expand=mlp_expand,
        dropout=dropout,
    )


def delta_product(
    vocabulary_size: int,
    *,
    d_model: Count,
    layers: Depth,
    heads: Count | None,
    head_size: Count | None,
    expand_v: Positive,
    householder_steps: Count,
    conv_width: CountOrZero,
    negative_eigenvalues: bool,
    decay: bool,
    delta_range: tuple[Delta, Delta],
    mlp_expand: NonNegative = 0.0,
    dropout: Probability,
) -> LanguageModel:
    """Return a DeltaProduct language model of `householder_steps` keys, values and betas a token.

    `heads` None: one for 128 channels, at least 2, fewer where that does not divide d_model; `head_size` None:
    d_model / heads. UserError for sizes that are no whole numbers and for a `delta_range` that does not ascend.
    """
    check_ascends("model.delta_range", delta_range)
    if heads is None:
        heads = next(count for count in range(max(2, d_model // 128), 0, -1) if d_model % count == 0)
    if head_size is None:
        check_divides("model.heads", heads, "model.d_model", d_model, ", or set model.head_size")
        head_size = d_model // heads
    make_layer = functools.partial(
        DeltaNetLayer,
        d_model,
        heads,
        head_size,
        _value_size(head_size, expand_v),
        householder_steps,
        conv_width,
        negative_eigenvalues,
        decay,
        delta_range,
    )
    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, make_layer)


def _value_size(key_size: int, expand_v: float) -> int:
    size = round(expand_v * key_size)
    if not size or abs(size - expand_v * key_size) > 1e-6 * size:
        raise UserError(
            f"model.expand_v={expand_v:g} times model.head_size={key_size} is no whole number from 1 on; "
            f"model.expand_v={max(size, 1) / key_size:.12g} would be"
        )
    return size
