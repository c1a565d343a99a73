"""Selective scan as a plain loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.selective_scan`. Time is unbound once: indexing it in the loop costs more than the arithmetic."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        output_dtype = x.dtype
        x, delta, A, b, c, D = (tensor.to(dtype) for tensor in (x, delta, A, b, c, D))
        H = x.new_zeros(x.shape[0], *A.shape) if state is None else state.to(dtype)
        outputs = []
        for delta_t, write_t, b_t, c_t in zip(
            delta.unbind(1), (delta * x).unbind(1), b.unbind(1), c.unbind(1), strict=True
        ):
            decay = torch.exp(delta_t.unsqueeze(-1) * A)
            H = torch.addcmul(write_t.unsqueeze(-1) * b_t.unsqueeze(1), decay, H)
            outputs.append((H @ c_t.unsqueeze(-1)).squeeze(-1))
        y = torch.stack(outputs, dim=1) + D * x
    return y.to(output_dtype), H
