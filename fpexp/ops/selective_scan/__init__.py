"""The selective scan of Mamba (Gu and Dao 2023), the sequence mixer of FP-Mamba (paper eq. 12)."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops import backend as backends
from fpexp.ops.shapes import check_shapes


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T;  y_t = H_t . c_t + D * x_t.

    x, delta: (B, T, d); A: (d, N), negative; b, c: (B, T, N); D: (d,); state: (B, d, N), zeros when None.
    Returns y (B, T, d) in the type of x and the last H (B, d, N). The state is float32, or float64 for float64 input,
    whatever the type of x. Every argument gets its gradient, also through H; only `reference` can be differentiated
    twice or forward. ValueError for shapes that do not fit; UserError for a `backend` that is not to be had.
    """
    _check_shapes(x, delta, A, b, c, D, state)
    implementation = backends.load("selective_scan", x.device, backend)
    y, H = implementation.selective_scan(x, delta, A, b, c, D, state)
    return y, H


def _check_shapes(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None) -> None:
    if x.dim() != 3 or A.dim() != 2:
        raise ValueError(f"selective_scan: x (B, T, d) and A (d, N), not {tuple(x.shape)} and {tuple(A.shape)}")
    (batch, length, d), size = x.shape, A.shape[1]
    shapes = {
        "delta": (delta, (batch, length, d)),
        "A": (A, (d, size)),
        "b": (b, (batch, length, size)),
        "c": (c, (batch, length, size)),
        "D": (D, (d,)),
        "state": (state, (batch, d, size)),
    }
    check_shapes("selective_scan", shapes)
