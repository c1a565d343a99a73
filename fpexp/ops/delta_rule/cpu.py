"""The delta rule in chunks of tokens, as matrix products (Yang et al. 2024a, 2024b), forward and backward by hand.

A chunk of C tokens has L = C n Householder steps. G_i is the log decay from the chunk's start to step i, included, and
g_t that to token t; D_ij = exp(G_i - G_j), zero where i is of an earlier token than j. With S the state before it,

    (I + tril(diag(beta) (K K^T * D), -1)) U = R,    R = diag(beta) (V - diag(exp G) K S)
    O      = diag(exp g) Q S + (Q K^T * D_q) U,      D_q the rows of D at tokens
    S_next = exp(g_C) S + (diag(exp(g_C - G)) K)^T U

Row i of U is what step i writes along k_i. No decay is divided by: only differences that are not above 0 are
exponentiated. The backward keeps one state each chunk, (T / C) B heads K V numbers, and computes a chunk again.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fpexp.ops.delta_rule import reference
from fpexp.ops.kernel import compute_type

_STEPS = 32
"""Householder steps a chunk, at most, unless one token has more."""

_NOTHING_LEFT = -1e3
"""A log decay whose exponential is 0 in float64 too. Larger ones would only cost the sums their last digits."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.delta_rule`."""
    (batch, length, _, heads, key), value = k.shape, v.shape[-1]
    if length == 1:  # the loop has less to set up
        return reference.delta_rule(q, k, v, beta, log_decay, state)
    dtype = compute_type(v.dtype)

    def rows(tensor: Tensor) -> Tensor:
        """(B, ..., heads, size) -> (B heads, tokens or steps, size), contiguous."""
        return tensor.to(dtype).movedim(-2, 1).reshape(batch * heads, -1, tensor.shape[-1]).contiguous()

    S = v.new_zeros(batch, heads, key, value, dtype=dtype) if state is None else state.to(dtype)
    decay = None if log_decay is None else rows(log_decay.clamp(min=_NOTHING_LEFT).unsqueeze(-1)).squeeze(-1)
    o, S = cast(
        tuple[Tensor, Tensor],
        _Chunks.apply(rows(q), rows(k), rows(v), rows(beta.unsqueeze(-1)), decay, S.flatten(0, 1).contiguous()),
    )
    o = o.unflatten(0, (batch, heads)).transpose(1, 2)
    return o.to(v.dtype), S.unflatten(0, (batch, heads))


