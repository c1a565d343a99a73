"""SIMD vectors for numba kernels: LANES numbers of one type, in registers.

Arrays have one dimension and no index is checked. Kernels that use this module are compiled anew when it changes
(`fpexp.ops.kernel`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("NUMBA_DISABLE_JIT is set: numba does not compile")

LANES = 16  # one AVX-512 register of float32, two of AVX, four of NEON

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
def load(typing: Any, array: Any, start: Any) -> Any:
    """array[start : start + LANES]; `array` has one dimension, here and below, and no index is checked."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, alignment = _vector_place(context, builder, signature, arguments)
        return builder.load(place, align=alignment)

    return _VectorType(array.dtype)(array, types.intp), generate


@_intrinsic
def store(typing: Any, array: Any, start: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, alignment = _vector_place(context, builder, signature, arguments)
        builder.store(arguments[2], place, align=alignment)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), generate


@_intrinsic
def spread(typing: Any, array: Any, index: Any) -> Any:
    """array[index] in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, builder.load(_place(context, builder, signature, arguments)))

    return _VectorType(array.dtype)(array, types.intp), generate


@_intrinsic
def get(typing: Any, array: Any, index: Any) -> Any:
    """array[index], where a negative index does not count from the end: numba looks for one in every loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(context, builder, signature, arguments))

    return array.dtype(array, types.intp), generate


@_intrinsic
def put(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index] = value, as in `get`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _place(context, builder, signature, arguments))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


@_intrinsic
def broadcast(typing: Any, scalar: Any) -> Any:
    """A scalar in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _splat(builder, arguments[0])

    return _VectorType(scalar)(scalar), generate


@_intrinsic
def lane_sum(typing: Any, vector: Any) -> Any:
    """The sum of the lanes, as a tree."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalar = arguments[0].type.element
        name = f"llvm.vector.reduce.fadd.v{LANES}f{signature.return_type.bitwidth}"
        function_type = ir.FunctionType(scalar, [scalar, arguments[0].type])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, [ir.Constant(scalar, -0.0), arguments[0]], fastmath=("reassoc",))

    return vector.scalar(vector), generate


@_intrinsic
def lane_max(typing: Any, vector: Any) -> Any:
    """The largest lane; a NaN may be lost."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scalar = arguments[0].type.element
        name = f"llvm.vector.reduce.fmax.v{LANES}f{signature.return_type.bitwidth}"
        function_type = ir.FunctionType(scalar, [arguments[0].type])
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.call(function, [arguments[0]])

    return vector.scalar(vector), generate


def _constant(value: float, name: str) -> Any:
    @_intrinsic
    def constant(typing: Any, like: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return ir.Constant(arguments[0].type, [value] * LANES)

        return like(like), generate

    constant.__doc__ = f"A vector of {name} of the type of `like`."
    return constant


zeros = _constant(0.0, "zeros")
ones = _constant(1.0, "ones")


@_intrinsic
def _identity_above(typing: Any, vector: Any, otherwise: Any) -> Any:
    """v where v > 20, else `otherwise`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v, otherwise = arguments
        above = builder.fcmp_ordered(">", v, ir.Constant(v.type, [20.0] * LANES))
        return builder.select(above, v, otherwise)

    return vector(vector, vector), generate


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
_define(operator.truediv, _elementwise(lambda builder, a, b: builder.fdiv(a, b)))

# One instruction of x86 each; a lane that is NaN stays NaN.
at_least = _elementwise(lambda builder, a, low: builder.select(builder.fcmp_ordered("<", a, low), low, a))
at_most = _elementwise(lambda builder, a, high: builder.select(builder.fcmp_ordered(">", a, high), high, a))


_TAYLOR = tuple(1 / math.factorial(m) for m in range(13, 1, -1))
_EXP: dict[str, tuple[float, float, float, tuple[float, ...]]] = {
    "float32": (-88.0, 0.693359375, -2.12194440e-4, (1.381454e-3, 8.368745e-3, 4.166839e-2, 0.16666521, 0.49999994)),
    "float64": (-709.0, 0.693145751953125, 1.42860682030941723e-6, _TAYLOR),
}
"""Below which argument the result is 0; log 2 in two parts (Cephes); c_m to c_2 of exp r = 1 + r + c_2 r^2 + ...

The five coefficients for float32 minimise the largest relative error for |r| <= log(2) / 2, 3e-9; found by reweighted
least squares.
"""


