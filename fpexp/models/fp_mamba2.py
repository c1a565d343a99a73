"""FP-Mamba-2: the iteration of FP-Mamba on Mamba-2's scan (paper app. E.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Gradient, Solver
from fpexp.models.blocks import residual_model
from fpexp.models.fp_mamba_layer import Decay, DecayScale, Dependence, Dynamics, FPScanLayer
from fpexp.models.initialisation import Delta, Rate
from fpexp.models.lm import LanguageModel
from fpexp.models.sizes import check_ascends, count_heads, inner_width
from fpexp.ranges import Count, CountOrZero, Depth, NonNegative, Positive, Probability


class FPMamba2Layer(FPScanLayer):
    """Mamba-2's dynamics: Delta = softplus(W_dt x + dt_bias) (B, T, heads), A = -exp(A_log) (heads) and D (heads).

    A head is `head_size` neighbouring channels, which decay alike; all heads share b and c (one group). The mixer is
    over all d channels. UserError where d is not a whole number of heads.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        head_size: int,
        delta_range: tuple[float, float],
        a_range: tuple[float, float],
        decay: Decay = "exponential",
        decay_scale: float = 8.0,
        **shared: Any,
    ) -> None:
        heads = count_heads(head_size, width)
        check_ascends("model.a_range", a_range)
        dynamics = Dynamics(heads, heads, delta_range, decay, decay_scale)
        super().__init__(d_model, width, dynamics=dynamics, **shared)
        if not dynamics.floor:
            with torch.no_grad():
                self.A_log.uniform_(*a_range).log_()

    def _make_dynamics(self) -> None:
        heads = self.dynamics.steps
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self._make_A(torch.empty(heads))
        self.D = nn.Parameter(torch.ones(heads))

    def _initialise(self) -> None:
        """Delta log-uniform."""
        super()._initialise()
        with torch.no_grad():
            self.dt_bias.copy_(self._delta_bias())

    def _zero_delta_weights(self) -> None:
        """By their magnitude where they are weight-normed, whose direction cannot be that of zero."""
        rows = slice(-self.dynamics.columns, None)
        parameters = dict(self.x_projection.named_parameters())
        parameters.get("parametrizations.weight.original0", self.x_projection.weight)[rows] = 0

    def _delta(self, dt: Tensor) -> Tensor:
        return dt + self.dt_bias


def fp_mamba2(
    vocabulary_size: int,
    solver: Solver,
    gradient: Gradient,
    *,
    channel_mixer: Callable[[int], ChannelMixer],
    d_model: Count,
    layers: Depth,
    expand: Positive,
    head_size: Count,
    state_size: Count,
    conv_width: CountOrZero,
    norm: Literal["rms_norm", "layer_norm", "none"],
    norm_epsilon: Positive,
    gate: Literal["outside", "inside"],
    dependence: Dependence,
    delta_range: tuple[Delta, Delta],
    a_range: tuple[Rate, Rate],
    decay: Decay = "exponential",
    decay_scale: DecayScale = 8.0,
    weight_norm: bool,
    mlp_expand: NonNegative,
    dropout: Probability,
) -> LanguageModel:
    """Return an FP-Mamba-2 language model; `channel_mixer` builds a mixer for the inner width expand * d_model.

    UserError where sizes come to nothing, `head_size` does not divide the inner width or a range does not ascend.
    """
    width = inner_width(expand, d_model)

    def layer() -> FPMamba2Layer:
        return FPMamba2Layer(
            d_model,
            width,
            channel_mixer=channel_mixer(width),
            head_size=head_size,
            state_size=state_size,
            conv_width=conv_width,
            solver=solver,
            gradient=gradient,
            dependence=dependence,
            gate=gate,
            norm=norm,
            norm_epsilon=norm_epsilon,
            delta_range=delta_range,
            a_range=a_range,
            decay=decay,
            decay_scale=decay_scale,
            weight_norm=weight_norm,
        )

    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, layer)
