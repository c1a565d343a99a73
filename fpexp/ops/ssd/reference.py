"""SSD as a plain loop over tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def ssd(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.ssd`. Time is unbound once: indexing it in the loop costs more than the arithmetic."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        output_dtype, heads_of_group = x.dtype, x.shape[2] // b.shape[2]
        x, delta, A, b, c, D = (tensor.to(dtype) for tensor in (x, delta, A, b, c, D))
        b, c = (tensor.repeat_interleave(heads_of_group, dim=2) for tensor in (b, c))
        H = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[-1]) if state is None else state.to(dtype)
        decay, write = torch.exp(delta * A), delta.unsqueeze(-1) * x
        outputs = []
        for decay_t, write_t, b_t, c_t in zip(decay.unbind(1), write.unbind(1), b.unbind(1), c.unbind(1), strict=True):
            H = torch.addcmul(write_t.unsqueeze(-1) * b_t.unsqueeze(-2), decay_t[..., None, None], H)
            outputs.append((H * c_t.unsqueeze(-2)).sum(-1))  # a product's backward would follow a caller's autocast
        y = torch.stack(outputs, dim=1) + D.unsqueeze(-1) * x
    return y.to(output_dtype), H