class _Chunks(torch.autograd.Function):
    """The chunks of q (N, T, K), k (N, T n, K), v (N, T n, V), beta (N, T n, 1), log_decay (N, T), S (N, K, V)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor
    ) -> tuple[Tensor, Tensor]:
        o = v.new_empty(*q.shape[:2], v.shape[2])
        sequence = q, k, v, beta, log_decay
        states = []
        with torch.autocast(v.device.type, enabled=False):
            for q_c, k_c, v_c, beta_c, decay_c, o_c in _cut(*sequence, o):
                states.append(S)
                S = _Chunk(q_c, k_c, v_c, beta_c, decay_c, S).forward(o_c)
        ctx.save_for_backward(*sequence, *states)
        return o, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_S: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, beta, log_decay, *states = ctx.saved_tensors
        grad_o = grad_o.contiguous()  # bmm takes an expanded one matrix by matrix
        sequence = q, k, v, beta, log_decay
        gradients = tuple(None if tensor is None else torch.empty_like(tensor) for tensor in sequence)
        with torch.autocast(v.device.type, enabled=False):
            chunks = _cut(*sequence, grad_o, *gradients)
            for parts, S in zip(reversed(chunks), reversed(states), strict=True):
                q_c, k_c, v_c, beta_c, decay_c, *of_backward = parts
                grad_S = _Chunk(q_c, k_c, v_c, beta_c, decay_c, S).backward(grad_S, *of_backward)
        return *gradients, grad_S


def _cut(q: Tensor, k: Tensor, *others: Any) -> list[list[Any]]:
    """Return, chunk for chunk, views of what belongs to it; None stays None."""
    length = q.shape[1]
    tokens = max(1, _STEPS // (k.shape[1] // length))
    cut = []
    for tensor in (q, k, *others):
        if tensor is None:
            cut.append([None] * -(-length // tokens))
        else:
            cut.append(tensor.split(tokens * tensor.shape[1] // length, 1))
    return [list(parts) for parts in zip(*cut, strict=True)]


class _Chunk:
    """One chunk and what both directions need of it, in the names above."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, S: Tensor) -> None:
        self.q, self.k, self.beta, self.S = q, k, beta, S
        self.tokens = tokens = q.shape[1]
        self.steps = k.shape[1] // tokens
        self.decays = log_decay is not None
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril_()
        if log_decay is None:
            self.D = seen.to(q.dtype).expand(len(q), -1, -1)
            self.q_in, self.k_in, self.k_out = q, k, k
        else:
            g = log_decay.double().cumsum(1)  # so that a small decay after a large one is not lost
            differences = g.unsqueeze(2) - g.unsqueeze(1)
            self.D = differences.masked_fill_(~seen, float("-inf")).to(q.dtype).exp_()
            self.from_start = g.unsqueeze(2).to(q.dtype).exp_()
            self.to_end = self.D[:, -1].unsqueeze(2)
            self.q_in = self.from_start * q
            self.k_in = self._each_step(self.from_start, 1) * k
            self.k_out = self._each_step(self.to_end, 1) * k
        self.D_q = self._each_step(self.D, 2)
        self.D_k = self._each_step(self.D_q, 1)
        self.P = (k @ k.mT).mul_(self.D_k)
        self.A = (q @ k.mT).mul_(self.D_q)
        self.M = beta * self.P  # read below its diagonal only
        self.E = v - self.k_in @ S
        self.U = torch.linalg.solve_triangular(self.M, beta * self.E, upper=False, unitriangular=True)

    def forward(self, o: Tensor) -> Tensor:
        """Write o (N, C, V); return the state after the chunk."""
        o.copy_((self.q_in @ self.S).baddbmm_(self.A, self.U))
        S = self.from_start[:, -1:] * self.S if self.decays else self.S
        return torch.baddbmm(S, self.k_out.mT, self.U)

    def backward(
        self,
        grad_S: Tensor,
        grad_o: Tensor,
        grad_q: Tensor,
        grad_k: Tensor,
        grad_v: Tensor,
        grad_beta: Tensor,
        grad_log_decay: Tensor | None,
    ) -> Tensor:
        """Write the gradients of the chunk's inputs; return that of the state before it from that of the one after."""
        q, k, S, U = self.q, self.k, self.S, self.U
        grad_U = torch.baddbmm(self.k_out @ grad_S, self.A.mT, grad_o)
        grad_R = torch.linalg.solve_triangular(self.M.mT, grad_U, upper=True, unitriangular=True)
        grad_E = self.beta * grad_R
        grad_M = (grad_R @ U.mT).neg_().tril_(-1)
        grad_A = grad_o @ U.mT
        to_q, to_k_in, to_k_out = grad_o @ S.mT, (grad_E @ S.mT).neg_(), U @ grad_S.mT
        grad_v.copy_(grad_E)
        grad_beta.copy_((grad_R * self.E).sum(-1, keepdim=True).add_((grad_M * self.P).sum(-1, keepdim=True)))
        before = torch.baddbmm(self.q_in.mT @ grad_o, self.k_in.mT, grad_E, alpha=-1)
        if grad_log_decay is not None:
            pairs = self._each_token(grad_M * self.M, 1).add_(grad_A * self.A)
            pairs = self._each_token(pairs, 2)
            ends = self._each_token((self.k_out * to_k_out).sum(-1), 1)
            grad_g = pairs.sum(2) - pairs.sum(1) - ends
            grad_g += (self.q_in * to_q).sum(-1)
            grad_g += self._each_token((self.k_in * to_k_in).sum(-1), 1)
            last = self.from_start[:, -1:]
            grad_g[:, -1] += ends.sum(1) + (last * S * grad_S).sum((1, 2))
            grad_log_decay.copy_(grad_g.flip(1).cumsum(1).flip(1))
            before += last * grad_S
            to_q = to_q * self.from_start
            to_k_in = to_k_in * self._each_step(self.from_start, 1)
            to_k_out = to_k_out * self._each_step(self.to_end, 1)
        else:
            before += grad_S
        grad_P = grad_M.mul_(self.beta).mul_(self.D_k)
        grad_A.mul_(self.D_q)
        grad_q.copy_(to_q.baddbmm_(grad_A, k))
        grad_k.copy_(to_k_in.add_(to_k_out).baddbmm_(grad_P + grad_P.mT, k).baddbmm_(grad_A.mT, q))
        return before

    def _each_step(self, of_tokens: Tensor, dim: int) -> Tensor:
        """Repeat what there is of a token for each of its steps."""
        return of_tokens if self.steps == 1 else of_tokens.repeat_interleave(self.steps, dim)

    def _each_token(self, of_steps: Tensor, dim: int) -> Tensor:
        """Sum over a token's steps."""
        return of_steps if self.steps == 1 else of_steps.unflatten(dim, (self.tokens, self.steps)).sum(dim + 1)
