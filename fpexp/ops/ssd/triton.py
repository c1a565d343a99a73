"""SSD in Triton: chunks of tokens as matrix products, side by side; only the states between them go through time.

Inside a chunk, with the state S (N, P) before it and L_ts = exp(sum of delta_j A over s < j <= t) for s <= t, else 0:

    y = (L * c b^T) u + since * (c S) + D x,   u_t = delta_t x_t,   since_t = exp(sum of delta_j A over j <= t)
    S' = since_Q S + b^T (until * u),          until_s = L_Qs

`_across` makes the last product of every chunk, `_pass` turns these, in place, into the states before the chunks, and
`_outputs` makes y. The adjoint goes the same way back, with c^T (since * dy) in place of b^T (until * u); then the rest
is computed again. What the states are (B d N / Q T numbers) is kept. Gradients of b and c of each head, of A and D of
each chunk, are summed by torch in a fixed order.

Each exponent is a sum of its own and no difference of sums: a decay of exp(-1e4) costs its neighbours no digits, and
what is above the diagonal is 0 before it is exponentiated. For the same reason the gradient of delta_j A adds only the
products that hold it.

Factors of products are bfloat16 for bfloat16 x, which has no more digits, tf32 for float16, and three tf32 for float32.
Sums, and the states between chunks, are float32.

Occupancy: B * heads * chunks programs of 8 warps, one or two to an SM by their registers: 6144 for B 8, T 2048, 24
heads of P 64, N 128, Q 64 (d 1536), 23 rounds and more on 132 SMs. `_pass` has B * heads * N P / 1024 programs.

Roofline for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16) at that size: forward 2 Q (N + P) + 4 N P operations a token
and head, 22 GFLOP or 28 us; backward 2 Q (4 N + 3 P + Q) + 10 N P, 57 GFLOP or 73 us. So memory: the states are 201
MB, written, read, written and read forward, x and y 50 MB each: 0.96 GB or 225 us; backward the same for the adjoint,
the states again twice, the adjoint once more, db and dc of heads there and back (201 MB each): 2.2 GB or 510 us. The
L2 cache (50 MB) helps little. Predicted: forward 0.3 to 0.45 ms, backward 0.8 to 1.2 ms. B 256, T 16, 2 heads of P 64,
N 128 (cpu scale): states 17 MB, 20 us and 45 us, below what three and four launches and torch's sums cost (some 60
us). Not measured yet. For float32 x products take three times as long, and registers spill (`fpexp bench kernels`).
Triton 3.7 fails on `_of_x_and_delta` for sm_100, and it spills on sm_80: Hopper is what this is for so far.
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

_BLOCK = 1024
"""Numbers of a state that a program of `_pass` carries."""

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
    y, H, _, steps = forward(Problem.of(*arguments))
    _run(steps)
    return y, H


def launches(
    x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None = None
) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    problem = Problem.of(x, delta, A, b, c, D, state)
    y, H, states, steps = forward(problem)
    return steps | {f"{name}, back": step for name, step in backward(problem, states, y, H)[1].items()}


def _run(steps: dict[str, Launch]) -> None:
    for step in steps.values():
        step.run()


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

    @property
    def compute(self) -> Any:
        """Triton's type of sums and states."""
        return COMPUTE.get(self.x.dtype, tl.float32)

    def new_empty(self, *shape: int) -> Tensor:
        """Room for numbers in the type that is computed in."""
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return self.x.new_empty(shape, dtype=dtype)

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return triton.cdiv(self.x.shape[1], self.tile[0])

    def empty_states(self) -> Tensor:
        """Room for a state of each chunk, (B, heads, chunks, P, N)."""
        batch, _, heads, P = self.x.shape
        return self.new_empty(batch, heads, self.chunks, P, self.b.shape[3])

    def launch(self, kernel: Any, names: str = "", **others: Any) -> Launch:
        """Return a launch of `kernel`, a program a chunk of each head, on the arguments of these names and others."""
        batch, length, heads, P = self.x.shape
        named = {name: getattr(self, name) for name in names.split()}
        sizes = {"length": length, "heads": heads, "groups": self.b.shape[2], "N": self.b.shape[3], "P": P}
        constants = {**dict(zip(("TOKENS", "ROWS", "COLUMNS"), self.tile, strict=True)), "COMPUTE": self.compute}
        arguments = {**named, **others, **sizes, **constants, "PRECISION": _PRECISION[self.x.dtype]}
        return Launch(kernel, batch * heads * self.chunks, 8, arguments)

    def carry(self, sums: Tensor, first: Tensor | None, last: Tensor | None, back: bool) -> Launch:
        """Return what turns `sums` into states, from `first` to `last`."""
        batch, length, heads, P = self.x.shape
        size = P * self.b.shape[3]
        tensors = {"delta": self.delta, "A": self.A, "sums": sums, "first": first, "last": last}
        sizes = {"length": length, "heads": heads, "size": size, "BACK": back, "TOKENS": self.tile[0]}
        arguments = {**tensors, **sizes, "BLOCK": _BLOCK, "COMPUTE": self.compute}
        return Launch(_pass, batch * heads * triton.cdiv(size, _BLOCK), 4, arguments)


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, dict[str, Launch]]:
    """Return y, the last H and the states before chunks, not yet filled, and what fills them, by name."""
    p = problem
    y, states = torch.empty_like(p.x), p.empty_states()
    batch, _, heads, P = p.x.shape
    H = p.new_empty(batch, heads, P, p.b.shape[3])
    steps = {
        "across": p.launch(_across, "delta A", rows=p.b, columns=p.x, sums=states, BACK=False),
        "pass": p.carry(states, p.state, H, back=False),
        "outputs": p.launch(_outputs, "x delta A b c D", states=states, y=y),
    }
    return y, H, states, steps


