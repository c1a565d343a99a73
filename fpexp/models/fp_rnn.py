"""FP-RNN: a diagonal recurrence of vectors, iterated with a channel mixer to a dense one (paper sec. 3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Cap, Gradient, Solver, SolveResult
from fpexp.models.blocks import residual_model
from fpexp.models.fp_layer import FPLayer
from fpexp.models.fp_rnn_problem import FPRNNProblem, State
from fpexp.models.lm import LanguageModel
from fpexp.models.sizes import inner_width
from fpexp.ops.kernel import compute_type
from fpexp.ops.mixers import Columns
from fpexp.ranges import Count, Depth, NonNegative, Positive, Probability


class FPRNNLayer(FPLayer):
    """One FP-RNN layer, (B, T, d_model) -> (B, T, d_model), inner width d (paper sec. 3, eq. 8).

    From the block input u: x, z = W_in u. With s_t = h_{t-1} of the given iterate, one evaluation of f is

        lambda_t = sigmoid(W x_t),   v_t = silu(W_v x_t) * x_t,   Q_t = channel_mixer(x_t, s_t)
        f(h)_t   = lambda_t * f(h)_{t-1} + (1 - lambda_t) * (Q_t v_t + (I - Q_t) h_t)

    and the output W_out(norm(silu(z_t) * silu(W_c [x_t, h*_{t-1}]) * h*_t)), norm an RMSNorm. Without
    `hidden_dependence` mixer and read-out see x_t alone, and h* is that of the dense linear recurrence
    h_t = A_t h_{t-1} + (I - A_t) v_t, A_t = (Lambda_t + (I - Lambda_t) Q_t)^-1 Lambda_t (app. B.2).
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        channel_mixer: ChannelMixer,
        solver: Solver,
        gradient: Gradient,
        hidden_dependence: bool,
        weight_norm: bool,
    ) -> None:
        super().__init__(d_model, width, channel_mixer, solver, gradient)
        mixer_size = channel_mixer.coefficient_size
        on_s = int(hidden_dependence)
        self.columns = Columns(sizes=(mixer_size, 0, 0, width, 0), from_s=(on_s * mixer_size, 0, 0, 0, 0))
        self.x_projection = nn.Linear(width, mixer_size + 3 * width, bias=False)  # Q; lambda, v, read-out
        self.s_weight = nn.Parameter(torch.empty(on_s * (mixer_size + width), width))
        self.mixer_bias = nn.Parameter(torch.zeros(mixer_size))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.out_projection = nn.Linear(width, d_model, bias=False)
        self._initialise()
        if weight_norm:
            self._norm_weights()

    def _initialise(self) -> None:
        """Where x and s enter both, they do like the halves of one linear layer's input; lambda and v have x alone."""
        mixer_size = self.channel_mixer.coefficient_size
        both, alone = 1 / math.sqrt(2 * self.width), 1 / math.sqrt(self.width)
        nn.init.uniform_(self.s_weight, -both, both)
        nn.init.uniform_(self.x_projection.weight, -both, both)
        with torch.no_grad():
            self.x_projection.weight[mixer_size : mixer_size + 2 * self.width].uniform_(-alone, alone)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Solve for h* without gradient, attach it, read out, gate and project."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        problem = self._problem(x, mask, None)
        h, result = self._solve(problem, cap)
        return self._read_out(x, z, problem.state, h), (result,)

    def decode(self, u: Tensor, state: State | None) -> tuple[Tensor, tuple[SolveResult, ...], State]:
        """As `forward`, on from `state`; see `_carry`."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        problem = self._problem(x, None, state)
        h, result, after = self._carry(problem)
        return self._read_out(x, z, problem.state, h), (result,), after

    def problem(self, u: Tensor, mask: Tensor | None = None, state: State | None = None) -> FPRNNProblem:
        """Return the fixed-point problem of the normalised block input u (B, T, d_model)."""
        return self._problem(self.in_projection(u).chunk(2, dim=-1)[0], mask, state)

    def _read_out(self, x: Tensor, z: Tensor, before: State, h: Tensor) -> Tensor:
        """Return W_out(norm(silu(z) * silu(W_c [x, h_{t-1}]) * h))."""
        c = functional.linear(x, self.x_projection.weight[-self.width :])
        if self.s_weight.numel():
            c = c + functional.linear(torch.cat([before.h, h[:, :-1]], dim=1), self.s_weight[-self.width :])
        output: Tensor = self.out_projection(self.norm(functional.silu(z) * functional.silu(c) * h))
        return output

    def _problem(self, x: Tensor, mask: Tensor | None, state: State | None) -> FPRNNProblem:
        mixer_size = self.channel_mixer.coefficient_size
        loop, value = self.x_projection.weight[: -self.width].split([mixer_size + self.width, self.width])
        from_x = functional.linear(x, loop, functional.pad(self.mixer_bias, (0, self.width)))
        v = functional.silu(functional.linear(x, value)) * x
        dtype = compute_type(x.dtype)
        if state is None:
            zeros = x.new_zeros(x.shape[0], 1, self.width, dtype=dtype)
            state = State(y=zeros, h=zeros)
        loop_weight = self.s_weight[: self.columns.from_s[0]]
        return FPRNNProblem(
            channel_mixer=self.channel_mixer,
            columns=self.columns,
            v=v.to(dtype),
            from_x=from_x,
            loop_weight=loop_weight if x.is_cpu else loop_weight.to(from_x.dtype),
            state=state,
            mask=mask,
            keep=getattr(self.gradient, "takes_over", False),
        )


def fp_rnn(
    vocabulary_size: int,
    solver: Solver,
    gradient: Gradient,
    *,
    channel_mixer: Callable[[int], ChannelMixer],
    d_model: Count,
    layers: Depth,
    expand: Positive,
    hidden_dependence: bool,
    weight_norm: bool,
    mlp_expand: NonNegative = 0.0,
    dropout: Probability,
) -> LanguageModel:
    """Return an FP-RNN language model; `channel_mixer` builds a mixer for the inner width expand * d_model.

    UserError where that width would be 0.
    """
    width = inner_width(expand, d_model)

    def layer() -> FPRNNLayer:
        return FPRNNLayer(d_model, width, channel_mixer(width), solver, gradient, hidden_dependence, weight_norm)

    return residual_model(vocabulary_size, d_model, layers, mlp_expand, dropout, layer)
