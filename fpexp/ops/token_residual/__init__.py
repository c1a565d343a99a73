"""How far an iterate is from its image, token by token, in one pass over both."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops.backend import load


def distances(f_y: Tensor, y: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Return |f(y)_t - y_t|_inf and |f(y)_t|_inf of each token, (B, T) each; f_y and y are (B, T, d).

    A token with a NaN has NaN. ValueError where the shapes differ.
    """
    if f_y.shape != y.shape:
        raise ValueError(f"an iterate {tuple(y.shape)} and its image {tuple(f_y.shape)} must have the same shape")
    difference, size = load("token_residual", y.device, backend).distances(f_y, y)
    return difference, size
