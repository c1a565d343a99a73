"""SSD in Triton: a program is one sequence and one head, and goes through time in chunks of tokens as matrix products.

Inside a chunk, with the state S (N, P) before it and L_ts = exp(sum of delta_j A over s < j <= t) for s <= t, else 0:

    y = (L * c b^T) u + since * (c S) + D x,   u_t = delta_t x_t,   since_t = exp(sum of delta_j A over j <= t)
    S' = since_Q S + b^T (until * u),          until_s = L_Qs

Each exponent is a sum of its own and no difference of sums: a decay of exp(-1e4) costs its neighbours no digits, and
what is above the diagonal is 0 before it is exponentiated. For the same reason the gradient of delta_j A adds only the
products that hold it. The state before each chunk is kept; the backward carries the adjoint from the last chunk to the
first, and computes the rest of a chunk again. Gradients of b and c of each head, of A and D of each sequence are summed
by torch in a fixed order.

Products are of float32 numbers on tensor cores: in tf32 for bfloat16 and float16 x, which have no more digits, and
as three of tf32 for float32 x. Sums and the state are float32.

Occupancy: B * heads programs of 8 warps. B 8, 24 heads are 192 on 132 SMs, where shared memory has room for one: 60 SMs
have a second round and the rest wait. Splitting a head's P, or chunks side by side, would fill them.

Roofline for an H200 (4.3 TB/s; 395 TFLOP/s in tf32, half of bfloat16's 790, a third of that for float32 x), heads of P,
chunks of Q tokens: forward 2 Q (N + P) + 4 N P operations a token and head, backward 2 Q (4 N + 3 P + Q) + 10 N P.
B 8, T 2048, 24 heads of P 64, N 128, Q 64 (d 1536), bfloat16: forward 57 and backward 146 thousand operations, 22 and 57
GFLOP: 57 us and 145 us. Memory: forward x, y in 2 bytes and states, 302 MB or 70 us; backward x, dy, dx, states, and db
and dc of heads there and back in 4 bytes, 1.2 GB or 280 us. Predicted: forward 0.25 to 0.5 ms, backward 0.8 to 1.5 ms,
for tensor cores wait where one program has an SM to itself. B 256, T 16, 2 heads of P 64 (cpu scale): floors 2 us and
5 us, below what launches and torch's sums cost (some 30 us). Not measured yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch

_LEAST = 16
"""Rows and columns of a product at least."""

_TOKENS = 64
"""In a chunk at most, where a state has no more than `_STATE` numbers; fewer where it has more."""

_STATE = 64 * 128

_PRECISION = {torch.float64: "ieee", torch.float32: "tf32x3", torch.float16: "tf32", torch.bfloat16: "bf16"}
"""Of the factors of products, by type of x: a state may be past what float16 holds."""


def ssd(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.ssd`. What is not contiguous is copied."""
    arguments = (x, delta, A, b, c, D, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(tuple[Tensor, Tensor], _SSD.apply(*arguments))
    y, H, launch = forward(Problem.of(*arguments), kept=None)
    launch.run()
    return y, H


def launches(
    x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None = None
) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    problem = Problem.of(x, delta, A, b, c, D, state)
    kept = problem.empty_kept()
    y, H, onwards = forward(problem, kept)
    return {"forward": onwards, "backward": backward(problem, kept, y, H)[1]}


class Problem(NamedTuple):
    """The arguments, contiguous."""

    x: Tensor
    delta: Tensor
    A: Tensor
    b: Tensor
    c: Tensor
    D: Tensor
    state: Tensor | None

    @classmethod
    def of(cls, *arguments: Tensor | None) -> Problem:
        """Copy what is not contiguous."""
        return cls(*(None if tensor is None else tensor.contiguous() for tensor in arguments))  # type: ignore[arg-type]

    @property
    def tile(self) -> tuple[int, int, int]:
        """Tokens, N and P of a chunk."""
        rows, columns = (max(_LEAST, triton.next_power_of_2(size)) for size in (self.b.shape[3], self.x.shape[3]))
        most = max(_LEAST, min(_TOKENS, _TOKENS * _STATE // (rows * columns)))
        return min(most, max(_LEAST, triton.next_power_of_2(self.x.shape[1]))), rows, columns

    def new_empty(self, *shape: int) -> Tensor:
        """Room for numbers in the type that is computed in."""
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return self.x.new_empty(shape, dtype=dtype)

    def empty_kept(self) -> Tensor:
        """Room for the states before each chunk, (B, heads, chunks, N, P)."""
        batch, length, heads, P = self.x.shape
        return self.new_empty(batch, heads, triton.cdiv(length, self.tile[0]), self.b.shape[3], P)

    def launch(self, kernel: Any, **tensors: Tensor | None) -> Launch:
        """Return a launch of `kernel` on these arguments and on `tensors`, which follow them."""
        batch, length, heads, P = self.x.shape
        sizes = {"length": length, "heads": heads, "groups": self.b.shape[2], "N": self.b.shape[3], "P": P}
        sizes |= dict(zip(("TOKENS", "ROWS", "COLUMNS"), self.tile, strict=True))
        arguments = {**self._asdict(), **tensors, **sizes}
        arguments["COMPUTE"] = COMPUTE.get(self.x.dtype, tl.float32)
        arguments["PRECISION"] = _PRECISION[self.x.dtype]
        return Launch(kernel, batch * heads, 8, arguments)


def forward(problem: Problem, kept: Tensor | None) -> tuple[Tensor, Tensor, Launch]:
    """Return y and the last H, not yet filled, and what fills them and `kept`."""
    y = torch.empty_like(problem.x)
    batch, _, heads, P = problem.x.shape
    H = problem.new_empty(batch, heads, P, problem.b.shape[3])
    return y, H, problem.launch(_forward, y=y, final=H, kept=kept)


class Gradients(NamedTuple):
    """Of x, delta and the state; of A and D for each sequence, of b and c for each head."""

    dx: Tensor
    ddelta: Tensor
    dA: Tensor
    db: Tensor
    dc: Tensor
    dD: Tensor
    dstate: Tensor | None


def backward(problem: Problem, kept: Tensor, grad_y: Tensor, grad_H: Tensor | None) -> tuple[Gradients, Launch]:
    """Return gradients, not yet filled, and what fills them."""
    batch, length, heads, _ = problem.x.shape
    N = problem.b.shape[3]
    gradients = Gradients(
        dx=torch.empty_like(problem.x),
        ddelta=torch.empty_like(problem.delta),
        dA=problem.new_empty(batch, heads),
        db=problem.new_empty(batch, length, heads, N),
        dc=problem.new_empty(batch, length, heads, N),
        dD=problem.new_empty(batch, heads),
        dstate=None if problem.state is None else torch.empty_like(problem.state),
    )
    return gradients, problem.launch(_backward, kept=kept, grad_y=grad_y, grad_final=grad_H, **gradients._asdict())


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        kept = problem.empty_kept()
        y, H, launch = forward(problem, kept)
        launch.run()
        ctx.save_for_backward(*problem, kept)
        ctx.set_materialize_grads(False)
        return y, H

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_H: Tensor | None) -> tuple[Tensor | None, ...]:
        *arguments, kept = ctx.saved_tensors
        problem = Problem(*arguments)
        grad_y = torch.zeros_like(problem.x) if grad_y is None else grad_y.contiguous()
        found, launch = backward(problem, kept, grad_y, None if grad_H is None else grad_H.contiguous())
        launch.run()
        groups = problem.b.shape[2]
        db, dc = (part.unflatten(2, (groups, -1)).sum(3).to(problem.b.dtype) for part in (found.db, found.dc))
        dA, dD = found.dA.sum(0).to(problem.A.dtype), found.dD.sum(0).to(problem.D.dtype)
        return found.dx, found.ddelta, dA, db, dc.to(problem.c.dtype), dD, found.dstate


# Kernels. The place of a chunk is 64-bit, places inside it are 32-bit. A token past the end has delta 0: it changes no
# state. t and s are a chunk's tokens as rows and as columns.


@triton.jit
def _product(a, b, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), out_dtype=COMPUTE)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=COMPUTE)


