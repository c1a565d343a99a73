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

import math
import operator
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model
from torch import Tensor
from torch.nn import functional

from fpexp.ops.kernel import Kernel

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba does not compile")

LANES = 16  # one AVX-512 register of float32, two of AVX, four of NEON

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
    dtype = torch.float64 if output_dtype == torch.float64 else torch.float32
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
        return (*sizes, *map(_flat, tensors))

    def empty_checkpoints(self) -> Tensor:
        """Room for the state before each chunk but the first."""
        inner = max(0, (self.length - 1) // self.chunk)
        return self.x.new_empty(self.batch, inner, self.blocks, self.N, LANES)


def _flat(tensor: Tensor) -> Any:
    return tensor.detach().view(-1).numpy()


def _scan(problem: _Problem, checkpoints: Tensor | None) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(problem.x)
    H = problem.x.new_empty(problem.batch, problem.width, problem.N)
    kept = problem.x.new_empty(0) if checkpoints is None else checkpoints
    _forward.run(problem.tasks, problem.work, *problem.arguments(), _flat(y), _flat(H), _flat(kept))
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
            *map(_flat, (checkpoints, grad_y, grad_H)),
            *map(_flat, results),
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
    _sum.run(outer * runs, parts.numel(), runs, rows, columns, _flat(parts), _flat(total))
    return total


# Vectors. They are registers to LLVM, which would otherwise have to prove, for arrays, that none overlaps another.


_intrinsic: Any = intrinsic  # mypy takes the functions for what they are in Python


class _VectorType(types.Type):
    """LANES numbers of one type."""

    def __init__(self, scalar: Any) -> None:
        self.scalar = scalar
        super().__init__(name=f"Vector({scalar}, {LANES})")


@register_model(_VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _VectorType) -> None:
        scalar = manager.lookup(vector.scalar).get_value_type()
        super().__init__(manager, vector, ir.VectorType(scalar, LANES))


def _place(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _vector_place(context: Any, builder: Any, signature: Any, arguments: Any) -> tuple[Any, int]:
    scalar = signature.args[0].dtype
    vector = context.get_value_type(_VectorType(scalar))
    return builder.bitcast(_place(context, builder, signature, arguments), vector.as_pointer()), scalar.bitwidth // 8


def _splat(builder: Any, scalar: Any) -> Any:
    vector, index = ir.VectorType(scalar.type, LANES), ir.IntType(32)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(index, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(index, LANES), [0] * LANES))


@_intrinsic
def _load(typing: Any, array: Any, start: Any) -> Any:
    """array[start : start + LANES]; `array` has one dimension, here and below, and no index is checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, alignment = _vector_place(context, builder, signature, arguments)
        return builder.load(place, align=alignment)

    return _VectorType(array.dtype)(array, types.intp), generate


@_intrinsic
def _store(typing: Any, array: Any, start: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, alignment = _vector_place(context, builder, signature, arguments)
        builder.store(arguments[2], place, align=alignment)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@_intrinsic
def _spread(typing: Any, array: Any, index: Any) -> Any:
    """array[index] in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, builder.load(_place(context, builder, signature, arguments)))

    return _VectorType(array.dtype)(array, types.intp), generate


@_intrinsic
def _broadcast(typing: Any, scalar: Any) -> Any:
    """A scalar in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return _VectorType(scalar)(scalar), generate


@_intrinsic
def _lane_sum(typing: Any, vector: Any) -> Any:
    """The sum of the lanes, as a tree."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalar = arguments[0].type.element
        name = f"llvm.vector.reduce.fadd.v{LANES}f{signature.return_type.bitwidth}"
        function_type = ir.FunctionType(scalar, [scalar, arguments[0].type])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, [ir.Constant(scalar, -0.0), arguments[0]], fastmath=("reassoc",))

    return vector.scalar(vector), generate


@_intrinsic
def _exponent_bits(typing: Any, vector: Any) -> Any:
    """Shift the last bits of each lane to where the exponent is."""
    bits, mantissa = vector.scalar.bitwidth, np.finfo(str(vector.scalar)).nmant

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integers = ir.VectorType(ir.IntType(bits), LANES)
        shifts = ir.Constant(integers, [mantissa] * LANES)
        return builder.bitcast(builder.shl(builder.bitcast(arguments[0], integers), shifts), arguments[0].type)

    return vector(vector), generate


