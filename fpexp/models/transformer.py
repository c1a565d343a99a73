"""A causal Transformer with rotary positions: the lower bound of the paper's figure 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.errors import UserError
from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.blocks import residual_model
from fpexp.models.lm import LanguageModel, SequenceLayer
from fpexp.models.sizes import check_divides
from fpexp.ops.kernel import compute_type
from fpexp.ranges import Count, Depth, NonNegative, Probability, Range


@dataclass(frozen=True)
class Carried:
    """The tokens so far: rotated keys and values (B, heads, T, d_model / heads). It grows with them."""

    keys: Tensor
    values: Tensor


class Attention(SequenceLayer):
    """Causal softmax attention with rotary positions (Su et al. 2021), (B, T, d_model) -> (B, T, d_model)."""

    def __init__(self, d_model: int, heads: int, rope_base: float) -> None:
        super().__init__()
        self.heads, self.rope_base = heads, rope_base
        self.output_size = d_model
        self.in_projection = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out_projection = nn.Linear(d_model, d_model, bias=False)

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the output; padding on the right is behind every real token, which does not see it."""
        return self._attend(u, None)[0], ()

    def decode(self, u: Tensor, state: Carried | None) -> tuple[Tensor, tuple[SolveResult, ...], Carried]:
        """Return the output, no solves, and the keys and values of all tokens."""
        output, state = self._attend(u, state)
        return output, (), Carried(state.keys, state.values.contiguous())  # not a view of the whole projection

    def _attend(self, u: Tensor, state: Carried | None) -> tuple[Tensor, Carried]:
        q, k, v = self.in_projection(u).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        before = 0 if state is None else state.keys.shape[2]
        q, k = (rotate(x, before, self.rope_base) for x in (q, k))
        seen = None
        if state is not None:
            k, v = torch.cat([state.keys, k], dim=2), torch.cat([state.values, v], dim=2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=u.device).tril(before)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None)
        return self.out_projection(y.transpose(1, 2).flatten(2)), Carried(k, v)


def rotate(x: Tensor, first: int, base: float) -> Tensor:
    """Turn the pairs (x_i, x_{i + K/2}) of x (B, heads, T, K) by t / base^(2i / K), t counted from `first`."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    position = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float64)
    angle = torch.outer(position, frequency)
    dtype = compute_type(x.dtype)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    left, right = x.to(dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


def transformer(
    vocabulary_size: int,
    *,
    d_model: Count,
    layers: Depth,
    heads: Count,
    rope_base: Annotated[float, Range(minimum=1)],
    mlp_expand: NonNegative,
    dropout: Probability,
) -> LanguageModel:
    """Return a pre-norm Transformer language model. UserError where heads of an even size do not make up d_model."""
    if d_model % 2:
        raise UserError(f"model.d_model={d_model} must be even: rotary positions turn pairs of channels")
    check_divides("model.heads", heads, "half of the channels, model.d_model / 2", d_model // 2)
    return residual_model(
        vocabulary_size, d_model, layers, mlp_expand, dropout, lambda: Attention(d_model, heads, rope_base)
    )
