"""The state-space duality scan of Mamba-2 (Dao and Gu 2024): one decay for each head and token."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops import backend as backends
from fpexp.ops.shapes import check_shapes


def ssd(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """H_t = exp(delta_t A) H_{t-1} + (delta_t x_t) b_t^T;  y_t = H_t c_t + D x_t, for each head.

    x: (B, T, heads, P), T >= 1; delta: (B, T, heads), not negative; A: (heads,), negative; b, c: (B, T, groups, N),
    each group read by heads / groups heads that follow one another; D: (heads,); state: (B, heads, P, N), zeros when
    None. Returns y (B, T, heads, P) in the type of x and the last H (B, heads, P, N). The state is float32, or float64
    for float64 input, whatever the type of x. Every argument gets its gradient, also through H; only `reference` can
    be differentiated twice or forward. ValueError for shapes that do not fit; UserError for a `backend` that is not to
    be had.
    """
    _check_shapes(x, delta, A, b, c, D, state)
    implementation = backends.load("ssd", x.device, backend)
    y, H = implementation.ssd(x, delta, A, b, c, D, state)
    return y, H


def _check_shapes(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor | None) -> None:
    if x.dim() != 4 or b.dim() != 4 or x.shape[1] == 0:
        raise ValueError(
            f"ssd: x (B, T, heads, P) and b (B, T, groups, N) with T >= 1, not {tuple(x.shape)} and {tuple(b.shape)}"
        )
    (batch, length, heads, head_size), (groups, size) = x.shape, b.shape[2:]
    if groups == 0 or heads % groups:
        raise ValueError(f"ssd: {heads} heads are not a multiple of {groups} groups")
    shapes = {
        "delta": (delta, (batch, length, heads)),
        "A": (A, (heads,)),
        "b": (b, (batch, length, groups, size)),
        "c": (c, (batch, length, groups, size)),
        "D": (D, (heads,)),
        "state": (state, (batch, heads, head_size, size)),
    }
    check_shapes("ssd", shapes)
