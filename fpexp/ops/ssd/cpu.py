"""SSD in chunks of tokens, as matrix products (Dao and Gu 2024, sec. 6), with a backward that recomputes.

Inside a chunk, for each head, with the state S before the chunk and L_ts = alpha_{s+1} ... alpha_t for s <= t, else 0:

    y_t = sum_s L_ts (c_t . b_s) u_s + (alpha_1 ... alpha_t) S c_t,   u_t = delta_t x_t,   alpha_t = exp(delta_t A)
    S' = (alpha_1 ... alpha_Q) S + sum_s L_Qs u_s b_s^T

L is a running product and not exp of a difference of sums: nothing overflows above the diagonal, and a decay of
exp(-1e4) costs its neighbours no digits. For the same reason the gradient of log alpha adds only what spans its token.

Chunks are laid out with time last, (chunks, B, groups, heads of a group, P, tokens), so that one head's matrix and that
of all heads of a group are both views. Of the states only those between chunks exist.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fpexp.ops.kernel import compute_type
from fpexp.ops.ssd import reference

_CHUNK = 64
"""Tokens in a chunk at most: work inside chunks grows with it, the number of states falls."""


def _chunk_size(state_size: int) -> int:
    """Return the most tokens in a chunk: fewer where N is small, for then states cost less than products."""
    return min(_CHUNK, max(32, state_size // 2))


def ssd(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.ssd`."""
    if x.shape[1] == 1:
        return reference.ssd(x, delta, A, b, c, D, state)
    y, H = _SSD.apply(x, delta, A, b, c, D, state)
    return y, H