class Gradients(NamedTuple):
    """Of x, delta and the state; of A and D for each chunk, of b and c for each head."""

    dx: Tensor
    ddelta: Tensor
    dA: Tensor
    db: Tensor
    dc: Tensor
    dD: Tensor
    dstate: Tensor | None


def backward(
    problem: Problem, states: Tensor, grad_y: Tensor, grad_H: Tensor | None
) -> tuple[Gradients, dict[str, Launch]]:
    """Return gradients, not yet filled, and what fills them, by name."""
    p = problem
    batch, length, heads, _ = p.x.shape
    N, adjoints = p.b.shape[3], p.empty_states()
    g = Gradients(
        dx=torch.empty_like(p.x),
        ddelta=torch.empty_like(p.delta),
        dA=p.new_empty(batch, heads, p.chunks),
        db=p.new_empty(batch, length, heads, N),
        dc=p.new_empty(batch, length, heads, N),
        dD=p.new_empty(batch, heads, p.chunks),
        dstate=None if p.state is None else torch.empty_like(p.state),
    )
    inner = {"states": states, "adjoints": adjoints, "grad_y": grad_y}
    of_x = {"dx": g.dx, "ddelta": g.ddelta, "dA": g.dA, "dD": g.dD}
    steps = {
        "across": p.launch(_across, "delta A", rows=p.c, columns=grad_y, sums=adjoints, BACK=True),
        "pass": p.carry(adjoints, grad_H, g.dstate, back=True),
        "b and c": p.launch(_of_b_and_c, "x delta A b c", **inner, db=g.db, dc=g.dc),
        "x and delta": p.launch(_of_x_and_delta, "x delta A b c D", **inner, **of_x),
    }
    return g, steps


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        y, H, states, steps = forward(problem)
        _run(steps)
        ctx.save_for_backward(*problem, states)
        ctx.set_materialize_grads(False)
        return y, H

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_H: Tensor | None) -> tuple[Tensor | None, ...]:
        *arguments, states = ctx.saved_tensors
        problem = Problem(*arguments)
        grad_y = torch.zeros_like(problem.x) if grad_y is None else grad_y.contiguous()
        found, steps = backward(problem, states, grad_y, None if grad_H is None else grad_H.contiguous())
        _run(steps)
        groups = problem.b.shape[2]
        db, dc = (part.unflatten(2, (groups, -1)).sum(3).to(problem.b.dtype) for part in (found.db, found.dc))
        dA, dD = found.dA.sum((0, 2)).to(problem.A.dtype), found.dD.sum((0, 2)).to(problem.D.dtype)
        return found.dx, found.ddelta, dA, db, dc.to(problem.c.dtype), dD, found.dstate


