"""What the layers of FP-Mamba and FP-Mamba-2 share: all but how Delta, the decay and the skip come about."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Gradient, Solver, SolveResult
from fpexp.models.fp_layer import FPLayer
from fpexp.models.fp_mamba_problem import FPMambaProblem, State, plus
from fpexp.models.initialisation import delta_bias, floored_decay, sigmoid_bias
from fpexp.models.short_convolution import ShortConvolution
from fpexp.models.sizes import check_ascends
from fpexp.ops.kernel import compute_type
from fpexp.ops.mixers import Columns
from fpexp.ranges import Range

Decay = Literal["exponential", "floor"]
DecayScale = Annotated[float, Range(above=0, maximum=1e3)]


@dataclass(frozen=True)
class Dependence:
    """Which parts of f see s_t = y_{t-1}: the decay, the mixer, the write and read vectors, the gate (table 1)."""

    lambda_: bool
    Q: bool
    b: bool
    c: bool
    gate: bool


@dataclass(frozen=True)
class Carried:
    """What the past leaves behind for decoding.

    `loop` is the state of the fixed-point problem. `y` (B, 1, d) is what the gate outside sees of the last token: the
    loop sees the solver's y*, the gate f(y*), which differ within the tolerance. `inputs` (B, conv_width - 1, d) are
    the convolution's last ones; None without one.
    """

    loop: State
    y: Tensor
    inputs: Tensor | None


@dataclass(frozen=True)
class Dynamics:
    """How the scan decays. `columns` of x's projection become `steps` values of Delta, each for d / steps channels.

    `decay: exponential` is Mamba's, Delta = softplus(.), A = -exp(A_log). `floor` (paper's first version) has
    Delta = sigmoid(.) in (0, 1) and A = -decay_scale softplus(omega), so that no decay exp(Delta A) is under
    exp(-decay_scale softplus(omega)); the weights from x to Delta start at zero. UserError where `delta_range`, where
    Delta starts, does not ascend, or reaches 1 with a floor.
    """

    columns: int
    steps: int
    delta_range: tuple[float, float]
    decay: Decay
    decay_scale: float

    def __post_init__(self) -> None:
        check_ascends("model.delta_range", self.delta_range)
        if self.floor and self.delta_range[1] >= 1:
            raise UserError(
                f"model.delta_range={list(self.delta_range)} must end below 1 with model.decay=floor, whose Delta does"
            )

    @property
    def floor(self) -> bool:
        """True where the decay has one."""
        return self.decay == "floor"


class FPScanLayer(FPLayer):
    """A fixed-point layer on a selective scan, (B, T, d_model) -> (B, T, d_model), inner width d (paper eqs. 12-14).

    With s_t = y_{t-1} of the given iterate, one evaluation of f is

        Q_t    = channel_mixer(x_t, s_t)
        xt_t   = Q_t (x_t - y_t) + y_t
        b_t    = l2norm(b^x_t + W_bs s_t),   c_t = l2norm(c^x_t + W_cs s_t)
        H_t    = exp(Delta_t A) * H_{t-1} + (Delta_t * xt_t) b_t^T
        f(y)_t = norm(H_t c_t + D * xt_t)

    and the output W_out(silu(z_t + W_zs s*_t) * y*_t); with the gate inside the loop,
    f(y)_t = norm(silu(z_t + W_zs s_t) * (H_t c_t + D * xt_t)) and the output is W_out y*_t.
    """

    def __init__(
        self,
        d_model: int,
        width: int,
        state_size: int,
        conv_width: int,
        channel_mixer: ChannelMixer,
        solver: Solver,
        gradient: Gradient,
        dependence: Dependence,
        gate: str,
        norm: str,
        norm_epsilon: float,
        weight_norm: bool,
        dynamics: Dynamics,
    ) -> None:
        super().__init__(d_model, width, channel_mixer, solver, gradient)
        self.state_size, self.dynamics = state_size, dynamics
        self.gate_inside = gate == "inside"
        self.state_numbers = width * state_size

        mixer_size = channel_mixer.coefficient_size
        self.x_sizes = (mixer_size, state_size, state_size, dynamics.columns)
        gate_size = width if dependence.gate else 0
        self.columns = Columns(
            sizes=(mixer_size, state_size, state_size, dynamics.steps, width if self.gate_inside else 0),
            from_s=(
                mixer_size if dependence.Q else 0,
                state_size if dependence.b else 0,
                state_size if dependence.c else 0,
                dynamics.steps if dependence.lambda_ else 0,
                gate_size if self.gate_inside else 0,
            ),
        )
        self.outer_gate_size = 0 if self.gate_inside else gate_size
        self.convolution = ShortConvolution(width, conv_width) if conv_width else None
        self.x_projection = nn.Linear(width, sum(self.x_sizes), bias=False)
        self.s_weight = nn.Parameter(torch.empty(sum(self.columns.from_s) + self.outer_gate_size, width))
        self.mixer_bias = nn.Parameter(torch.zeros(mixer_size))
        self._make_dynamics()
        self.norm = _make_norm(norm, width, norm_epsilon)
        self.out_projection = nn.Linear(width, d_model, bias=False)
        self._initialise()
        if weight_norm:
            self._norm_weights()
        if dynamics.floor:
            with torch.no_grad():
                self._zero_delta_weights()

    D: Tensor

    @abstractmethod
    def _make_dynamics(self) -> None:
        """Make the parameters of Delta, and `A_log` (or `omega`) and `D`."""

    @abstractmethod
    def _delta(self, dt: Tensor) -> Tensor:
        """Return x's part of Delta before its squashing (B, T, steps), of its columns of the projection."""

    @abstractmethod
    def _zero_delta_weights(self) -> None:
        """Let Delta start without x."""

    def A(self) -> Tensor:
        """Return A, negative, of the shape of `A_log`."""
        if self.dynamics.floor:
            return -self.dynamics.decay_scale * functional.softplus(self.omega)
        return -self.A_log.exp()

    def _make_A(self, A_log: Tensor) -> None:
        """Register the parameter of the decay, which starts at `A_log` unless it has a floor."""
        if self.dynamics.floor:
            self.omega = nn.Parameter(floored_decay(A_log.shape, self.dynamics.decay_scale))
        else:
            self.A_log = nn.Parameter(A_log)

    def _delta_bias(self) -> Tensor:
        make = sigmoid_bias if self.dynamics.floor else delta_bias
        return make(self.dynamics.steps, self.dynamics.delta_range)

    def _initialise(self) -> None:
        """x and s enter like the halves of one linear layer's input."""
        bound = 1 / math.sqrt(2 * self.width)
        for weight in (self.x_projection.weight, self.s_weight):
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Solve for y* without gradient, attach it, gate and project."""
        problem = self.problem(u, mask)
        y, result = self._solve(problem, cap)
        return self._read_out(problem, y, problem.previous(y)), (result,)

    def decode(self, u: Tensor, state: Carried | None) -> tuple[Tensor, tuple[SolveResult, ...], Carried]:
        """As `forward`, on from `state`; see `_carry`."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        inputs = None
        if self.convolution is not None:
            x, inputs = self.convolution.decode(x, None if state is None else state.inputs)
        problem = self._problem(x, z, None, None if state is None else state.loop)
        y, result, loop = self._carry(problem)
        before = problem.state.y if state is None else state.y
        output = self._read_out(problem, y, torch.cat([before, y[:, :-1]], dim=1))
        return output, (result,), Carried(loop, y[:, -1:].clone(), inputs)

    def problem(self, u: Tensor, mask: Tensor | None = None, state: State | None = None) -> FPMambaProblem:
        """Return the fixed-point problem of the normalised block input u (B, T, d_model)."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        if self.convolution is not None:
            x = self.convolution(x)
        return self._problem(x, z, mask, state)

    def _read_out(self, problem: FPMambaProblem, y: Tensor, s: Tensor) -> Tensor:
        """Return W_out(silu(z + W_zs s) * y), or W_out y with the gate inside the loop."""
        if not self.gate_inside:
            z = plus(problem.z, functional.linear(s, problem.gate_weight))
            y = functional.silu(z) * y
        output: Tensor = self.out_projection(y)
        return output

    def _problem(self, x: Tensor, z: Tensor, mask: Tensor | None, state: State | None) -> FPMambaProblem:
        mixer_size, delta_size, total = self.x_sizes[0], self.x_sizes[-1], sum(self.x_sizes)
        bias = functional.pad(self.mixer_bias, (0, total - mixer_size))
        projected = functional.linear(x, self.x_projection.weight, bias)
        loop, dt = projected.split([total - delta_size, delta_size], dim=-1)
        parts = [loop, self._delta(dt)]
        if self.gate_inside:
            parts.append(z)
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.width, self.state_size, dtype=compute_type(x.dtype))
            state = State(y=zeros[:, None, :, 0], H=zeros)
        loop_weight, gate_weight = self.s_weight.split([sum(self.columns.from_s), self.outer_gate_size])
        return FPMambaProblem(
            channel_mixer=self.channel_mixer,
            norm=self.norm,
            columns=self.columns,
            x=x.to(state.H.dtype),
            z=z,
            from_x=torch.cat(parts, dim=-1),
            A=self.A(),
            D=self.D,
            bounded=self.dynamics.floor,
            loop_weight=loop_weight if x.is_cpu else loop_weight.to(loop.dtype),
            gate_weight=gate_weight,
            state=state,
            mask=mask,
            keep=getattr(self.gradient, "takes_over", False),
        )


def _make_norm(name: str, width: int, epsilon: float) -> nn.LayerNorm | nn.RMSNorm | None:
    if name == "none":
        return None
    return (nn.RMSNorm if name == "rms_norm" else nn.LayerNorm)(width, eps=epsilon)
