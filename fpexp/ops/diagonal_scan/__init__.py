"""The diagonal linear recurrence, the sequence mixer of FP-RNN (paper sec. 3, eq. 8)."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops import backend as backends


def diagonal_scan(a: Tensor, x: Tensor, state: Tensor | None = None, backend: str = "auto") -> Tensor:
    """h_t = a_t * h_{t-1} + x_t.

    a, x: (B, T, d); state, h before the first token: (B, d), zeros when None. Returns h (B, T, d) in the type of x;
    the last state is h[:, -1]. Inside, h is float32, or float64 for float64 x, whatever the other types. Every argument
    gets its gradient; only `reference` can be differentiated twice or forward. ValueError for shapes that do not fit;
    UserError for a `backend` that is not to be had.
    """
    if x.dim() != 3 or a.shape != x.shape or not x.shape[1]:
        raise ValueError(f"diagonal_scan: a and x (B, T, d) with T >= 1, not {tuple(a.shape)} and {tuple(x.shape)}")
    if state is not None and state.shape != (x.shape[0], x.shape[2]):
        raise ValueError(f"diagonal_scan: state is {tuple(state.shape)}, not {(x.shape[0], x.shape[2])}")
    h: Tensor = backends.load("diagonal_scan", x.device, backend).diagonal_scan(a, x, state)
    return h
