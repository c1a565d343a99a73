"""FP-Mamba: Mamba's selective scan, iterated with a channel mixer to a dense recurrence (paper sec. 4)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fpexp.channel_mixers.base import ChannelMixer, l2norm
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Solver, SolveResult, one_step
from fpexp.models.lm import LanguageModel, ResidualBlock, SequenceLayer
from fpexp.models.short_convolution import ShortConvolution
from fpexp.ops.fixed_point_sweep import SweepResult, SweepSettings, SweepTerms, sweep
from fpexp.ops.selective_scan import selective_scan
from fpexp.ranges import Count, CountOrZero, Depth, Positive, Probability

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Dependence:
    """Which parts of f see s_t = y_{t-1}: the decay, the mixer, the write and read vectors, the gate (table 1)."""

    lambda_: bool
    Q: bool
    b: bool
    c: bool
    gate: bool


@dataclass(frozen=True)
class State:
    """What the past leaves behind: `y` (B, 1, d) of the last token and `H` (B, d, N)."""

    y: Tensor
    H: Tensor


@dataclass(frozen=True)
class Terms:
    """Everything of f that is known before y_t, for each token: see `FPMambaLayer`."""

    factors: tuple[Tensor, ...]
    delta: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor | None  # silu(z + W_zs s) where the gate stands inside the loop


class FPMambaLayer(SequenceLayer):
    """One FP-Mamba layer, (B, T, d_model) -> (B, T, d_model), inner width d (paper eqs. 12-14).

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
        dt_rank: int,
        conv_width: int,
        channel_mixer: ChannelMixer,
        solver: Solver,
        dependence: Dependence,
        gate: str,
        norm: str,
        norm_epsilon: float,
        delta_range: tuple[float, float],
        weight_norm: bool,
    ) -> None:
        super().__init__()
        self.width, self.state_size, self.dt_rank = width, state_size, dt_rank
        self.channel_mixer, self.solver = channel_mixer, solver
        self.gate_inside = gate == "inside"
        self.output_size = d_model
        self.iterations_depend_on_length = solver.whole_sequence

        mixer_size = channel_mixer.coefficient_size
        self.x_sizes = (mixer_size, state_size, state_size, dt_rank)
        gate_size = width if dependence.gate else 0
        self.loop_sizes = (
            mixer_size if dependence.Q else 0,
            state_size if dependence.b else 0,
            state_size if dependence.c else 0,
            width if dependence.lambda_ else 0,
            gate_size if self.gate_inside else 0,
        )
        self.outer_gate_size = 0 if self.gate_inside else gate_size
        self.in_projection = nn.Linear(d_model, 2 * width, bias=False)
        self.convolution = ShortConvolution(width, conv_width) if conv_width else None
        self.x_projection = nn.Linear(width, sum(self.x_sizes), bias=False)
        self.s_weight = nn.Parameter(torch.empty(sum(self.loop_sizes) + self.outer_gate_size, width))
        self.mixer_bias = nn.Parameter(torch.zeros(mixer_size))
        self.dt_projection = nn.Linear(dt_rank, width)
        self.A_log = nn.Parameter(torch.arange(1.0, state_size + 1).log().repeat(width, 1))
        self.D = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width, eps=norm_epsilon) if norm == "layer_norm" else None
        self.out_projection = nn.Linear(width, d_model, bias=False)
        self._initialise(delta_range)
        if weight_norm:
            parametrizations.weight_norm(self.x_projection)
            if self.s_weight.numel():
                parametrizations.weight_norm(self, "s_weight")

    def _initialise(self, delta_range: tuple[float, float]) -> None:
        """x and s enter like the halves of one linear layer's input; W_dt as in Mamba, Delta log-uniform."""
        bound = 1 / math.sqrt(2 * self.width)
        for weight in (self.x_projection.weight, self.s_weight):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.uniform_(self.dt_projection.weight, -(self.dt_rank**-0.5), self.dt_rank**-0.5)
        low, high = (math.log(value) for value in delta_range)
        delta = torch.empty(self.width).uniform_(low, high).exp()
        with torch.no_grad():
            self.dt_projection.bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # the inverse of softplus

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Solve for y* without gradient, attach it by one evaluation, gate and project."""
        problem = self.problem(u, mask)
        result = self.solver.solve(problem, cap, training=self.training)
        y = one_step(problem, result)
        if not self.gate_inside:
            z = _plus(problem.z, functional.linear(problem.previous(y), problem.gate_weight))
            y = functional.silu(z) * y
        return self.out_projection(y), (result,)

    def problem(self, u: Tensor, mask: Tensor | None = None, state: State | None = None) -> FPMambaProblem:
        """Return the fixed-point problem of the normalised block input u (B, T, d_model)."""
        x, z = self.in_projection(u).chunk(2, dim=-1)
        if self.convolution is not None:
            x = self.convolution(x)
        coefficients, b, c, dt = self.x_projection(x).split(self.x_sizes, dim=-1)
        if state is None:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            zeros = x.new_zeros(x.shape[0], self.width, self.state_size, dtype=dtype)
            state = State(y=zeros[:, None, :, 0], H=zeros)
        loop_weight, gate_weight = self.s_weight.split([sum(self.loop_sizes), self.outer_gate_size])
        return FPMambaProblem(
            layer=self,
            x=x.to(state.H.dtype),
            z=z,
            coefficients=coefficients + self.mixer_bias,
            b=b,
            c=c,
            delta=self.dt_projection(dt),
            A=-self.A_log.exp(),
            loop_weight=loop_weight.to(dt.dtype),
            gate_weight=gate_weight,
            state=state,
            mask=mask,
        )


def _full_precision(method: Callable[P, R]) -> Callable[P, R]:
    """Keep autocast out of a method of `FPMambaProblem`; the product with s alone is in the projections' type."""

    @functools.wraps(method)
    def in_full_precision(*arguments: P.args, **named: P.kwargs) -> R:
        problem = cast(FPMambaProblem, arguments[0])
        with torch.autocast(problem.x.device.type, enabled=False):
            return method(*arguments, **named)

    return in_full_precision


