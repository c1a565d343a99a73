"""FP-Mamba: Mamba's selective scan, iterated with a channel mixer to a dense recurrence (paper sec. 4)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Gradient, Solver
from fpexp.models.blocks import residual_model
from fpexp.models.fp_mamba_layer import Decay, DecayScale, Dependence, Dynamics, FPScanLayer
from fpexp.models.initialisation import Delta, delta_logits, s4d_real
from fpexp.models.lm import LanguageModel
from fpexp.models.sizes import inner_width
from fpexp.ranges import Count, CountOrZero, Depth, NonNegative, Positive, Probability


class FPMambaLayer(FPScanLayer):
    """Mamba's dynamics: Delta = softplus(W_dt (W_r x) + b_dt) (B, T, d), A = -exp(A_log) (d, N) and D (d)."""

    def __init__(
        self,
        d_model: int,
        width: int,
        dt_rank: int,
        delta_range: tuple[float, float],
        decay: Decay = "exponential",
        decay_scale: float = 8.0,
        **shared: Any,
    ) -> None:
        dynamics = Dynamics(dt_rank, width, delta_range, decay, decay_scale)
        super().__init__(d_model, width, dynamics=dynamics, **shared)

    def _make_dynamics(self) -> None:
        self.dt_projection = nn.Linear(self.dynamics.columns, self.width)
        self._make_A(s4d_real(self.width, self.state_size))
        self.D = nn.Parameter(torch.ones(self.width))

    def _initialise(self) -> None:
        """W_dt as in Mamba; Delta log-uniform."""
        super()._initialise()
        bound = self.dynamics.columns**-0.5
        nn.init.uniform_(self.dt_projection.weight, -bound, bound)
        with torch.no_grad():
            self.dt_projection.bias.copy_(self._delta_bias())

    def _zero_delta_weights(self) -> None:
        self.dt_projection.weight.zero_()

    def _delta(self, dt: Tensor) -> Tensor:
        return delta_logits(self.dt_projection, dt)


def fp_mamba(
    vocabulary_size: int,
    solver: Solver,
    gradient: Gradient,
    *,
    channel_mixer: Callable[[int], ChannelMixer],
    d_model: Count,
    layers: Depth,
    expand: Positive,
    state_size: Count,
    dt_rank: Count | None,
    conv_width: CountOrZero,
    norm: Literal["layer_norm", "none"],
    norm_epsilon: Positive,
    gate: Literal["outside", "inside"],
    dependence: Dependence,
    delta_range: tuple[Delta, Delta],
    decay: Decay = "exponential",
    decay_scale: DecayScale = 8.0,
    weight_norm: bool,
    mlp_expand: NonNegative = 0.0,
    dropout: Probability,
) -> LanguageModel:
    """Return an FP-Mamba language model; `channel_mixer` builds a mixer for the inner width expand * d_model.

    UserError where sizes come to nothing or `delta_range` does not ascend.
    """
    width = inner_width(expand, d_model)

    def layer() -> FPMambaLayer:
        return FPMambaLayer(
            d_model,
            width,
            channel_mixer=channel_mixer(width),
            state_size=state_size,
            dt_rank=dt_rank or math.ceil(d_model / 16),
            conv_width=conv_width,
            solver=solver,
            gradient=gradient,
            dependence=dependence,
            gate=gate,
            norm=norm,
            norm_epsilon=norm_epsilon,
            delta_range=delta_range,
            decay=decay,
            decay_scale=decay_scale,
            weight_norm=weight_norm,
        )

    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, layer)
