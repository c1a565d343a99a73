"""The (gated) delta rule and its products: DeltaNet, Gated DeltaNet and DeltaProduct's recurrence of matrices."""

from __future__ import annotations

from torch import Tensor

from fpexp.ops import backend as backends
from fpexp.ops.shapes import check_shapes


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    state: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """For each head and token t: S <- exp(log_decay_t) S, then n Householder steps, then o_t = S^T q_t. Step i is

        S <- (I - beta_i k_i k_i^T) S + beta_i k_i v_i^T

    q: (B, T, heads, K); k: (B, T, n, heads, K); v: (B, T, n, heads, V); beta: (B, T, n, heads), in [0, 2] for k of
    length 1; log_decay: (B, T, heads), not above 0, none at all when None; state: (B, heads, K, V), zeros when None.
    n = 1 is the delta rule (Yang et al. 2024a), with a decay the gated one (Yang et al. 2024b, whose S is this one's
    transpose); n > 1 is DeltaProduct (Siems et al. 2025). Neither is k normalised here nor q scaled.

    Returns o (B, T, heads, V) in the type of v and the last S (B, heads, K, V). The state is float32, or float64 for
    float64 v. Every argument gets its gradient, also through S; only `reference` can be differentiated twice or
    forward. ValueError for shapes that do not fit; UserError for a `backend` that is not to be had.
    """
    _check_shapes(q, k, v, beta, log_decay, state)
    implementation = backends.load("delta_rule", v.device, backend)
    o, S = implementation.delta_rule(q, k, v, beta, log_decay, state)
    return o, S


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor | None
) -> None:
    if k.dim() != 5 or v.dim() != 5:
        raise ValueError(
            f"delta_rule: k (B, T, n, heads, K) and v (B, T, n, heads, V), not {tuple(k.shape)} and {tuple(v.shape)}"
        )
    (batch, length, steps, heads, key), value = k.shape, v.shape[-1]
    if not length or not steps:
        raise ValueError(f"delta_rule: at least one token and one step, not k {tuple(k.shape)}")
    shapes = {
        "q": (q, (batch, length, heads, key)),
        "v": (v, (batch, length, steps, heads, value)),
        "beta": (beta, (batch, length, steps, heads)),
        "log_decay": (log_decay, (batch, length, heads)),
        "state": (state, (batch, heads, key, value)),
    }
    check_shapes("delta_rule", shapes)