class _Layout:
    """Where tokens go: `chunks` of `size` tokens, the last padded with tokens of delta 0, which change no state."""

    def __init__(self, x: Tensor, b: Tensor) -> None:
        self.length, self.heads = x.shape[1:3]
        self.groups, self.dtype = b.shape[2], compute_type(x.dtype)
        self.chunks = -(-self.length // _chunk_size(b.shape[3]))
        self.size = -(-self.length // self.chunks)

    def split(self, tensor: Tensor) -> Tensor:
        """(B, T, n, ...) to (chunks, B, groups, n / groups, ..., size)."""
        tensor = tensor.to(self.dtype).movedim(1, -1)
        tensor = functional.pad(tensor, (0, self.chunks * self.size - self.length))
        tensor = tensor.unflatten(-1, (self.chunks, self.size)).movedim(-2, 0)
        return tensor.unflatten(2, (self.groups, -1)).contiguous()

    def join(self, tensor: Tensor) -> Tensor:
        """The inverse of `split`, as a view where it can be: (B, T, n, ...)."""
        tensor = tensor.flatten(2, 3).movedim(0, -2).flatten(-2)
        return tensor[..., : self.length].movedim(-1, 1)


class _Chunks(NamedTuple):
    """What forward and backward both compute; R heads of a group, Q tokens of a chunk."""

    u: Tensor  # (K, B, G, R, P, Q)
    b: Tensor  # (K, B, G, N, Q)
    c: Tensor  # (K, B, G, N, Q)
    L: Tensor  # (K, B, G, R, Q, Q), [t, s]
    scores: Tensor  # c_t . b_s, (K, B, G, 1, Q, Q)
    since_start: Tensor  # alpha_1 ... alpha_t, (K, B, G, R, 1, Q)
    until_end: Tensor  # alpha_{s+1} ... alpha_Q, (K, B, G, R, 1, Q)

    @property
    def whole(self) -> Tensor:
        """The decay of a whole chunk, (K, B, G, R, 1, 1)."""
        return self.since_start[..., -1:]


def _prepare(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor) -> _Chunks:
    """Return the chunks of arguments that `_Layout.split` has laid out; A is (G, R)."""
    alpha = torch.exp(delta * A.unsqueeze(-1))
    L = _decays(alpha)
    return _Chunks(
        u=delta.unsqueeze(-2) * x,
        b=b,
        c=c,
        L=L,
        scores=(c.mT @ b).unsqueeze(-3),
        since_start=(alpha[..., :1] * L[..., 0]).unsqueeze(-2),
        until_end=L[..., -1:, :],
    )


def _decays(alpha: Tensor) -> Tensor:
    """L_ts = alpha_{s+1} ... alpha_t, row after row; alpha: (..., Q), L: (..., Q, Q)."""
    size = alpha.shape[-1]
    L = alpha.new_zeros(*alpha.shape, size)
    L.diagonal(dim1=-2, dim2=-1).fill_(1)
    for t in range(1, size):
        torch.mul(L[..., t - 1, :t], alpha[..., t : t + 1], out=L[..., t, :t])
    return L


def _merge(tensor: Tensor) -> Tensor:
    """The heads of a group as one matrix: (K, B, G, R, P, n) to (K, B, G, R P, n)."""
    return tensor.flatten(3, 4)


def _states(chunks: _Chunks, state: Tensor) -> Tensor:
    """Return the states before each chunk and after the last, (K + 1, B, G, R, P, N)."""
    states = state.new_empty(len(chunks.u) + 1, *state.shape)
    states[0] = state
    torch.matmul(_merge(chunks.u * chunks.until_end), chunks.b.mT, out=_merge(states[1:]))
    for k, decay in enumerate(chunks.whole):
        states[k + 1].addcmul_(decay, states[k])
    return states


class _SSD(torch.autograd.Function):
    """Keeps the arguments and the states before chunks, (K, B, heads, P, N)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, enabled=False):
            layout = _Layout(x, b)
            heads = (layout.groups, layout.heads // layout.groups)
            xs, chunks = _load(layout, x, delta, A, b, c)
            y = chunks.u @ (chunks.L * chunks.scores).mT
            if state is None and layout.chunks == 1:  # nothing comes in, as in training on short sequences
                states = None
                H = (_merge(chunks.u * chunks.until_end) @ chunks.b.mT).view(*x.shape[:1], *x.shape[2:], b.shape[3])
            else:
                H = xs.new_zeros(len(x), *x.shape[2:], b.shape[3]) if state is None else state.to(layout.dtype)
                states = _states(chunks, H.unflatten(1, heads))
                H = states[-1].flatten(1, 2).clone()
                y += (_merge(states[:-1]) @ chunks.c).view_as(xs).mul_(chunks.since_start)
            y.addcmul_(D.to(layout.dtype).view(*heads, 1, 1), xs)
        ctx.save_for_backward(x, delta, A, b, c, D, states)
        ctx.set_materialize_grads(False)
        ctx.state_dtype = None if state is None else state.dtype
        return layout.join(y).to(x.dtype).contiguous(), H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_H: Tensor | None) -> tuple[Tensor | None, ...]:
        x, delta, A, b, c, D, states = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            layout = _Layout(x, b)
            heads = (layout.groups, layout.heads // layout.groups)
            xs, chunks = _load(layout, x, delta, A, b, c)
            deltas = layout.split(delta)
            dy = layout.split(torch.zeros_like(x) if grad_y is None else grad_y)
            weighted = (dy.mT @ chunks.u).mul_(chunks.L)
            dscores = weighted.sum(-3)
            dc, db = chunks.b @ dscores.mT, chunks.c @ dscores
            du = dy @ (chunks.L * chunks.scores)
            dlog = _spanning(weighted.mul_(chunks.scores))
            dstate = None
            if states is not None or grad_H is not None:
                if states is None:
                    states = xs.new_zeros(2, len(x), *heads, x.shape[3], b.shape[3])
                last = torch.zeros_like(states[-1]) if grad_H is None else grad_H.unflatten(1, heads)
                through = _through_states(chunks, xs, dy, states, last)
                dc += through.dc
                db += through.db
                du += through.du
                dlog += through.dlog
                dstate = through.dstate
            dx = (deltas.unsqueeze(-2) * du).addcmul_(D.to(layout.dtype).view(*heads, 1, 1), dy)
            ddelta = (du * xs).sum(-2).addcmul_(A.to(layout.dtype).view(*heads, 1), dlog)
            dA = (deltas * dlog).sum((0, 1, -1)).flatten()
            dD = (dy * xs).sum((0, 1, -1, -2)).flatten()
        return (
            layout.join(dx).to(x.dtype),
            layout.join(ddelta).to(delta.dtype),
            dA.to(A.dtype),
            layout.join(db.unsqueeze(3)).to(b.dtype),
            layout.join(dc.unsqueeze(3)).to(c.dtype),
            dD.to(D.dtype),
            None if ctx.state_dtype is None or dstate is None else dstate.flatten(1, 2).to(ctx.state_dtype),
        )


def _load(layout: _Layout, x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, _Chunks]:
    """Return x (K, B, G, R, P, Q) and the chunks."""
    xs, deltas, bs, cs = (layout.split(tensor) for tensor in (x, delta, b, c))
    A = A.to(layout.dtype).view(layout.groups, -1)
    return xs, _prepare(xs, deltas, A, bs.squeeze(3), cs.squeeze(3))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of a * b over the last two dimensions, without their product in memory; (..., 1)."""
    return (a.flatten(-2).unsqueeze(-2) @ b.flatten(-2).unsqueeze(-1)).squeeze(-1)


class _ThroughStates(NamedTuple):
    """What the states between chunks add to gradients, and the gradient of the one before the first."""

    dc: Tensor
    db: Tensor
    du: Tensor
    dlog: Tensor
    dstate: Tensor


def _through_states(chunks: _Chunks, xs: Tensor, dy: Tensor, states: Tensor, last: Tensor) -> _ThroughStates:
    """Carry `last`, the gradient of the last state, back over the chunks."""
    before = _merge(states[:-1])
    dy_in, u_out = dy * chunks.since_start, chunks.u * chunks.until_end
    adjoints = torch.empty_like(states)
    adjoints[-1] = last
    torch.matmul(_merge(dy_in), chunks.c.mT, out=_merge(adjoints[:-1]))
    for k in reversed(range(len(chunks.u))):
        adjoints[k].addcmul_(chunks.whole[k], adjoints[k + 1])
    after = _merge(adjoints[1:])
    du = (after @ chunks.b).view_as(xs).mul_(chunks.until_end)
    from_start = (dy_in * (before @ chunks.c).view_as(xs)).sum(-2)  # holds alpha_j up to t
    to_end = (chunks.u * du).sum(-2)  # holds alpha_j after s
    across = _dot(states[:-1], adjoints[1:]) * chunks.whole.squeeze(-1)  # holds every alpha_j
    suffix = from_start.flip(-1).cumsum(-1).flip(-1)
    prefix = functional.pad(to_end[..., :-1].cumsum(-1), (1, 0))
    return _ThroughStates(
        dc=before.mT @ _merge(dy_in),
        db=after.mT @ _merge(u_out),
        du=du,
        dlog=suffix + prefix + across,
        dstate=adjoints[0],
    )


def _spanning(inside: Tensor) -> Tensor:
    """Return, of terms [t, s] (..., Q, Q), the sum of those with j in s + 1 to t, (..., Q).

    Each is a product that holds alpha_j, so this is its part of the gradient of log alpha_j.
    """
    size = inside.shape[-1]
    earlier = inside.new_ones(size, size).triu_(1)
    return (inside @ earlier).tril_().sum(-2)
