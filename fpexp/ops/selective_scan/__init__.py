"""The selective scan of Mamba (Gu and Dao 2023), the sequence mixer of FP-Mamba (paper eq. 12)."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops.selective_scan import reference


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T;  y_t = H_t . c_t + D * x_t.

    x, delta: (B, T, d); A: (d, N), negative; b, c: (B, T, N); D: (d,); state: (B, d, N), zeros when None.
    Returns y (B, T, d) in the type of x and the last H (B, d, N). The state is float32, or float64 for float64 input,
    whatever the type of x.
    """
    return reference.selective_scan(x, delta, A, b, c, D, state)
