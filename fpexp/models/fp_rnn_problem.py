"""The fixed-point problem of one FP-RNN layer and input: whole, and token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.channel_mixers.base import ChannelMixer
from fpexp.ops.diagonal_scan import diagonal_scan
from fpexp.ops.mixers import Columns, KnownTokens
from fpexp.ops.sweep import SweepResult, SweepSettings
from fpexp.ops.token_mixing import mix_tokens
from fpexp.ops.vector_sweep import VectorTerms, sweep


@dataclass(frozen=True)
class State:
    """What the past leaves behind, (B, 1, d) each: the last token `y` of the iterate, and `h` of its image f(y).

    The mixer sees y and the scan carries h; at a fixed point they are one.
    """

    y: Tensor
    h: Tensor


@dataclass(frozen=True)
class FPRNNProblem:
    """f(h)_t = lambda_t * f(h)_{t-1} + (1 - lambda_t) * (Q_t v_t + (I - Q_t) h_t)  (paper sec. 3, eq. 8).

    A token's problem is the same on a slice of time. `v` (B, T, d) are the values. `from_x` (B, T, .) is what x
    contributes to mixer coefficients and to lambda before the sigmoid: one tensor, shared out by `columns`.
    `loop_weight` is the matrix on s_t = h_{t-1} of the given iterate, for the coefficients alone, without rows where
    they do not depend on it. `keep`: a sweep leaves for `evaluate` what it has computed, where a gradient is wanted.
    """

    channel_mixer: ChannelMixer
    columns: Columns
    v: Tensor
    from_x: Tensor
    loop_weight: Tensor
    state: State
    mask: Tensor | None
    keep: bool = False

    @property
    def length(self) -> int:
        """Number of tokens T."""
        return self.v.shape[1]

    def start(self) -> Tensor:
        """Return zeros (B, T, d)."""
        return torch.zeros_like(self.v)

    def previous(self, y: Tensor) -> Tensor:
        """Return s, (B, T, d): y one token earlier, with the carried token in front."""
        return torch.cat([self.state.y, y[:, :-1]], dim=1)

    def evaluate(self, y: Tensor, known: KnownTokens | None = None) -> Tensor:
        """Return f(y), (B, T, d); `known` is what a sweep that ended at y has found."""
        with self._full_precision():
            decay, write = self._mix(y, known)
            return diagonal_scan(decay, write, self.state.h[:, 0])

    def start_lagged(self) -> Tensor:
        """Return zeros (B, T, d)."""
        return self.start()

    def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(y) twice, with f(y)_{t-1} of `memory`, the image of the iterate before, in the scan."""
        with self._full_precision():
            decay, write = self._mix(y, None)
            h = torch.addcmul(write, decay, torch.cat([self.state.h, memory[:, :-1]], dim=1))
            return h, h

    def select(self, rows: Tensor) -> Self:
        """Return the problem of the sequences `rows` alone."""
        return self._map(lambda tensor: tensor[rows], State(self.state.y[rows], self.state.h[rows]))

    def initial_state(self) -> State:
        """Return the state before the first token."""
        return self.state

    def token_problem(self, t: int, state: State) -> TokenProblem:
        """Return the equation of token t, given the state before it."""
        token = self._map(lambda tensor: tensor[:, t : t + 1], state)
        with self._full_precision():
            factors, w = token.terms(state.y)
            return TokenProblem(token, factors, torch.sigmoid(-w), torch.sigmoid(w) * state.h)

    def advance(self, token: TokenProblem, y: Tensor) -> State:
        """Return the state after a token whose equation y (B, 1, d) solves."""
        return State(y, token.evaluate(y))

    def sweep(self, settings: SweepSettings, backend: str = "auto") -> SweepResult | None:
        """Solve all tokens by a fused kernel, where there is one for this mixer and device."""
        terms = VectorTerms(
            v=self.v,
            from_x=self.from_x,
            columns=self.columns,
            weight=self.loop_weight,
            y=self.state.y,
            h=self.state.h,
            mask=self.mask,
            keep=self.keep and self.mask is None and self.from_x.requires_grad,
        )
        return sweep(terms, self.channel_mixer.form, settings, backend)

    def state_after(self, swept: SweepResult) -> State:
        """Return the state after a sweep, which holds on to nothing else of it."""
        return State(swept.value[:, -1:].clone(), swept.H)

    def split(self) -> list[Self]:
        """Return the problems of the single tokens, cut in one go."""
        masks = (None,) * self.length if self.mask is None else self.mask.split(1, dim=1)
        tokens = zip(self.v.split(1, dim=1), self.from_x.split(1, dim=1), masks, strict=True)
        return [replace(self, v=v, from_x=from_x, mask=mask) for v, from_x, mask in tokens]

    def terms(self, s: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what the tokens' equations have as constants, given s (B, T, d): factors of Q; lambda = sigmoid(w)."""
        coefficients, decay = self.from_x.split([self.columns.sizes[0], self.v.shape[-1]], dim=-1)
        if self.loop_weight.numel():
            coefficients = coefficients + functional.linear(s.to(self.loop_weight.dtype), self.loop_weight)
        return self.channel_mixer.factors(coefficients.to(self.v.dtype)), decay.to(self.v.dtype)

    def _mix(self, y: Tensor, known: KnownTokens | None) -> tuple[Tensor, Tensor]:
        """Return lambda and what the scan adds, (1 - lambda) * (Q (v - y) + y), (B, T, d) each."""
        s, form = self.previous(y), self.channel_mixer.form
        fused = mix_tokens(self.from_x, s, self.loop_weight, self.v, y, self.columns, form, known)
        if fused is not None:
            keep = torch.exp(-fused.delta)  # 1 - sigmoid(w) = exp(-softplus(w))
            return 1 - keep, keep * fused.mixed
        factors, w = self.terms(s)
        return torch.sigmoid(w), torch.sigmoid(-w) * (self.channel_mixer.apply(factors, self.v - y) + y)

    def _full_precision(self) -> torch.autocast:
        """Keep autocast out; the product with s is in `loop_weight`'s type."""
        return torch.autocast(self.v.device.type, enabled=False)

    def _map(self, slice_: Callable[[Tensor], Tensor], state: State) -> Self:
        mask = None if self.mask is None else slice_(self.mask)
        return replace(self, v=slice_(self.v), from_x=slice_(self.from_x), state=state, mask=mask)


@dataclass(frozen=True)
class TokenProblem:
    """y_t = base + (1 - lambda_t) * (Q_t (v_t - y_t) + y_t): one token, (B, 1, d).

    base = lambda_t * h_{t-1}, write = 1 - lambda_t.
    """

    whole: FPRNNProblem
    factors: tuple[Tensor, ...]
    write: Tensor
    base: Tensor

    @property
    def mask(self) -> Tensor | None:
        """(B, 1), true where the token is real."""
        return self.whole.mask

    def start(self) -> Tensor:
        """Return zeros (B, 1, d)."""
        return self.whole.start()

    def evaluate(self, y: Tensor) -> Tensor:
        """Return the token map at y, (B, 1, d)."""
        mixed = self.whole.channel_mixer.apply(self.factors, self.whole.v - y) + y
        return self.base + self.write * mixed

    def select(self, rows: Tensor) -> Self:
        """Return the equations of the sequences `rows` alone."""
        return replace(
            self,
            whole=self.whole.select(rows),
            factors=tuple(factor[rows] for factor in self.factors),
            write=self.write[rows],
            base=self.base[rows],
        )