def exp(vector: Any) -> Any:
    """e^v = 2^k e^r in each lane, k = round(v / log 2), within 0.9 ulp; exp(0) = 1, subnormal results may be 0."""
    raise NotImplementedError("for compiled code")


@overload(exp, strict=False)
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
        v = at_least(vector, broadcast(low))
        shifted = at_most(v * broadcast(per_log2) + broadcast(shift), broadcast(largest))
        k = shifted - broadcast(shift)
        r = v - k * broadcast(high_part) - k * broadcast(low_part)
        polynomial = broadcast(first)
        for coefficient in rest:
            polynomial = polynomial * r + broadcast(coefficient)
        return polynomial * _exponent_bits(shifted)

    return code


def _log1p(vector: Any) -> Any:
    """log(1 + v) = 2 artanh(v / (2 + v)) in each lane, for 0 <= v <= 1: the power series, where |artanh's| v <= 1/3."""
    raise NotImplementedError("for compiled code")


_ARTANH_TERMS = {"float32": 8, "float64": 17}
"""As many as leave out less than one rounding: 9^-8 / 17 and 9^-17 / 35."""


@overload(_log1p, strict=False)
def _log1p_of_vector(vector: Any) -> Any:
    real = np.dtype(str(vector.scalar)).type
    coefficients = tuple(real(2 / (2 * k + 1)) for k in range(_ARTANH_TERMS[str(vector.scalar)] - 1, -1, -1))
    first, rest = coefficients[0], coefficients[1:]

    def code(vector: Any) -> Any:
        t = vector / (vector + ones(vector) + ones(vector))
        square = t * t
        series = broadcast(first)
        for coefficient in rest:
            series = series * square + broadcast(coefficient)
        return series * t

    return code


@njit(error_model="numpy")
def absolute(vector: Any) -> Any:
    """|v| in each lane; a lane that is NaN stays NaN."""
    return at_least(vector, zeros(vector) - vector)


@njit(error_model="numpy")
def sigmoid(vector: Any) -> Any:
    """1 / (1 + e^-v) in each lane."""
    one = ones(vector)
    return one / (one + exp(zeros(vector) - vector))


@njit(error_model="numpy")
def softplus(vector: Any) -> Any:
    """log(1 + e^v) in each lane; v itself above 20, as torch has it."""
    zero = zeros(vector)
    return _identity_above(vector, at_least(vector, zero) + _log1p(exp(zero - absolute(vector))))


@njit(inline="always")
def aligned(count: int, like: Any) -> Any:
    """An uninitialised array that begins at a cache line."""
    array = np.empty(count + 64 // like.itemsize, like.dtype)
    start = (-array.ctypes.data % 64) // like.itemsize
    return array[start : start + count]


@njit(error_model="numpy")
def cleared(size: int, like: Any) -> Any:
    """An array of zeros that begins at a cache line."""
    array = aligned(size, like)
    array[:] = 0
    return array


@njit(error_model="numpy")
def copy(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """target[to : to + count] = source[at : at + count]; numba's own slices check for what cannot be."""
    whole_registers = count - count % LANES
    for i in range(0, whole_registers, LANES):
        store(target, to + i, load(source, at + i))
    for i in range(whole_registers, count):
        target[to + i] = source[at + i]


@njit(error_model="numpy")
def copy_padded(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """`copy`, and zeros to the end of the last register: whatever stood there is gone, NaN too."""
    if count % LANES:
        store(target, to + count - count % LANES, zeros(load(target, to)))
    copy(source, at, target, to, count)


@njit(error_model="numpy")
def accumulate(source: Any, at: int, target: Any, to: int, count: int) -> None:
    """target[to : to + count] += source[at : at + count]"""
    whole_registers = count - count % LANES
    for i in range(0, whole_registers, LANES):
        store(target, to + i, load(target, to + i) + load(source, at + i))
    for i in range(whole_registers, count):
        target[to + i] += source[at + i]


@njit(inline="always")
def read_tile(array: Any, start: int, N: int, tiles: Any, at: int) -> None:
    """Transpose array[start:], (LANES, N), into tiles[at:], (N, LANES)."""
    for lane in range(LANES):
        for n in range(N):
            tiles[at + n * LANES + lane] = array[start + lane * N + n]


@njit(inline="always")
def write_tile(tiles: Any, at: int, N: int, array: Any, start: int) -> None:
    for lane in range(LANES):
        for n in range(N):
            array[start + lane * N + n] = tiles[at + n * LANES + lane]
