"""The delta rule as a plain loop over tokens and their Householder steps."""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fpexp.ops.delta_rule`. S + k (beta (v - S^T k))^T costs one product less than the matrix I - beta k k^T."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    (batch, length, steps, heads, key), value = k.shape, v.shape[-1]
    with torch.autocast(v.device.type, enabled=False):
        output_dtype = v.dtype
        q, k, v, beta = (tensor.to(dtype) for tensor in (q, k, v, beta))
        S = q.new_zeros(batch, heads, key, value) if state is None else state.to(dtype)
        decays = [None] * length if log_decay is None else log_decay.to(dtype).exp()[..., None, None].unbind(1)
        ks, vs, betas = (
            tensor.flatten(1, 2).unsqueeze(-2).unbind(1) for tensor in (k, v, beta.unsqueeze(-1))
        )  # (B, heads, 1, .) a step
        outputs = []
        for t, (q_t, decay) in enumerate(zip(q.unsqueeze(-2).unbind(1), decays, strict=True)):
            if decay is not None:
                S = decay * S
            for i in range(t * steps, (t + 1) * steps):
                S = S + ks[i].mT * (betas[i] * (vs[i] - ks[i] @ S))
            outputs.append(q_t @ S)
        o = torch.stack(outputs, dim=1).squeeze(-2)
    return o.to(output_dtype), S
