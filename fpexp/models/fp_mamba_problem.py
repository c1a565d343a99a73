"""The fixed-point problem of one FP-Mamba layer and input: whole, and token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer, l2norm
from fpexp.ops.fixed_point_sweep import SweepResult, SweepSettings, SweepTerms, sweep
from fpexp.ops.selective_scan import selective_scan

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class State:
    """What the past leaves behind: `y` (B, 1, d) of the last token and `H` (B, d, N)."""

    y: Tensor
    H: Tensor


@dataclass(frozen=True)
class Terms:
    """Everything of f that is known before y_t, for each token: see `FPMambaProblem`."""

    factors: tuple[Tensor, ...]
    delta: Tensor
    b: Tensor
    c: Tensor
    gate: Tensor | None  # silu(z + W_zs s) where the gate stands inside the loop


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

    channel_mixer: ChannelMixer
    norm: nn.LayerNorm | None
    gate_inside: bool
    loop_sizes: tuple[int, ...]
    x: Tensor
    z: Tensor
    coefficients: Tensor
    b: Tensor
    c: Tensor
    delta: Tensor
    A: Tensor
    D: Tensor
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
        output, _ = selective_scan(mixed, terms.delta, self.A, terms.b, terms.c, self.D, self.state.H)
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
        norm = self.norm
        terms = SweepTerms(
            x=self.x,
            coefficients=self.coefficients,
            b=self.b,
            c=self.c,
            delta=self.delta,
            z=self.z if self.gate_inside else None,
            A=self.A,
            D=self.D,
            weight=self.loop_weight,
            weight_sizes=self.loop_sizes,
            norm=None if norm is None else (norm.weight, norm.bias, norm.eps),
            y=self.state.y,
            H=self.state.H,
            mask=self.mask,
        )
        return sweep(terms, self.channel_mixer.form, settings)

    @_full_precision
    def advance(self, token: TokenProblem, y: Tensor) -> State:
        """Return the state after a token whose equation y (B, 1, d) solves."""
        terms = token.terms
        write = terms.delta * token.whole.mix(terms, y)
        return State(y, torch.addcmul(token.decayed, write.mT, terms.b))

    def split(self) -> list[Self]:
        """Return the problems of the single tokens, cut in one go."""
        parts = (self.x, self.z, self.coefficients, self.b, self.c, self.delta)
        masks = (None,) * self.length if self.mask is None else self.mask.split(1, dim=1)
        tokens = zip(*(part.split(1, dim=1) for part in parts), masks, strict=True)
        names = ("x", "z", "coefficients", "b", "c", "delta", "mask")
        return [replace(self, **dict(zip(names, token, strict=True))) for token in tokens]

    def terms(self, s: Tensor) -> Terms:
        """Return what the tokens' equations have as constants, given s (B, T, d)."""
        dtype, z = self.x.dtype, self.z
        x_parts = (self.coefficients, self.b, self.c, self.delta)
        coefficients, b, c, delta = x_parts
        if self.loop_weight.shape[0]:
            s_parts = functional.linear(s.to(self.loop_weight.dtype), self.loop_weight).split(self.loop_sizes, dim=-1)
            *updated, z_part = (plus(x, part) for x, part in zip((*x_parts, z), s_parts, strict=True))
            (coefficients, b, c, delta), z = updated, z_part
        return Terms(
            factors=self.channel_mixer.factors(coefficients.to(dtype)),
            delta=functional.softplus(delta.to(dtype)),
            b=l2norm(b.to(dtype)),
            c=l2norm(c.to(dtype)),
            gate=functional.silu(z.to(dtype)) if self.gate_inside else None,
        )

    def mix(self, terms: Terms, y: Tensor) -> Tensor:
        """Return Q (x - y) + y."""
        return self.channel_mixer.apply(terms.factors, self.x - y) + y

    def normalise(self, terms: Terms, output: Tensor) -> Tensor:
        """Return the norm of the gated scan output."""
        if terms.gate is not None:
            output = terms.gate * output
        return output if self.norm is None else self.norm(output)

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
        g = (terms.b * terms.c).sum(-1, keepdim=True) * terms.delta + token.D
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


def plus(x_part: Tensor, s_part: Tensor) -> Tensor:
    """Add what s contributes; an empty `s_part` is a dependence that is off."""
    return x_part + s_part if s_part.shape[-1] else x_part