_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter multiplies the bits of bfloat16 numbers, as if they were integers."""

# Kernels. The place of a chunk is 64-bit, places inside it are 32-bit. A token past the end has delta 0: it changes no
# state. t and s are a chunk's tokens as rows and as columns.


@triton.jit
def _product(a, b, COMPUTE: tl.constexpr, PRECISION: tl.constexpr):
    if PRECISION == "bf16":
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if _INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32" if PRECISION == "bf16" else PRECISION, out_dtype=COMPUTE)


@triton.jit
def _across(
    delta, A, rows, columns, sums, length, heads, groups, N, P, BACK: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of each chunk b^T (until u), or, going back, c^T (since dy); sums: (B, heads, chunks, P, N)."""
    chunks = tl.cdiv(length, TOKENS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head, chunk = program // chunks // heads, program // chunks % heads, program % chunks
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = sequence * length + chunk * TOKENS
    inside = chunk * TOKENS + token < length
    step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
    log = step * tl.load(A + head).to(COMPUTE)
    if BACK:
        weight = tl.exp(tl.cumsum(log, 0))
    else:
        weight = step * tl.exp(tl.sum(tl.where(token[:, None] > token[None, :], log[:, None], 0), 0))
    in_rows = (at * groups + group) * N + token[None, :] * (groups * N) + n[:, None]
    row = tl.load(rows + in_rows, inside[None, :] & (n < N)[:, None], other=0).to(COMPUTE)
    in_columns = (at * heads + head) * P + token[:, None] * (heads * P) + p[None, :]
    column = tl.load(columns + in_columns, inside[:, None] & (p < P)[None, :], other=0).to(COMPUTE)
    found = _product(row, weight[:, None] * column, COMPUTE, PRECISION)
    present = (n < N)[:, None] & (p < P)[None, :]
    tl.store(sums + program * N * P + p[None, :] * N + n[:, None], found, present)


@triton.jit
def _pass(
    delta, A, sums, first, last, length, heads, size,
    BACK: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """S' = whole S + sum, chunk by chunk; S takes the place of the sum."""
    blocks, chunks = tl.cdiv(size, BLOCK), tl.cdiv(length, TOKENS)
    row = (tl.program_id(0) // blocks).to(tl.int64)  # sequence * heads + head
    sequence, head = row // heads, row % heads
    i = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    rate, token = tl.load(A + head).to(COMPUTE), tl.arange(0, TOKENS)
    S = tl.zeros([BLOCK], COMPUTE)
    if first is not None:
        S = tl.load(first + row * size + i, i < size, other=0).to(COMPUTE)
    for k in range(chunks):
        chunk = chunks - 1 - k if BACK else k
        inside = chunk * TOKENS + token < length
        in_delta = (sequence * length + chunk * TOKENS) * heads + head + token * heads
        whole = tl.exp(tl.sum(tl.load(delta + in_delta, inside, other=0).to(COMPUTE) * rate, 0))
        place = sums + (row * chunks + chunk) * size + i
        added = tl.load(place, i < size, other=0)
        tl.store(place, S, i < size)
        S = whole * S + added
    if last is not None:
        tl.store(last + row * size + i, S.to(last.dtype.element_ty), i < size)


@triton.jit
def _outputs(
    x, delta, A, b, c, D, states, y, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(length, TOKENS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head, chunk = program // chunks // heads, program // chunks % heads, program % chunks
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = sequence * length + chunk * TOKENS
    inside = chunk * TOKENS + token < length
    t, s = token[:, None], token[None, :]
    in_x, in_b = t * (heads * P) + p[None, :], t * (groups * N) + n[None, :]
    x_inside, b_inside = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
    present = (n < N)[:, None] & (p < P)[None, :]
    S = tl.load(states + program * N * P + p[None, :] * N + n[:, None], present, other=0)
    step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
    log = step * tl.load(A + head).to(COMPUTE)
    c_tile = tl.load(c + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    y_tile = tl.exp(tl.cumsum(log, 0))[:, None] * _product(c_tile, S, COMPUTE, PRECISION)
    b_tile = tl.load(b + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    scores = _product(c_tile, tl.trans(b_tile), COMPUTE, PRECISION)
    L = tl.where(t >= s, tl.exp(tl.cumsum(tl.where(t > s, log[:, None], 0), 0)), 0)
    x_tile = tl.load(x + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
    y_tile += _product(scores * L, step[:, None] * x_tile, COMPUTE, PRECISION)
    y_tile += tl.load(D + head).to(COMPUTE) * x_tile
    tl.store(y + (at * heads + head) * P + in_x, y_tile.to(y.dtype.element_ty), x_inside)


@triton.jit
def _of_b_and_c(
    x, delta, A, b, c, states, adjoints, grad_y, db, dc, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(length, TOKENS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head, chunk = program // chunks // heads, program // chunks % heads, program % chunks
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = sequence * length + chunk * TOKENS
    inside = chunk * TOKENS + token < length
    t, s = token[:, None], token[None, :]
    in_x, in_b, in_db = t * (heads * P) + p[None, :], t * (groups * N) + n[None, :], t * (heads * N) + n[None, :]
    x_inside, b_inside = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
    present = (p < P)[:, None] & (n < N)[None, :]
    in_state = program * N * P + p[:, None] * N + n[None, :]
    step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
    log = step * tl.load(A + head).to(COMPUTE)
    u = step[:, None] * tl.load(x + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
    dy = tl.load(grad_y + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
    masked = tl.where(t > s, log[:, None], 0)
    L = tl.where(t >= s, tl.exp(tl.cumsum(masked, 0)), 0)
    dscores = L * _product(dy, tl.trans(u), COMPUTE, PRECISION)
    S = tl.load(states + in_state, present, other=0)
    dc_tile = tl.exp(tl.cumsum(log, 0))[:, None] * _product(dy, S, COMPUTE, PRECISION)
    b_tile = tl.load(b + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    dc_tile += _product(dscores, b_tile, COMPUTE, PRECISION)
    tl.store(dc + (at * heads + head) * N + in_db, dc_tile, b_inside)
    dS = tl.load(adjoints + in_state, present, other=0)
    db_tile = tl.exp(tl.sum(masked, 0))[:, None] * _product(u, dS, COMPUTE, PRECISION)
    c_tile = tl.load(c + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    db_tile += _product(tl.trans(dscores), c_tile, COMPUTE, PRECISION)
    tl.store(db + (at * heads + head) * N + in_db, db_tile, b_inside)


@triton.jit
def _of_x_and_delta(
    x, delta, A, b, c, D, states, adjoints, grad_y, dx, ddelta, dA, dD, length, heads, groups, N, P,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(length, TOKENS)
    program = tl.program_id(0).to(tl.int64)
    sequence, head, chunk = program // chunks // heads, program // chunks % heads, program % chunks
    group = head // (heads // groups)
    token, n, p = tl.arange(0, TOKENS), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    at = sequence * length + chunk * TOKENS
    inside = chunk * TOKENS + token < length
    t, s = token[:, None], token[None, :]
    in_x, in_b = t * (heads * P) + p[None, :], t * (groups * N) + n[None, :]
    x_inside, b_inside = inside[:, None] & (p < P)[None, :], inside[:, None] & (n < N)[None, :]
    present = (n < N)[:, None] & (p < P)[None, :]
    in_state = program * N * P + p[None, :] * N + n[:, None]
    step = tl.load(delta + at * heads + head + token * heads, inside, other=0).to(COMPUTE)
    rate, skip = tl.load(A + head).to(COMPUTE), tl.load(D + head).to(COMPUTE)
    log = step * rate
    x_tile = tl.load(x + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
    dy = tl.load(grad_y + (at * heads + head) * P + in_x, x_inside, other=0).to(COMPUTE)
    b_tile = tl.load(b + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    c_tile = tl.load(c + (at * groups + group) * N + in_b, b_inside, other=0).to(COMPUTE)
    u = step[:, None] * x_tile

    # Through the states. from_start holds the decays up to its token, to_end those after it, the last all of them.
    S, dS = tl.load(states + in_state, present, other=0), tl.load(adjoints + in_state, present, other=0)
    dlog = tl.exp(tl.sum(log, 0)) * tl.sum(tl.sum(S * dS, 1), 0)
    masked = tl.where(t > s, log[:, None], 0)
    du = tl.exp(tl.sum(masked, 0))[:, None] * _product(b_tile, dS, COMPUTE, PRECISION)
    to_end = tl.sum(u * du, 1)
    from_start = tl.exp(tl.cumsum(log, 0)) * tl.sum(dy * _product(c_tile, S, COMPUTE, PRECISION), 1)
    dlog += tl.sum(tl.where(t >= s, from_start[:, None], 0), 0) + tl.sum(tl.where(t < s, to_end[:, None], 0), 0)

    # Inside the chunk. A term [t, s] holds the decays j with s < j <= t.
    L = tl.where(t >= s, tl.exp(tl.cumsum(masked, 0)), 0)
    weighted = L * _product(c_tile, tl.trans(b_tile), COMPUTE, PRECISION)
    du += _product(tl.trans(weighted), dy, COMPUTE, PRECISION)
    weighted *= _product(dy, tl.trans(u), COMPUTE, PRECISION)
    from_before = _product(weighted, tl.where(t < s, 1, 0).to(COMPUTE), COMPUTE, PRECISION)
    dlog += tl.sum(tl.where(t >= s, from_before, 0), 0)

    ddelta_tile = tl.sum(du * x_tile, 1) + rate * dlog
    in_delta = at * heads + head + token * heads
    tl.store(ddelta + in_delta, ddelta_tile.to(ddelta.dtype.element_ty), inside)
    tl.store(dA + program, tl.sum(step * dlog, 0))
    tl.store(dD + program, tl.sum(tl.sum(dy * x_tile, 1), 0))
    dx_tile = step[:, None] * du + skip * dy
    tl.store(dx + (at * heads + head) * P + in_x, dx_tile.to(dx.dtype.element_ty), x_inside)