@dataclass(frozen=True)
class FPMambaProblem:
    """The fixed-point problem of one layer and input; a token's problem is the same on a slice of time.

    `x`, `z` (B, T, d), `coefficients`, `b`, `c` and `delta` (before the softplus) are what x contributes;
    `loop_weight` (sum of loop_sizes, d), in the type of the projections, stacks the matrices on s inside the loop, for
    mixer, b, c, lambda and gate; `gate_weight` is W_zs where the gate stands outside. A dependence that is off has no
    rows.
    """

    layer: FPMambaLayer
    x: Tensor
    z: Tensor
    coefficients: Tensor
    b: Tensor
    c: Tensor
    delta: Tensor
    A: Tensor
    loop_weight: Tensor
    gate_weight: Tensor
    state: State
    mask: Tensor | None

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return self.x.shape[1]

    def start(self) -> Tensor:
        """Return zeros (B, T, d)."""
        return torch.zeros_like(self.x)

    def previous(self, y: Tensor) -> Tensor:
        """Return s, (B, T, d): y one token earlier, with the carried token in front."""
        return torch.cat([self.state.y, y[:, :-1]], dim=1)

    @_full_precision
    def evaluate(self, y: Tensor) -> Tensor:
        """Return f(y), (B, T, d)."""
        terms = self.terms(self.previous(y))
        mixed = self.mix(terms, y)
        output, _ = selective_scan(mixed, terms.delta, self.A, terms.b, terms.c, self.layer.D, self.state.H)
        return self.normalise(terms, output)

    def select(self, rows: Tensor) -> Self:
        """Return the problem of the sequences `rows` alone."""
        return self._map(lambda tensor: tensor[rows], State(self.state.y[rows], self.state.H[rows]))

    def initial_state(self) -> State:
        """Return the state before the first token."""
        return self.state

    @_full_precision
    def token_problem(self, t: int, state: State) -> TokenProblem:
        """Return the equation of token t, given the state before it."""
        token = self._map(lambda tensor: tensor[:, t : t + 1], state)
        return TokenProblem.of(token)

    @_full_precision
    def evaluate_token(self, token: TokenProblem, y: Tensor) -> Tensor:
        """Return the token map at y, (B, 1, d)."""
        return self.normalise(token.terms, token.base + token.g * self.mix(token.terms, y))

    def sweep(self, settings: SweepSettings) -> SweepResult | None:
        """Solve all tokens by a fused kernel, where there is one for this mixer and device."""
        layer, norm = self.layer, self.layer.norm
        terms = SweepTerms(
            x=self.x,
            coefficients=self.coefficients,
            b=self.b,
            c=self.c,
            delta=self.delta,
            z=self.z if layer.gate_inside else None,
            A=self.A,
            D=layer.D,
            weight=self.loop_weight,
            weight_sizes=layer.loop_sizes,
            norm=None if norm is None else (norm.weight, norm.bias, norm.eps),
            y=self.state.y,
            H=self.state.H,
            mask=self.mask,
        )
        return sweep(terms, layer.channel_mixer.form, settings)

    @_full_precision
    def advance(self, token: TokenProblem, y: Tensor) -> State:
        """Return the state after a token whose equation y (B, 1, d) solves."""
        terms = token.terms
        write = terms.delta * token.whole.mix(terms, y)
        return State(y, torch.addcmul(token.decayed, write.mT, terms.b))

    def terms(self, s: Tensor) -> Terms:
        """Return what the tokens' equations have as constants, given s (B, T, d)."""
        dtype, z = self.x.dtype, self.z
        x_parts = (self.coefficients, self.b, self.c, self.delta)
        coefficients, b, c, delta = x_parts
        if self.loop_weight.shape[0]:
            s_parts = functional.linear(s.to(self.loop_weight.dtype), self.loop_weight).split(
                self.layer.loop_sizes, dim=-1
            )
            *updated, z_part = (_plus(x, part) for x, part in zip((*x_parts, z), s_parts, strict=True))
            (coefficients, b, c, delta), z = updated, z_part
        return Terms(
            factors=self.layer.channel_mixer.factors(coefficients.to(dtype)),
            delta=functional.softplus(delta.to(dtype)),
            b=l2norm(b.to(dtype)),
            c=l2norm(c.to(dtype)),
            gate=functional.silu(z.to(dtype)) if self.layer.gate_inside else None,
        )

    def mix(self, terms: Terms, y: Tensor) -> Tensor:
        """Return Q (x - y) + y."""
        return self.layer.channel_mixer.apply(terms.factors, self.x - y) + y

    def normalise(self, terms: Terms, output: Tensor) -> Tensor:
        """Return the norm of the gated scan output."""
        if terms.gate is not None:
            output = terms.gate * output
        return output if self.layer.norm is None else self.layer.norm(output)

    def _map(self, slice_: Callable[[Tensor], Tensor], state: State) -> Self:
        return replace(
            self,
            x=slice_(self.x),
            z=slice_(self.z),
            coefficients=slice_(self.coefficients),
            b=slice_(self.b),
            c=slice_(self.c),
            delta=slice_(self.delta),
            state=state,
            mask=None if self.mask is None else slice_(self.mask),
        )