@triton.jit
def _decays(log, t, s):
    """L (tokens, tokens), since and until, of the logarithms of a chunk's decays."""
    L = tl.where(t >= s, tl.exp(tl.cumsum(tl.where(t > s, log[:, None], 0), 0)), 0)
    since = tl.exp(tl.cumsum(log, 0))
    until = tl.exp(tl.sum(tl.where(t > s, log[:, None], 0), 0))
    return L, since, until


@triton.jit
def _forward(
    x, delta, A, b, c, D, state, y, final, kept, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // heads, tl.program_id(0) % heads
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    t, s = token[:, None], token[None, :]
    in_x, in_b = t * (heads * P) + p[None, :], t * (groups * N) + n[None, :]
    present = (n < N)[:, None] & (p < P)[None, :]
    in_state = p[None, :] * N + n[:, None]
    rate, skip = tl.load(A + head).to(COMPUTE), tl.load(D + head).to(COMPUTE)
    S = tl.zeros([ROWS, COLUMNS], COMPUTE)
    if state is not None:
        S = tl.load(state + program * P * N + in_state, present, other=0).to(COMPUTE)
    for start in range(0, length, TOKENS):
        at = sequence * length + start
        inside = start + token < length
        x_inside, b_inside = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
        if kept is not None:
            chunk = program * tl.cdiv(length, TOKENS) + start // TOKENS
            tl.store(kept + chunk * N * P + n[:, None] * P + p[None, :], S, present)
        step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
        x_tile = tl.load(x + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
        b_tile = tl.load(b + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
        c_tile = tl.load(c + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
        log = step * rate
        L, since, until = _decays(log, t, s)
        u = step[:, None] * x_tile
        scores = _product(c_tile, tl.trans(b_tile), COMPUTE, PRECISION)
        y_tile = _product(scores * L, u, COMPUTE, PRECISION) + skip * x_tile
        y_tile += since[:, None] * _product(c_tile, S, COMPUTE, PRECISION)
        tl.store(y + (at * heads + head) * P + in_x, y_tile.to(y.dtype.element_ty), x_inside)
        written = _product(tl.trans(b_tile), until[:, None] * u, COMPUTE, PRECISION)
        S = tl.exp(tl.sum(log, 0)) * S + written
    tl.store(final + program * P * N + in_state, S, present)


@triton.jit
def _backward(
    x, delta, A, b, c, D, state, kept, grad_y, grad_final, dx, ddelta, dA, db, dc, dD, dstate,
    length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // heads, tl.program_id(0) % heads
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    t, s = token[:, None], token[None, :]
    in_x, in_b, in_db = t * (heads * P) + p[None, :], t * (groups * N) + n[None, :], t * (heads * N) + n[None, :]
    present = (n < N)[:, None] & (p < P)[None, :]
    in_state = p[None, :] * N + n[:, None]
    rate, skip = tl.load(A + head).to(COMPUTE), tl.load(D + head).to(COMPUTE)
    dS = tl.zeros([ROWS, COLUMNS], COMPUTE)  # of the state after the chunk
    if grad_final is not None:
        dS = tl.load(grad_final + program * P * N + in_state, present, other=0).to(COMPUTE)
    dA_sum, dD_sum = tl.zeros([TOKENS], COMPUTE), tl.zeros([TOKENS], COMPUTE)
    chunks = tl.cdiv(length, TOKENS)
    for i in range(chunks - 1, -1, -1):
        start = i * TOKENS
        at = sequence * length + start
        inside = start + token < length
        x_inside, b_inside = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
        S = tl.load(kept + (program * chunks + i) * N * P + n[:, None] * P + p[None, :], present, other=0)
        step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
        x_tile = tl.load(x + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
        dy = tl.load(grad_y + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
        b_tile = tl.load(b + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
        c_tile = tl.load(c + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
        log = step * rate
        L, since, until = _decays(log, t, s)
        whole = tl.exp(tl.sum(log, 0))
        u, dy_in = step[:, None] * x_tile, since[:, None] * dy

        # Through the states. from_start holds the decays up to its token, to_end those after it, across all of them.
        du = until[:, None] * _product(b_tile, dS, COMPUTE, PRECISION)
        from_start = tl.sum(dy_in * _product(c_tile, S, COMPUTE, PRECISION), 1)
        to_end = tl.sum(u * du, 1)
        across = whole * tl.sum(tl.sum(S * dS, 1), 0)
        dlog = tl.sum(tl.where(t >= s, from_start[:, None], 0), 0) + tl.sum(tl.where(t < s, to_end[:, None], 0), 0)
        dc_tile = _product(dy_in, tl.trans(S), COMPUTE, PRECISION)
        db_tile = _product(until[:, None] * u, tl.trans(dS), COMPUTE, PRECISION)
        dS = whole * dS + _product(tl.trans(c_tile), dy_in, COMPUTE, PRECISION)

        # Inside the chunk. A term [t, s] holds the decays j with s < j <= t.
        scores = _product(c_tile, tl.trans(b_tile), COMPUTE, PRECISION)
        dscores = L * _product(dy, tl.trans(u), COMPUTE, PRECISION)
        dc_tile += _product(dscores, b_tile, COMPUTE, PRECISION)
        db_tile += _product(tl.trans(dscores), c_tile, COMPUTE, PRECISION)
        du += _product(tl.trans(L * scores), dy, COMPUTE, PRECISION)
        from_before = _product(scores * dscores, tl.where(t < s, 1, 0).to(COMPUTE), COMPUTE, PRECISION)
        dlog += tl.sum(tl.where(t >= s, from_before, 0), 0) + across

        dA_sum += tl.where(inside, step * dlog, 0)
        dD_sum += tl.sum(dy * x_tile, 1)
        ddelta_tile = tl.sum(du * x_tile, 1) + rate * dlog
        tl.store(
            ddelta + at * heads + head + token * heads, ddelta_tile.to(ddelta.dtype.element_ty), inside
        )
        dx_tile = step[:, None] * du + skip * dy
        tl.store(dx + (at * heads + head) * P + in_x, dx_tile.to(dx.dtype.element_ty), x_inside)
        tl.store(db + (at * heads + head) * N + in_db, db_tile, b_inside)
        tl.store(dc + (at * heads + head) * N + in_db, dc_tile, b_inside)
    tl.store(dA + program, tl.sum(dA_sum, 0))
    tl.store(dD + program, tl.sum(dD_sum, 0))
    if dstate is not None:
        tl.store(dstate + program * P * N + in_state, dS.to(dstate.dtype.element_ty), present)
