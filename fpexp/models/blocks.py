"""The residual stream: pre-norm blocks around sequence layers, and the gated MLP that may stand between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fpexp.errors import UserError
from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.lm import LanguageModel, SequenceLayer


class ResidualBlock(SequenceLayer):
    """u + dropout(layer(norm(u))), pre-norm."""

    def __init__(self, layer: SequenceLayer, d_model: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=1e-5)
        self.layer = layer
        self.dropout = nn.Dropout(dropout)
        self.output_size = d_model
        self.iterations_depend_on_length = layer.iterations_depend_on_length

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the residual stream after this block."""
        output, solves = self.layer(self.norm(u), cap, mask)
        return u + self.dropout(output), solves

    def decode(self, u: Tensor, state: Any) -> tuple[Tensor, tuple[SolveResult, ...], Any]:
        """Return the residual stream after this block, the solves and the layer's state."""
        output, solves, state = self.layer.decode(self.norm(u), state)
        return u + output, solves, state


class GatedMLP(SequenceLayer):
    """W_out(silu(W_gate u) * W_value u), each token by itself (SwiGLU; Shazeer 2020)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.in_projection = nn.Linear(d_model, 2 * hidden, bias=False)
        self.out_projection = nn.Linear(hidden, d_model, bias=False)
        self.output_size = d_model

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return (B, T, d_model)."""
        gate, value = self.in_projection(u).chunk(2, dim=-1)
        return self.out_projection(functional.silu(gate) * value), ()

    def decode(self, u: Tensor, state: None) -> tuple[Tensor, tuple[SolveResult, ...], None]:
        """As `forward`: a token's output depends on no other."""
        return *self.forward(u, Cap(1), None), None


def residual_model(
    vocabulary_size: int,
    d_model: int,
    layers: int,
    mlp_expand: float,
    dropout: float,
    make_layer: Callable[[], SequenceLayer],
) -> LanguageModel:
    """Return a language model of `layers` residual blocks, each followed by a gated MLP unless `mlp_expand` is 0.

    A layer's `out_projection` starts smaller by the root of the number of blocks, so that the residual stream does not
    grow with depth (GPT-2; Mamba). UserError where the MLP would have no hidden channel.
    """
    hidden = round(mlp_expand * d_model)
    if mlp_expand and not hidden:
        raise UserError(
            f"model.mlp_expand={mlp_expand:g} times model.d_model={d_model} is a hidden size of 0; raise one, or set "
            "model.mlp_expand=0 for no MLP"
        )
    blocks: list[SequenceLayer] = []
    for _ in range(layers):
        blocks.append(ResidualBlock(make_layer(), d_model, dropout))
        if hidden:
            blocks.append(ResidualBlock(GatedMLP(d_model, hidden), d_model, dropout))
    with torch.no_grad():
        for block in blocks:
            for name, parameter in block.named_parameters():
                if name == "layer.out_projection.weight":
                    parameter.div_(math.sqrt(len(blocks)))
    return LanguageModel(vocabulary_size, d_model, blocks, dropout)
