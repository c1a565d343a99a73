"""Both norms in one pass, without a temporary of the iterate's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from fpexp.ops.kernel import Kernel, compute_type, flat
from fpexp.ops.simd.cpu import LANES, absolute, at_least, get, lane_max, lane_sum, load, zeros


def distances(f_y: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.token_residual`. Half precision is compared in float32."""
    dtype = compute_type(torch.promote_types(f_y.dtype, y.dtype))
    f_y, y = f_y.to(dtype), y.to(dtype)
    difference, size = (f_y.new_empty(f_y.shape[:-1]) for _ in range(2))
    _norms.run(difference.numel(), f_y.numel(), f_y.shape[-1], *map(flat, (f_y, y, difference, size)))
    return difference, size


def _norms_of_tokens(first: int, last: int, width: int, f_y: Any, y: Any, difference: Any, size: Any) -> None:
    whole = width - width % LANES
    for token in range(first, last):
        start = token * width
        largest = distance = total = zeros(load(f_y, 0)) if whole else zeros(load(np.empty(LANES, f_y.dtype), 0))
        for j in range(start, start + whole, LANES):
            value = load(f_y, j)
            change = absolute(value - load(y, j))
            distance, largest, total = at_least(change, distance), at_least(absolute(value), largest), total + change
        far, size_of_token, any_nan = lane_max(distance), lane_max(largest), lane_sum(total)
        for j in range(start + whole, start + width):
            change = abs(get(f_y, j) - get(y, j))
            far, size_of_token, any_nan = max(far, change), max(size_of_token, abs(get(f_y, j))), any_nan + change
        nan = any_nan != any_nan  # a maximum may lose it
        difference[token] = np.nan if nan else far
        size[token] = np.nan if nan else size_of_token


_norms = Kernel(njit, _norms_of_tokens, nogil=True, error_model="numpy")
