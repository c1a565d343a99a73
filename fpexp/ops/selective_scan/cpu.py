"""The selective scan in numba: LANES channels at a time in SIMD registers, forward and backward by hand.

A task is one sequence and a group of blocks of LANES channels. In a block the state is a tile (N, LANES), so that
b and c are scalars to a row, y and the gradients of x and delta need no sum across lanes, and the inner loop over N is

    decay = exp(delta * A[n]);  H[n] = decay * H[n] + write * b[n];  y += H[n] * c[n]

The backward keeps no state but one tile each `chunk` tokens (B * T * d * N / chunk numbers). From there it computes
a chunk again, keeping decay_t and decay_t * H_{t-1} in a scratch that fits the cache, and runs the adjoint

    G_t = decay_{t+1} * G_{t+1} + grad_y_t c_t^T

back over it. What is summed over channels (b, c) or over sequences (A, D) is summed within a task first and then in a
fixed order, so that no result depends on the number of threads.

Roofline, for 16 steps of the B T d N in float32, counted in the AVX-512 code: forward 18 arithmetic instructions, 14 of
them exp, 4 loads and 1 store; backward 25, 12 and 7. Main memory sees x, delta, y, their gradients and the kept tiles:
4 (8 + 2 N / chunk) B T d bytes, there and back. Measured for B 8, T 512, d 256, N 16 on one core of a Zen 5 at
4.25 GHz, which does a multiply-add in 0.118 ns: forward 2.7 ms, where the arithmetic takes 2.2 and exp alone, from L1,
takes 1.6; backward 7.5 ms, where the arithmetic takes 3.1. The profile has the rest at loads and stores, a sixth of the
time where x, delta and grad_y are touched first.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.simd.cpu import LANES, aligned, broadcast, exp, lane_sum, load, read_tile, spread, store, write_tile

_TASKS = 32  # at least, where the shape allows: work for as many threads


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.selective_scan`. Channels are padded with zeros to whole blocks."""
    output_dtype, width = x.dtype, x.shape[2]
    dtype = compute_type(output_dtype)
    x, delta, A, b, c, D = (tensor.to(dtype) for tensor in (x, delta, A, b, c, D))
    state = None if state is None else state.to(dtype)
    padding = -width % LANES
    if padding:
        x, delta, D = (functional.pad(tensor, (0, padding)) for tensor in (x, delta, D))
        A = functional.pad(A, (0, 0, 0, padding))
        state = None if state is None else functional.pad(state, (0, 0, 0, padding))
    arguments = (x, delta, A, b, c, D, state)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in arguments):
        y, H = cast(tuple[Tensor, Tensor], _SelectiveScan.apply(*arguments))
    else:
        y, H = _scan(_Problem.of(*arguments), checkpoints=None)
    if padding:
        y, H = y[..., :width].contiguous(), H[:, :width].contiguous()
    return y.to(output_dtype), H


