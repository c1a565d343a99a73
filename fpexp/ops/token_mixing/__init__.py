"""All of one evaluation of FP-Mamba's f that stays inside a token, as one call with a gradient.

Its truth is `FPMambaProblem.terms` and `mix`; `cpu` is the same arithmetic without a temporary for each step of it.
"""

from __future__ import annotations

from torch import Tensor

from fpexp.ops.backend import choose
from fpexp.ops.mixers import Columns, KnownTokens, MixedTokens, MixerForm


def mix_tokens(
    from_x: Tensor,
    s: Tensor,
    weight: Tensor,
    x: Tensor,
    y: Tensor,
    columns: Columns,
    form: MixerForm | None,
    known: KnownTokens | None = None,
) -> MixedTokens | None:
    """Return what the scan takes; None where no kernel knows the mixer or the device.

    from_x (B, T, sum of columns.sizes); weight (sum of columns.from_s, d) multiplies s; s, x and y (B, T, d). Computed
    in float32, or float64 where x is. `known` is what a sweep has found at this y, which then is not computed again.
    """
    columns.check(from_x, weight, x, columns.sizes[1])
    if not x.shape == y.shape == s.shape:
        raise ValueError(f"x {tuple(x.shape)}, y {tuple(y.shape)} and s {tuple(s.shape)} must have the same shape")
    if form is None or choose("token_mixing", x.device) != "cpu":
        return None
    if known is not None and known.y.data_ptr() != y.data_ptr():
        raise ValueError("what a sweep has left is of another y")
    from fpexp.ops.token_mixing import cpu

    return cpu.mix_tokens(from_x, s, weight, x, y, columns, form, known)
