"""What the numba kernels share: compilation, threads, and an exponential that vectorises."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

FASTMATH = {"contract", "reassoc", "nsz", "arcp"}
"""Sums may be reordered; NaN and infinity keep their meaning."""


def kernel(function: Any) -> Any:
    """Compile with threads and fast sums, cached on disk where a cache can be written."""
    return numba.njit(parallel=True, fastmath=FASTMATH, cache=True)(function)


def helper(function: Any) -> Any:
    """Compile a function that kernels call; it is inlined into them."""
    return numba.njit(fastmath=FASTMATH, cache=True)(function)


_MOST_THREADS = numba.get_num_threads()


def follow_torch_threads() -> None:
    """Let the kernels use as many threads as torch does."""
    numba.set_num_threads(min(torch.get_num_threads(), _MOST_THREADS))


@intrinsic
def _float_from_bits(typing_context, bits):
    def code(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), code


def exponential(x):
    """e^x. In float32 by range reduction and a polynomial (Cephes), within 2 ulp, which LLVM turns into SIMD code."""
    raise NotImplementedError("compiled code only")


@overload(exponential)
def _exponential(x):
    if x == types.float64:
        return lambda x: math.exp(x)
    if x == types.float32:
        return lambda x: _exponential_float32(x)
    return None


@helper
def _exponential_float32(x):
    clamped = min(max(x, np.float32(-87.3)), np.float32(88.0))
    k = np.floor(clamped * np.float32(1.44269504) + np.float32(0.5))
    r = clamped - k * np.float32(0.693359375)
    r = r + k * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    value = p * _float_from_bits((np.int32(k) + np.int32(127)) << np.int32(23))  # type: ignore[call-arg]
    value = np.float32(0) if x < np.float32(-87.3) else value
    value = np.float32(np.inf) if x > np.float32(88.0) else value
    return value if x == x else x