def _elementwise(instructions: Callable[[Any, Any, Any], Any]) -> Any:
    @_intrinsic
    def operation(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return instructions(builder, *arguments)

        return a(a, a), generate

    return operation


def _define(symbol: Callable[[Any, Any], Any], operation: Any) -> None:
    @overload(symbol, strict=False)
    def for_vectors(a: Any, b: Any) -> Any:
        if isinstance(a, _VectorType) and isinstance(b, _VectorType):
            return lambda a, b: operation(a, b)
        return None


# "contract": a product may go into the sum that follows unrounded; NaN and infinity keep their meaning.
_define(operator.add, _elementwise(lambda builder, a, b: builder.fadd(a, b, flags=("contract",))))
_define(operator.sub, _elementwise(lambda builder, a, b: builder.fsub(a, b, flags=("contract",))))
_define(operator.mul, _elementwise(lambda builder, a, b: builder.fmul(a, b, flags=("contract",))))

# One instruction of x86 each; a lane that is NaN stays NaN.
_at_least = _elementwise(lambda builder, a, low: builder.select(builder.fcmp_ordered("<", a, low), low, a))
_at_most = _elementwise(lambda builder, a, high: builder.select(builder.fcmp_ordered(">", a, high), high, a))


_TAYLOR = tuple(1 / math.factorial(m) for m in range(13, 1, -1))
_EXP: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "float32": (-88.0, 0.693359375, -2.12194440e-4, (1.381454e-3, 8.368745e-3, 4.166839e-2, 0.16666521, 0.49999994)),
    "float64": (-709.0, 0.693145751953125, 1.42860682030941723e-6, _TAYLOR),
}
"""Below which argument the result is 0; log 2 in two parts (Cephes); c_m to c_2 of exp r = 1 + r + c_2 r^2 + ...

The five coefficients for float32 minimise the largest relative error for |r| <= log(2) / 2, 3e-9; found by reweighted
least squares.
"""


def _exp(vector: Any) -> Any:
    """e^v = 2^k e^r in each lane, k = round(v / log 2), within 0.9 ulp; exp(0) = 1, subnormal results may be 0."""
    raise NotImplementedError("for compiled code")


@overload(_exp, strict=False)
def _exp_of_vector(vector: Any) -> Any:
    real = np.dtype(str(vector.scalar)).type
    info = np.finfo(real)
    low, high_part, low_part, coefficients = _EXP[str(vector.scalar)]
    bias = info.maxexp - 1
    # v / log 2 + shift has k + bias in its last bits: rounded there by the addition, and the exponent of 2^k.
    shift = real(1.5 * 2.0**info.nmant + bias)
    largest = real(shift + bias)
    low, high_part, low_part, per_log2 = real(low), real(high_part), real(low_part), real(1 / math.log(2))
    first, *others = (real(value) for value in (*coefficients, 1, 1))
    rest = tuple(others)

    def code(vector: Any) -> Any:
        v = _at_least(vector, _broadcast(low))
        shifted = _at_most(v * _broadcast(per_log2) + _broadcast(shift), _broadcast(largest))
        k = shifted - _broadcast(shift)
        r = v - k * _broadcast(high_part) - k * _broadcast(low_part)
        polynomial = _broadcast(first)
        for coefficient in rest:
            polynomial = polynomial * r + _broadcast(coefficient)
        return polynomial * _exponent_bits(shifted)

    return code


# Kernels. Arrays have one dimension, offsets are 64-bit; `tile` = N * LANES is what one block's state takes.


