"""The fixed-point problem of one FP-Mamba layer and input: whole, and token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.ops.fixed_point_iteration import IterationResult, IterationSettings, iterate
from fpexp.ops.fixed_point_sweep import SweepTerms, sweep
from fpexp.ops.l2norm import l2norm
from fpexp.ops.mixers import Columns, KnownTokens, MixedTokens, MixerForm
from fpexp.ops.selective_scan import selective_scan
from fpexp.ops.ssd import ssd
from fpexp.ops.sweep import SweepResult, SweepSettings
from fpexp.ops.token_mixing import mix_tokens

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
    """Keep autocast out of a method of `FPMambaProblem`; the product with s is in `loop_weight`'s type."""

    @functools.wraps(method)
    def in_full_precision(*arguments: P.args, **named: P.kwargs) -> R:
        problem = cast(FPMambaProblem, arguments[0])
        with torch.autocast(problem.x.device.type, enabled=False):
            return method(*arguments, **named)

    return in_full_precision


@dataclass(frozen=True)
class FPMambaProblem:
    """The fixed-point problem of one layer and input; a token's problem is the same on a slice of time.

    `from_x` (B, T, .) is what x contributes to mixer coefficients, b, c, delta (before the softplus) and, where the
    gate stands inside the loop, z: one tensor, shared out by `columns`. `loop_weight` stacks the matrices on s in the
    same order, in the type of the projections, or float32 on a CPU, whose kernels compute in it; a dependence that is
    off has no rows. Of a gate outside the loop, `z` (B, T, d) is x's part and `gate_weight` the matrix on s. `keep`: a
    sweep leaves for `evaluate` what it has computed, where a gradient is wanted.

    With Mamba's dynamics there is one Delta for a channel, `A` (d, N) and `D` (d). With Mamba-2's, one for a head of
    d / heads channels, `A` (heads) and `D` (heads). Delta is softplus(.), or sigmoid(.) where it is `bounded`.
    """

    channel_mixer: ChannelMixer
    norm: nn.LayerNorm | nn.RMSNorm | None
    columns: Columns
    x: Tensor
    z: Tensor
    from_x: Tensor
    A: Tensor
    D: Tensor
    loop_weight: Tensor
    gate_weight: Tensor
    state: State
    mask: Tensor | None
    keep: bool = False
    bounded: bool = False

    @property
    def form(self) -> MixerForm | None:
        """How the fused kernels know the mixer; None where they do not know it, or the squashing of Delta."""
        return None if self.bounded else self.channel_mixer.form

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
    def evaluate(self, y: Tensor, known: KnownTokens | None = None) -> Tensor:
        """Return f(y), (B, T, d); `known` is what a sweep that ended at y has found."""
        tokens = self.mix_tokens(y, known)
        return self.normalise(tokens.gate, self._scan(tokens))

    def _scan(self, tokens: MixedTokens) -> Tensor:
        """Return H_t c_t + D * xt_t, (B, T, d)."""
        mixed, delta, b, c, _ = tokens
        if self.A.dim() == 2:
            return selective_scan(mixed, delta, self.A, b, c, self.D, self.state.H)[0]
        heads = (len(self.A), -1)
        state, groups = self.state.H.unflatten(1, heads), (b[:, :, None], c[:, :, None])
        return ssd(mixed.unflatten(2, heads), delta, self.A, *groups, self.D, state)[0].flatten(2)

    def channels(self, per_step: Tensor) -> Tensor:
        """Repeat each head's number for its channels: (..., steps) -> (..., d)."""
        head_size = self.x.shape[-1] // per_step.shape[-1]
        return per_step if head_size == 1 else per_step.repeat_interleave(head_size, dim=-1)

    def decay_rates(self) -> Tensor:
        """Return A for each channel, (d, N), or (d, 1) where it is the same for all N."""
        return self.A if self.A.dim() == 2 else self.channels(self.A)[:, None]

    def mix_tokens(self, y: Tensor, known: KnownTokens | None = None) -> MixedTokens:
        """Return all that the scan takes, at y (B, T, d)."""
        s, form = self.previous(y), self.form
        fused = mix_tokens(self.from_x, s, self.loop_weight, self.x, y, self.columns, form, known)
        if fused is not None:
            return fused
        terms = self.terms(s)
        return MixedTokens(self.mix(terms, y), terms.delta, terms.b, terms.c, terms.gate)

    def start_lagged(self) -> Tensor:
        """Return zeros (B, T, d, N)."""
        return self.state.H.new_zeros(*self.x.shape, self.state.H.shape[-1])

    @_full_precision
    def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(y) and all H (B, T, d, N), both with H_{t-1} of `memory`, H of the iterate before, in the scan."""
        tokens = self.mix_tokens(y)
        before = torch.cat([self.state.H[:, None], memory[:, :-1]], dim=1)
        delta = self.channels(tokens.delta)
        write = (delta * tokens.mixed)[..., None] * tokens.b[..., None, :]
        H = torch.addcmul(write, torch.exp(delta[..., None] * self.decay_rates()), before)
        output = (H @ tokens.c[..., None]).squeeze(-1) + self.channels(self.D) * tokens.mixed
        return self.normalise(tokens.gate, output), H

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
        return self.normalise(token.terms.gate, token.base + token.g * self.mix(token.terms, y))

    def sweep(self, settings: SweepSettings, backend: str = "auto") -> SweepResult | None:
        """Solve all tokens by a fused kernel, where there is one for this mixer and device."""
        return sweep(self._fused_terms(), self.form, settings, backend)

    def iterate(self, settings: IterationSettings, backend: str) -> IterationResult | None:
        """Iterate on all tokens by a fused kernel, where there is one for this mixer and device."""
        return iterate(self._fused_terms(), self.form, settings, backend)

    def _fused_terms(self) -> SweepTerms:
        norm = self.norm
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        return SweepTerms(
            x=self.x,
            from_x=self.from_x,
            columns=self.columns,
            A=self.decay_rates(),
            D=self.channels(self.D),
            weight=self.loop_weight,
            norm=None if norm is None else (norm.weight, bias, norm.eps or 0.0),
            y=self.state.y,
            H=self.state.H,
            mask=self.mask,
            keep=self.keep and self.mask is None and self.from_x.requires_grad,
        )

    def state_after(self, swept: SweepResult) -> State:
        """Return the state after a sweep, which holds on to nothing else of it."""
        return State(swept.value[:, -1:].clone(), swept.H)

    @_full_precision
    def advance(self, token: TokenProblem, y: Tensor) -> State:
        """Return the state after a token whose equation y (B, 1, d) solves."""
        terms = token.terms
        write = self.channels(terms.delta) * token.whole.mix(terms, y)
        return State(y, torch.addcmul(token.decayed, write.mT, terms.b))

    def split(self) -> list[Self]:
        """Return the problems of the single tokens, cut in one go."""
        parts = (self.x, self.z, self.from_x)
        masks = (None,) * self.length if self.mask is None else self.mask.split(1, dim=1)
        tokens = zip(*(part.split(1, dim=1) for part in parts), masks, strict=True)
        return [replace(self, x=x, z=z, from_x=from_x, mask=mask) for x, z, from_x, mask in tokens]

    def terms(self, s: Tensor) -> Terms:
        """Return what the tokens' equations have as constants, given s (B, T, d)."""
        x_parts = self.from_x.split(self.columns.sizes, dim=-1)
        from_s = functional.linear(s.to(self.loop_weight.dtype), self.loop_weight)
        s_parts = from_s.split(self.columns.from_s, dim=-1)
        parts = [plus(x, part).to(self.x.dtype) for x, part in zip(x_parts, s_parts, strict=True)]
        coefficients, b, c, delta, z = parts
        return Terms(
            factors=self.channel_mixer.factors(coefficients),
            delta=torch.sigmoid(delta) if self.bounded else functional.softplus(delta),
            b=l2norm(b),
            c=l2norm(c),
            gate=functional.silu(z) if z.shape[-1] else None,
        )

    def mix(self, terms: Terms, y: Tensor) -> Tensor:
        """Return Q (x - y) + y."""
        return self.channel_mixer.apply(terms.factors, self.x - y) + y

    def normalise(self, gate: Tensor | None, output: Tensor) -> Tensor:
        """Return the norm of the gated scan output."""
        if gate is not None:
            output = gate * output
        return output if self.norm is None else self.norm(output)

    def _map(self, slice_: Callable[[Tensor], Tensor], state: State) -> Self:
        return replace(
            self,
            x=slice_(self.x),
            z=slice_(self.z),
            from_x=slice_(self.from_x),
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
        delta = token.channels(terms.delta)
        decayed = torch.exp(delta.mT * token.decay_rates()) * token.state.H
        base = (decayed @ terms.c.mT).mT
        g = (terms.b * terms.c).sum(-1, keepdim=True) * delta + token.channels(token.D)
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
