"""SSD in Triton: chunks of tokens as matrix products, side by side; only the states between them go through time.

Inside a chunk, with the state S (N, P) before it and L_ts = exp(sum of delta_j A over s < j <= t) for s <= t, else 0:

    y = (L * c b^T) u + since * (c S) + D x,   u_t = delta_t x_t,   since_t = exp(sum of delta_j A over j <= t)
    S' = since_Q S + b^T (until * u),          until_s = L_Qs

`across` makes the last product of every chunk, `carry` (`fpexp.ops.pieces`) turns these, in place, into the states
before the chunks, and `outputs` makes y. The adjoint goes the same way back, with c^T (since * dy) in place of b^T
(until * u); then the rest is computed again. What the states are (B d N / Q T numbers) is kept. Gradients of b and c of
each head, of A and D of each chunk, are summed by torch in a fixed order.

Each exponent is a sum of its own and no difference of sums: a decay of exp(-1e4) costs its neighbours no digits, and
what is above the diagonal is 0 before it is exponentiated. For the same reason the gradient of delta_j A adds only the
products that hold it.

Factors of products are bfloat16 for bfloat16 x, which has no more digits, tf32 for float16, and three tf32 for float32.
Sums, and the states between chunks, are float32. N and P go by in blocks, loaded again, from a cache, where they are
needed again: with all of a state at once there would be no room in registers.

Occupancy: B * heads * chunks programs of 8 warps, one to three to an SM by their registers: 6144 for B 8, T 2048, 24
heads of P 64, N 128, Q 64 (d 1536), 16 rounds and more on 132 SMs. `carry` has B * heads * N P / 512 programs.

Roofline for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16) at that size: forward 2 Q (N + P) + 4 N P operations a token
and head, 22 GFLOP or 28 us; backward 2 Q (3 N + 4 P) + 10 N P, 64 GFLOP or 82 us. So memory: the states are 201 MB,
written, read, written and read forward, x and y 50 MB each: 0.96 GB or 225 us; backward the same for the adjoint, which
is read once more, the states twice, x and the gradient of y four times and three, db and dc of heads there and back
(201 MB each): 2.6 GB or 610 us. The L2 cache (50 MB) helps little. Predicted: forward 0.3 to 0.45 ms, backward 0.9 to
1.3 ms. B 256, T 16, 2 heads of P 64, N 128 (cpu scale): states 17 MB, 17 us and 32 us, below what three and five
launches and torch's sums cost (some 70 us). Not measured yet. For float32 x products are three of tf32: 0.13 ms and
0.39 ms, which still is less than its memory (1.1 GB and 2.9 GB: 0.26 and 0.67 ms).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch, run_all
from fpexp.ops.pieces.triton import carry
from fpexp.ops.ssd.kernels import triton as kernels

_LEAST = 16
"""Rows and columns of a product at least."""

_TOKENS = 64
"""In a chunk at most."""

_BLOCKS = {torch.bfloat16: (64, 64)}
_NARROW = (16, 16)
"""Of N and P, that go into a product at a time, at most; float32 has two registers for each number of a factor."""

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
    run_all(steps)
    return y, H


def launches(
    x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None = None
) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    problem = Problem.of(x, delta, A, b, c, D, state)
    y, H, states, steps = forward(problem)
    return steps | {f"{name}, back": step for name, step in backward(problem, states, y, H)[1].items()}


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
    def tokens(self) -> int:
        """Of a chunk."""
        return min(_TOKENS, max(_LEAST, triton.next_power_of_2(self.x.shape[1])))

    @property
    def blocks(self) -> tuple[int, int]:
        """Of N and P."""
        blocks, sizes = _BLOCKS.get(self.x.dtype, _NARROW), (self.b.shape[3], self.x.shape[3])
        n, p = (
            min(block, max(_LEAST, triton.next_power_of_2(size))) for block, size in zip(blocks, sizes, strict=True)
        )
        return n, p

    def new_empty(self, *shape: int) -> Tensor:
        """Room for numbers in the type that is computed in."""
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return self.x.new_empty(shape, dtype=dtype)

    @property
    def chunks(self) -> int:
        """Of a sequence."""
        return triton.cdiv(self.x.shape[1], self.tokens)

    def launch(self, kernel: Any, names: str = "", **others: Any) -> Launch:
        """Return a launch of `kernel`, a program a chunk of each head, on the arguments of these names and others."""
        batch, length, heads, P = self.x.shape
        named = {name: getattr(self, name) for name in names.split()}
        sizes = {"length": length, "heads": heads, "groups": self.b.shape[2], "N": self.b.shape[3], "P": P}
        constants = {"TOKENS": self.tokens, **dict(zip(("ROWS", "COLUMNS"), self.blocks, strict=True))}
        precision = {"COMPUTE": COMPUTE.get(self.x.dtype, tl.float32), "PRECISION": _PRECISION[self.x.dtype]}
        arguments = {**named, **others, **sizes, **constants, **precision}
        return Launch(kernel, batch * heads * self.chunks, 8, arguments)

    def between(
        self, rows: Tensor, columns: Tensor, first: Tensor | None, last: Tensor | None, back: bool = False
    ) -> tuple[Tensor, dict[str, Launch]]:
        """Return states (B, heads, chunks, P, N), not yet filled, and what fills them, by name.

        They are those before the chunks, from `first` to `last`, or, going `back`, the adjoints after them.
        """
        batch, _, heads, P = self.x.shape
        decays = self.new_empty(batch, heads, self.chunks)
        states = self.new_empty(*decays.shape, P, self.b.shape[3])
        tensors = {"rows": rows, "columns": columns, "decays": decays, "sums": states, "BACK": back}
        carried = carry(decays.flatten(0, 1), states.flatten(0, 1), first, last, back)
        return states, {"across": self.launch(kernels.across, "delta A", **tensors), "carry": carried}


def forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor, dict[str, Launch]]:
    """Return y, the last H and the states before chunks, not yet filled, and what fills them, by name."""
    p = problem
    batch, _, heads, P = p.x.shape
    y, H = torch.empty_like(p.x), p.new_empty(batch, heads, P, p.b.shape[3])
    states, steps = p.between(p.b, p.x, p.state, H)
    return y, H, states, steps | {"outputs": p.launch(kernels.outputs, "x delta A b c D", states=states, y=y)}


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
    N = p.b.shape[3]
    g = Gradients(
        dx=torch.empty_like(p.x),
        ddelta=torch.empty_like(p.delta),
        dA=p.new_empty(batch, heads, p.chunks),
        db=p.new_empty(batch, length, heads, N),
        dc=p.new_empty(batch, length, heads, N),
        dD=p.new_empty(batch, heads, p.chunks),
        dstate=None if p.state is None else torch.empty_like(p.state),
    )
    adjoints, steps = p.between(p.c, grad_y, grad_H, g.dstate, back=True)
    of_x = {"dx": g.dx, "ddelta": g.ddelta, "dA": g.dA, "dD": g.dD}
    for name, rows, inner, found in (("b", p.c, adjoints, g.db), ("c", p.b, states, g.dc)):
        given = {"rows": rows, "states": inner, "grad_y": grad_y, "found": found, "OF_B": name == "b"}
        steps[name] = p.launch(kernels.of_b_or_c, "x delta A", **given)
    given = {"states": states, "adjoints": adjoints, "grad_y": grad_y}
    steps["x and delta"] = p.launch(kernels.of_x_and_delta, "x delta A b c D", **given, **of_x)
    return g, steps


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        y, H, states, steps = forward(problem)
        run_all(steps)
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
        run_all(steps)
        groups = problem.b.shape[2]
        db, dc = (part.unflatten(2, (groups, -1)).sum(3).to(problem.b.dtype) for part in (found.db, found.dc))
        dA, dD = found.dA.sum((0, 2)).to(problem.A.dtype), found.dD.sum((0, 2)).to(problem.D.dtype)
        return found.dx, found.ddelta, dA, db, dc.to(problem.c.dtype), dD, found.dstate