@njit(inline="always")
def _aligned(count: int, like: Any) -> Any:
    """An uninitialised array that begins at a cache line."""
    array = np.empty(count + 64 // like.itemsize, like.dtype)
    start = (-array.ctypes.data % 64) // like.itemsize
    return array[start : start + count]


@njit(inline="always")
def _read_tile(array: Any, start: int, N: int, tiles: Any, at: int) -> None:
    """Transpose array[start:], (LANES, N), into tiles[at:], (N, LANES)."""
    for lane in range(LANES):
        for n in range(N):
            tiles[at + n * LANES + lane] = array[start + lane * N + n]


@njit(inline="always")
def _write_tile(tiles: Any, at: int, N: int, array: Any, start: int) -> None:
    for lane in range(LANES):
        for n in range(N):
            array[start + lane * N + n] = tiles[at + n * LANES + lane]


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
    H = _aligned(tile, x)
    for task in range(first, last):
        sequence, group = task // groups, task % groups
        for block in range(group * blocks // groups, (group + 1) * blocks // groups):
            start, rate = block * LANES, block * tile
            state_start = (sequence * width + start) * N
            if state.size:
                _read_tile(state, state_start, N, H, 0)
            else:
                H[:] = 0
            skip = _load(D, start)
            for t in range(length):
                if checkpoints.size and t > 0 and t % chunk == 0:
                    kept = ((sequence * inner + t // chunk - 1) * blocks + block) * tile
                    for i in range(0, tile, LANES):
                        _store(checkpoints, kept + i, _load(H, i))
                token = sequence * length + t
                step, x_t = _load(delta, token * width + start), _load(x, token * width + start)
                write, out = step * x_t, skip * x_t
                for n in range(N):
                    i = n * LANES
                    h = _exp(step * _load(A, rate + i)) * _load(H, i) + write * _spread(b, token * N + n)
                    _store(H, i, h)
                    out = out + h * _spread(c, token * N + n)
                _store(y, token * width + start, out)
            _write_tile(H, 0, N, final, state_start)


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
    H = _aligned(tile, x)
    adjoint = _aligned(((blocks + groups - 1) // groups) * tile, x)
    decays, decayed = _aligned(chunk * tile, x), _aligned(chunk * tile, x)  # exp(delta_t A), and that times H_{t-1}
    db_lanes, dc_lanes = _aligned(chunk * tile, x), _aligned(chunk * tile, x)  # not yet summed over the lanes
    for task in range(first, last):
        sequence, group = task // groups, task % groups
        first_block, last_block = group * blocks // groups, (group + 1) * blocks // groups
        dA_start = sequence * blocks * tile
        for block in range(first_block, last_block):
            start = block * LANES
            for i in range(0, tile, LANES):
                _store(dA, dA_start + block * tile + i, _broadcast(x.dtype.type(0)))
                _store(adjoint, (block - first_block) * tile + i, _broadcast(x.dtype.type(0)))
            _store(dD, sequence * width + start, _broadcast(x.dtype.type(0)))
            if grad_final.size:
                _read_tile(grad_final, (sequence * width + start) * N, N, adjoint, (block - first_block) * tile)
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
                        _store(H, i, _load(checkpoints, kept + i))
                elif state.size:
                    _read_tile(state, (sequence * width + start) * N, N, H, 0)
                else:
                    H[:] = 0
                for k in range(size):
                    token = sequence * length + begin + k
                    at = token * width + start
                    step, gy = _load(delta, at), _load(grad_y, at)
                    write = step * _load(x, at)
                    for n in range(N):
                        i, j = n * LANES, (k * N + n) * LANES
                        decay = _exp(step * _load(A, rate + i))
                        before = decay * _load(H, i)
                        h = before + write * _spread(b, token * N + n)
                        _store(H, i, h)
                        _store(decays, j, decay)
                        _store(decayed, j, before)
                        _store(dc_lanes, j, _load(dc_lanes, j) + h * gy)
                skip, dD_sum = _load(D, start), _load(dD, sequence * width + start)
                for k in range(size - 1, -1, -1):
                    token = sequence * length + begin + k
                    at = token * width + start
                    step, x_t, gy = _load(delta, at), _load(x, at), _load(grad_y, at)
                    write = step * x_t
                    dD_sum = dD_sum + gy * x_t
                    through_b = through_decay = _broadcast(x.dtype.type(0))
                    for n in range(N):
                        i, j = n * LANES, (k * N + n) * LANES
                        g = _load(adjoint, G + i) + gy * _spread(c, token * N + n)
                        grad_exponent = g * _load(decayed, j)
                        through_b = through_b + g * _spread(b, token * N + n)
                        through_decay = through_decay + grad_exponent * _load(A, rate + i)
                        _store(dA, dA_start + rate + i, _load(dA, dA_start + rate + i) + grad_exponent * step)
                        _store(db_lanes, j, _load(db_lanes, j) + g * write)
                        _store(adjoint, G + i, g * _load(decays, j))
                    _store(dx, at, step * through_b + skip * gy)
                    _store(ddelta, at, x_t * through_b + through_decay)
                _store(dD, sequence * width + start, dD_sum)
            row = ((sequence * groups + group) * length + begin) * N
            for i in range(size * N):
                db[row + i] = _lane_sum(_load(db_lanes, i * LANES))
                dc[row + i] = _lane_sum(_load(dc_lanes, i * LANES))
        if dstate.size:
            for block in range(first_block, last_block):
                at = (block - first_block) * tile
                _write_tile(adjoint, at, N, dstate, (sequence * width + block * LANES) * N)


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