class _Problem:
    """The arguments, contiguous, and the sizes that the kernels ask for.

    `A` is in tiles (blocks, N, LANES); an empty `state` stands for zeros. `groups` of blocks of channels a sequence
    are tasks of their own, as few as make `_TASKS` tasks, and so few that B * T * groups * N stays below B * T * d.
    """

    def __init__(self, x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor) -> None:
        self.x, self.delta, self.A, self.b, self.c, self.D, self.state = x, delta, A, b, c, D, state
        self.batch, self.length, self.width = x.shape
        self.blocks, self.N = A.shape[:2]
        self.chunk = max(16, self.N // 4)
        wanted = max(1, _TASKS // max(1, self.batch))
        self.groups = max(1, min(wanted, self.blocks, self.width // self.N))
        self.tasks = self.batch * self.groups
        self.work = x.numel() * self.N

    @classmethod
    def of(cls, x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None) -> _Problem:
        """Bring the arguments of the op into the order in memory that the kernels read."""
        tiles = A.unflatten(0, (-1, LANES)).transpose(1, 2)
        state = x.new_empty(0) if state is None else state
        tensors = (x, delta, tiles, b, c, D, state)
        return cls(*(tensor.contiguous() for tensor in tensors))

    def arguments(self) -> tuple[Any, ...]:
        """What both kernels take first: sizes, then the arguments of the op without dimensions."""
        tensors = (self.x, self.delta, self.A, self.b, self.c, self.D, self.state)
        sizes = (self.groups, self.chunk, self.length, self.width, self.N)
        return (*sizes, *map(flat, tensors))

    def empty_checkpoints(self) -> Tensor:
        """Room for the state before each chunk but the first."""
        inner = max(0, (self.length - 1) // self.chunk)
        return self.x.new_empty(self.batch, inner, self.blocks, self.N, LANES)


def _scan(problem: _Problem, checkpoints: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(problem.x)
    H = problem.x.new_empty(problem.batch, problem.width, problem.N)
    kept = problem.x.new_empty(0) if checkpoints is None else checkpoints
    _forward.run(problem.tasks, problem.work, *problem.arguments(), flat(y), flat(H), flat(kept))
    return y, H


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        problem = _Problem.of(*arguments)
        checkpoints = problem.empty_checkpoints()
        y, H = _scan(problem, checkpoints)
        p = problem
        ctx.save_for_backward(p.x, p.delta, p.A, p.b, p.c, p.D, p.state, checkpoints)
        ctx.set_materialize_grads(False)
        return y, H

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor | None, grad_H: Tensor | None) -> tuple[Tensor | None, ...]:
        *arguments, checkpoints = ctx.saved_tensors
        problem = _Problem(*arguments)
        x, D = problem.x, problem.D
        batch, length, width, N = problem.batch, problem.length, problem.width, problem.N
        grad_y = torch.zeros_like(x) if grad_y is None else grad_y.contiguous()
        grad_H = x.new_empty(0) if grad_H is None else grad_H.contiguous()
        dx, ddelta = torch.empty_like(x), torch.empty_like(x)
        dA, dD = x.new_empty(batch, *problem.A.shape), x.new_empty(batch, width)
        db, dc = (x.new_empty(batch, problem.groups, length, N) for _ in range(2))
        dstate = x.new_empty(batch, width, N) if ctx.needs_input_grad[6] else x.new_empty(0)
        results = (dx, ddelta, dA, db, dc, dD, dstate)
        _backward.run(
            problem.tasks,
            problem.work,
            *problem.arguments(),
            *map(flat, (checkpoints, grad_y, grad_H)),
            *map(flat, results),
        )
        dA = _sum_rows(dA.flatten(1)[None], problem.A.shape).transpose(1, 2).flatten(0, 1)
        db, dc = (_sum_rows(part.flatten(2), problem.b.shape) for part in (db, dc))
        return dx, ddelta, dA, db, dc, _sum_rows(dD[None], D.shape), dstate if ctx.needs_input_grad[6] else None


def _sum_rows(parts: Tensor, shape: torch.Size) -> Tensor:
    """Sum `parts` (outer, rows, columns) over the rows in order, in float64."""
    outer, rows, columns = parts.shape
    if rows == 1:
        return parts.view(shape)
    total = parts.new_empty(shape)
    runs = max(1, columns // 1024)
    _sum.run(outer * runs, parts.numel(), runs, rows, columns, flat(parts), flat(total))
    return total


# Kernels. Arrays have one dimension, offsets are 64-bit; `tile` = N * LANES is what one block's state takes.


def _forward_loop(
    first: int,
    last: int,
    groups: int,
    chunk: int,
    length: int,
    width: int,
    N: int,
    x: Any,
    delta: Any,
    A: Any,
    b: Any,
    c: Any,
    D: Any,
    state: Any,
    y: Any,
    final: Any,
    checkpoints: Any,
) -> None:
    """Fill y and final, and, unless it is empty, `checkpoints` (B, chunks - 1, blocks, N, LANES)."""
    blocks, tile, inner = width // LANES, N * LANES, (length - 1) // chunk
    H = aligned(tile, x)
    for task in range(first, last):
        sequence, group = task // groups, task % groups
        for block in range(group * blocks // groups, (group + 1) * blocks // groups):
            start, rate = block * LANES, block * tile
            state_start = (sequence * width + start) * N
            if state.size:
                read_tile(state, state_start, N, H, 0)
            else:
                H[:] = 0
            skip = load(D, start)
            for t in range(length):
                if checkpoints.size and t > 0 and t % chunk == 0:
                    kept = ((sequence * inner + t // chunk - 1) * blocks + block) * tile
                    for i in range(0, tile, LANES):
                        store(checkpoints, kept + i, load(H, i))
                token = sequence * length + t
                step, x_t = load(delta, token * width + start), load(x, token * width + start)
                write, out = step * x_t, skip * x_t
                for n in range(N):
                    i = n * LANES
                    h = exp(step * load(A, rate + i)) * load(H, i) + write * spread(b, token * N + n)
                    store(H, i, h)
                    out = out + h * spread(c, token * N + n)
                store(y, token * width + start, out)
            write_tile(H, 0, N, final, state_start)


def _backward_loop(
    first: int,
    last: int,
    groups: int,
    chunk: int,
    length: int,
    width: int,
    N: int,
    x: Any,
    delta: Any,
    A: Any,
    b: Any,
    c: Any,
    D: Any,
    state: Any,
    checkpoints: Any,
    grad_y: Any,
    grad_final: Any,
    dx: Any,
    ddelta: Any,
    dA: Any,
    db: Any,
    dc: Any,
    dD: Any,
    dstate: Any,
) -> None:
    """Fill dx, ddelta; of each sequence dA (B, blocks, N, LANES) and dD (B, d); of each group db, dc; dstate.

    `grad_final` is empty where nothing came back through it, `dstate` where nobody asks for it. A block of channels
    goes through a chunk twice: forward, which also makes dc, and back.
    """
    blocks, tile, inner = width // LANES, N * LANES, (length - 1) // chunk
    H = aligned(tile, x)
    adjoint = aligned(((blocks + groups - 1) // groups) * tile, x)
    decays, decayed = aligned(chunk * tile, x), aligned(chunk * tile, x)  # exp(delta_t A), and that times H_{t-1}
    db_lanes, dc_lanes = aligned(chunk * tile, x), aligned(chunk * tile, x)  # not yet summed over the lanes
    for task in range(first, last):
        sequence, group = task // groups, task % groups
        first_block, last_block = group * blocks // groups, (group + 1) * blocks // groups
        dA_start = sequence * blocks * tile
        for block in range(first_block, last_block):
            start = block * LANES
            for i in range(0, tile, LANES):
                store(dA, dA_start + block * tile + i, broadcast(x.dtype.type(0)))
                store(adjoint, (block - first_block) * tile + i, broadcast(x.dtype.type(0)))
            store(dD, sequence * width + start, broadcast(x.dtype.type(0)))
            if grad_final.size:
                read_tile(grad_final, (sequence * width + start) * N, N, adjoint, (block - first_block) * tile)
        for part in range(inner, -1, -1):
            begin = part * chunk
            size = min(chunk, length - begin)
            db_lanes[:] = 0
            dc_lanes[:] = 0
            for block in range(first_block, last_block):
                start, rate, G = block * LANES, block * tile, (block - first_block) * tile
                if part > 0:
                    kept = ((sequence * inner + part - 1) * blocks + block) * tile
                    for i in range(0, tile, LANES):
                        store(H, i, load(checkpoints, kept + i))
                elif state.size:
                    read_tile(state, (sequence * width + start) * N, N, H, 0)
                else:
                    H[:] = 0
                for k in range(size):
                    token = sequence * length + begin + k
                    at = token * width + start
                    step, gy = load(delta, at), load(grad_y, at)
                    write = step * load(x, at)
                    for n in range(N):
                        i, j = n * LANES, (k * N + n) * LANES
                        decay = exp(step * load(A, rate + i))
                        before = decay * load(H, i)
                        h = before + write * spread(b, token * N + n)
                        store(H, i, h)
                        store(decays, j, decay)
                        store(decayed, j, before)
                        store(dc_lanes, j, load(dc_lanes, j) + h * gy)
                skip, dD_sum = load(D, start), load(dD, sequence * width + start)
                for k in range(size - 1, -1, -1):
                    token = sequence * length + begin + k
                    at = token * width + start
                    step, x_t, gy = load(delta, at), load(x, at), load(grad_y, at)
                    write = step * x_t
                    dD_sum = dD_sum + gy * x_t
                    through_b = through_decay = broadcast(x.dtype.type(0))
                    for n in range(N):
                        i, j = n * LANES, (k * N + n) * LANES
                        g = load(adjoint, G + i) + gy * spread(c, token * N + n)
                        grad_exponent = g * load(decayed, j)
                        through_b = through_b + g * spread(b, token * N + n)
                        through_decay = through_decay + grad_exponent * load(A, rate + i)
                        store(dA, dA_start + rate + i, load(dA, dA_start + rate + i) + grad_exponent * step)
                        store(db_lanes, j, load(db_lanes, j) + g * write)
                        store(adjoint, G + i, g * load(decays, j))
                    store(dx, at, step * through_b + skip * gy)
                    store(ddelta, at, x_t * through_b + through_decay)
                store(dD, sequence * width + start, dD_sum)
            row = ((sequence * groups + group) * length + begin) * N
            for i in range(size * N):
                db[row + i] = lane_sum(load(db_lanes, i * LANES))
                dc[row + i] = lane_sum(load(dc_lanes, i * LANES))
        if dstate.size:
            for block in range(first_block, last_block):
                at = (block - first_block) * tile
                write_tile(adjoint, at, N, dstate, (sequence * width + block * LANES) * N)


def _sum_loop(first: int, last: int, runs: int, rows: int, columns: int, parts: Any, total: Any) -> None:
    """total (outer, columns) = sum over rows of parts (outer, rows, columns); a task is one of `runs` of columns."""
    for task in range(first, last):
        outer, run = task // runs, task % runs
        begin, end = run * columns // runs, (run + 1) * columns // runs
        sums = np.zeros(end - begin, np.float64)
        for row in range(rows):
            at = (outer * rows + row) * columns + begin
            for i in range(end - begin):
                sums[i] += parts[at + i]
        for i in range(end - begin):
            total[outer * columns + begin + i] = sums[i]


_forward = Kernel(njit, _forward_loop, nogil=True, error_model="numpy")
_backward = Kernel(njit, _backward_loop, nogil=True, error_model="numpy")
_sum = Kernel(njit, _sum_loop, nogil=True, error_model="numpy")
