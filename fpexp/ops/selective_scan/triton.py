"""The selective scan in Triton: a program is one sequence and 32 channels, and goes through time in tiles of tokens.

A tile is (tokens, N, channels), a channel a lane, N shared among the warps and time inside each thread: the scan over
tokens is plain arithmetic, y sums over N in a thread and then among the warps. Two maps H -> a H + w are joined as

    (a_1, e_1, w_1), (a_2, e_2, w_2) -> (a_1 a_2, a_2 (e_1 + w_1) + e_2, w_2),   H_t = e_t + w_t

which leaves e_t = decay_t H_{t-1}, what the gradient of the decay asks for, where H_t - w_t would cancel its digits.
The adjoint needs G_t before it is multiplied by decay_t; the same way round, from the last token to the first:

    G_t = decay_{t+1} G_{t+1} + grad_y_t c_t^T

The state before each tile is kept (B T d N / 8 numbers for N 16); the backward goes from there, from the last tile to
the first, and computes the tile again. Sums over channels (b, c) or sequences (A, D) are made in a program first and
then by torch in a fixed order: the result is the same every time. The state is float32 (float64 for float64 x), decays
are exp2 of numbers that are not positive, and a token past the end has delta 0: decay 1, nothing written.

Occupancy: B d / 32 programs. B 8, d 1536 are 384 on 132 SMs, two at a time forward (8 warps each) and one backward (16
warps): 2 and 3 rounds. Where B d / 32 is 66 or less and T is long, time is cut into 4 pieces or more
(`fpexp.ops.pieces`), until there are up to 264 programs: a launch finds the decay of each piece and its last state from
zero, `carry` chains these, and a third launch runs each piece from its own state; the backward does the same the other
way round. A last state is a sum over tokens, each decayed by its own sum of delta, and needs no scan over states.

Roofline for an H200 (132 SMs at 1.7 GHz, 16 exp2, 32 shuffles and 128 float32 operations a clock each; 4.3 TB/s), with
E = B T d N elements and s bytes a number of x:

    forward   3 s E / N + 4 E / 8 bytes (no gradient: without the last)   1 exp2, 6 operations an element
    backward  5 s E / N + 4 E / 8 + E / 2 bytes (the last: db, dc)        1 exp2, 16 operations, 10 shuffles an element

B 8, T 2048, d 1536, N 16 (E = 4.0e8), float32: forward 117 us of memory, 112 us of exp2, 84 us of arithmetic; backward
210 us, 112 us, 225 us and 560 us of shuffles, which sum db and dc over lanes. But a tile also waits at some 20 barriers
forward and 36 backward, for what goes from one warp to another, of 30 to 60 cycles each, and little else runs
meanwhile: predicted are 0.3 to 0.6 ms forward and 1.5 to 2.2 ms backward. B 256, T 16, d 128, N 16 (cpu scale, E =
8.4e6): floors 2.4 us and 12 us, below what two launches and torch's sums cost (some 30 us).

What pieces add: 2 s E / N bytes, 1 exp2 and 3 operations an element, forward and backward each, and 5 barriers a tile.
B 1, T 16384, d 1024, N 16 (E = 2.7e8; 32 programs, 8 pieces), float32: floors 78 us, with 75 us of exp2, and 380 us of
shuffles; plus 31 us of memory or 75 us of exp2 each way. In one piece 2048 tiles would follow one another, some 2 us
each forward and 3 us backward, 4 ms and 6 ms; predicted are 0.7 ms and 2 ms. Not measured yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.launch.triton import COMPUTE, Launch, run_all
from fpexp.ops.pieces.triton import MULTIPROCESSORS, carry, tiles_of_a_piece
from fpexp.ops.selective_scan.kernels import triton as kernels

_CHANNELS = 32
"""A lane each."""

_TILE = 128
"""Tokens times N in a tile at most: twice that spills in the backward, whose 16 warps leave a thread 128 registers."""

_TOKENS = 16
"""In a tile at most."""

_WARPS, _WARPS_BACK = 8, 16
"""At most: so many that registers leave room for two programs on a multiprocessor forward, and none spills backward."""

_PROGRAMS = 2 * MULTIPROCESSORS
"""That there is room for at a time, forward: where pieces of time do not make more of them, time is cut."""


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.selective_scan`. What is not contiguous is copied."""
    arguments = (x, delta, A, b, c, D, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        return cast(tuple[Tensor, Tensor], _SelectiveScan.apply(*arguments))
    problem = Problem.of(*arguments)
    y, H, steps = forward(problem, kept=None)
    run_all(steps)
    return y, H


def launches(
    x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None = None
) -> dict[str, Launch]:
    """What training launches for contiguous arguments, by name; meta tensors will do to compile it."""
    problem = Problem.of(x, delta, A, b, c, D, state)
    kept = problem.empty_kept()
    y, H, steps = forward(problem, kept)
    return steps | backward(problem, kept, y, H)[1]


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
    def states(self) -> int:
        """N of a tile."""
        return triton.next_power_of_2(self.A.shape[1])

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return max(2, min(_TOKENS, _TILE // self.states))

    @property
    def channels(self) -> int:
        """Of a tile."""
        return min(_CHANNELS, triton.next_power_of_2(self.x.shape[2]))

    @property
    def blocks(self) -> int:
        """Of channels."""
        return triton.cdiv(self.x.shape[2], self.channels)

    @property
    def span(self) -> int:
        """Tokens of a piece."""
        tiles = triton.cdiv(self.x.shape[1], self.tokens)
        return self.tokens * tiles_of_a_piece(tiles, self.x.shape[0] * self.blocks, _PROGRAMS)

    @property
    def pieces(self) -> int:
        """Of time."""
        return triton.cdiv(self.x.shape[1], self.span)

    def new_empty(self, *shape: int) -> Tensor:
        """Room for numbers in the type that is computed in."""
        dtype = torch.float64 if self.x.dtype == torch.float64 else torch.float32
        return self.x.new_empty(shape, dtype=dtype)

    def empty_kept(self) -> Tensor:
        """Room for the states before each tile, (B, tiles, N, d)."""
        batch, length, width = self.x.shape
        return self.new_empty(batch, triton.cdiv(length, self.tokens), self.A.shape[1], width)

    def launch(self, kernel: Any, warps: int, **given: Any) -> Launch:
        """Return a launch of `kernel` on what is given, a program a piece of each sequence and block of channels."""
        batch, length, width = self.x.shape
        sizes = {"length": length, "span": self.span, "width": width, "N": self.A.shape[1]}
        sizes |= {"CHANNELS": self.channels, "STATES": self.states, "TOKENS": self.tokens}
        arguments = {**given, **sizes, "COMPUTE": COMPUTE.get(self.x.dtype, tl.float32)}
        return Launch(kernel, batch * self.pieces * self.blocks, min(warps, self.states), arguments)

    def between(
        self, values: Tensor, rows: Tensor, first: Tensor | None, last: Tensor | None, back: bool = False
    ) -> tuple[Tensor, dict[str, Launch]]:
        """Return states (B, pieces, d, N), not yet filled, and what fills them, by name.

        They are those before the pieces, from `first` to `last`, or, going `back`, what the later pieces owe.
        """
        products, ends = self.new_empty(2, self.x.shape[0], self.pieces, *self.A.shape)
        tensors = {"values": values, "delta": self.delta, "A": self.A, "rows": rows, "products": products, "ends": ends}
        launch, suffix = self.launch(kernels.ends, _WARPS, **tensors, BACK=back), ", back" if back else ""
        return ends, {f"ends{suffix}": launch, f"carry{suffix}": carry(products, ends, first, last, back)}


def forward(problem: Problem, kept: Tensor | None) -> tuple[Tensor, Tensor, dict[str, Launch]]:
    """Return y and the last H, not yet filled, and what fills them and `kept`, by name."""
    p, steps = problem, dict[str, Launch]()
    y, H = torch.empty_like(p.x), p.new_empty(p.x.shape[0], *p.A.shape)
    tensors = {**p._asdict(), "final": H}
    if p.pieces > 1:
        tensors["state"], steps = p.between(p.x, p.b, p.state, H)
        tensors["final"] = None
    return y, H, steps | {"forward": p.launch(kernels.forward, _WARPS, **tensors, y=y, kept=kept)}


class Gradients(NamedTuple):
    """Of x, delta and the state; of A and D for each piece, of b and c for each block of channels."""

    dx: Tensor
    ddelta: Tensor
    dA: Tensor
    db: Tensor
    dc: Tensor
    dD: Tensor
    dstate: Tensor | None


def backward(
    problem: Problem, kept: Tensor, grad_y: Tensor, grad_H: Tensor | None
) -> tuple[Gradients, dict[str, Launch]]:
    """Return gradients, not yet filled, and what fills them, by name."""
    batch, length, width = problem.x.shape
    N = problem.A.shape[1]
    gradients = Gradients(
        dx=torch.empty_like(problem.x),
        ddelta=torch.empty_like(problem.delta),
        dA=problem.new_empty(batch * problem.pieces, width, N),
        db=problem.new_empty(problem.blocks, batch, length, N),
        dc=problem.new_empty(problem.blocks, batch, length, N),
        dD=problem.new_empty(batch * problem.pieces, width),
        dstate=None if problem.state is None else torch.empty_like(problem.state),
    )
    tensors = {**problem._asdict(), **gradients._asdict(), "kept": kept, "grad_y": grad_y, "owed": grad_H}
    del tensors["state"]
    steps = dict[str, Launch]()
    if problem.pieces > 1:
        tensors["owed"], steps = problem.between(grad_y, problem.c, grad_H, gradients.dstate, back=True)
        tensors["dstate"] = None
    return gradients, steps | {"backward": problem.launch(kernels.backward, _WARPS_BACK, **tensors)}


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = Problem.of(*arguments)
        kept = problem.empty_kept()
        y, H, steps = forward(problem, kept)
        run_all(steps)
        ctx.save_for_backward(*problem, kept)
        ctx.set_materialize_grads(False)
        return y, H

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_H: Tensor | None) -> tuple[Tensor | None, ...]:
        *arguments, kept = ctx.saved_tensors
        problem = Problem(*arguments)
        grad_y = torch.zeros_like(problem.x) if grad_y is None else grad_y.contiguous()
        found, steps = backward(problem, kept, grad_y, None if grad_H is None else grad_H.contiguous())
        run_all(steps)
        dA, db, dc, dD = (
            part.sum(0).to(tensor.dtype)
            for part, tensor in zip((found.dA, found.db, found.dc, found.dD), problem[2:6], strict=True)
        )
        return found.dx, found.ddelta, dA, db, dc, dD, found.dstate