@dataclass(frozen=True)
class TokenProblem:
    """y_t = norm(base + g * (Q_t (x_t - y_t) + y_t)): one token, (B, 1, d), with its past summed up in `base`.

    decayed = exp(Delta_t A) * H_{t-1} (B, d, N), base = decayed c_t, g = (b_t . c_t) Delta_t + D.
    """

    whole: FPMambaProblem
    terms: Terms
    decayed: Tensor
    base: Tensor
    g: Tensor

    @classmethod
    def of(cls, token: FPMambaProblem) -> Self:
        """Build from a problem of length one."""
        terms = token.terms(token.state.y)
        decayed = torch.exp(terms.delta.mT * token.A) * token.state.H
        base = (decayed @ terms.c.mT).mT
        g = (terms.b * terms.c).sum(-1, keepdim=True) * terms.delta + token.layer.D
        return cls(token, terms, decayed, base, g)

    @property
    def mask(self) -> Tensor | None:
        """(B, 1), true where the token is real."""
        return self.whole.mask

    def start(self) -> Tensor:
        """Return zeros (B, 1, d)."""
        return self.whole.start()

    def evaluate(self, y: Tensor) -> Tensor:
        """Return the token map at y, (B, 1, d)."""
        return self.whole.evaluate_token(self, y)

    def select(self, rows: Tensor) -> Self:
        """Return the equations of the sequences `rows` alone."""
        terms = self.terms
        selected = Terms(
            factors=tuple(factor[rows] for factor in terms.factors),
            delta=terms.delta[rows],
            b=terms.b[rows],
            c=terms.c[rows],
            gate=None if terms.gate is None else terms.gate[rows],
        )
        return replace(
            self,
            whole=self.whole.select(rows),
            terms=selected,
            decayed=self.decayed[rows],
            base=self.base[rows],
            g=self.g[rows],
        )


def _plus(x_part: Tensor, s_part: Tensor) -> Tensor:
    """Add what s contributes; an empty `s_part` is a dependence that is off."""
    return x_part + s_part if s_part.shape[-1] else x_part


def fp_mamba(
    vocabulary_size: int,
    solver: Solver,
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
    delta_range: tuple[Positive, Positive],
    gradient: Literal["one_step"],
    weight_norm: bool,
    dropout: Probability,
) -> LanguageModel:
    """Return an FP-Mamba language model; `channel_mixer` builds a mixer for the inner width expand * d_model."""
    width = round(expand * d_model)
    if width < 1:
        raise UserError(f"model.expand={expand:g} times model.d_model={d_model} is an inner width of 0; raise one")
    if delta_range[0] > delta_range[1]:
        raise UserError(f"model.delta_range={list(delta_range)} must ascend")
    arguments: dict[str, Any] = {
        "state_size": state_size,
        "dt_rank": dt_rank or math.ceil(d_model / 16),
        "conv_width": conv_width,
        "solver": solver,
        "dependence": dependence,
        "gate": gate,
        "norm": norm,
        "norm_epsilon": norm_epsilon,
        "delta_range": delta_range,
        "weight_norm": weight_norm,
    }
    blocks: list[SequenceLayer] = [
        ResidualBlock(FPMambaLayer(d_model, width, channel_mixer=channel_mixer(width), **arguments), d_model, dropout)
        for _ in range(layers)
    ]
    return LanguageModel(vocabulary_size, d_model, blocks, dropout)
