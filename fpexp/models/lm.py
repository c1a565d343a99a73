"""What all models share: embedding, a stack of layers, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fpexp.fixed_point import Cap, SolveResult

if TYPE_CHECKING:
    from fpexp.config.run import RunConfig


EVALUATION_CAP = Cap(1000)  # paper app. D.3


@dataclass(frozen=True)
class ModelOutput:
    """`logits` (B, T, vocabulary) and, of each layer that solved a fixed point, what its solver found."""

    logits: Tensor
    solves: tuple[SolveResult, ...] = ()


class SequenceLayer(nn.Module):
    """Base of what stands between embedding and head: causal, (B, T, d_model) -> (B, T, output_size)."""

    output_size: int
    iterations_depend_on_length = False
    """True where a sequence's solver counts cannot be read off a longer one's, as with whole-sequence solvers."""

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the output and the solves; `cap` bounds them and `mask` (B, T) marks the real tokens."""
        raise NotImplementedError


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


class LanguageModel(nn.Module):
    """Embedding (untied), layers, RMSNorm, head; one logit vector for each position."""

    config: RunConfig
    """The run's config, set by `fpexp.load`."""

    def __init__(self, vocabulary_size: int, d_model: int, layers: list[SequenceLayer], dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)  # as in Mamba
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(layers)
        width = layers[-1].output_size
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        self.iterations_depend_on_length = any(layer.iterations_depend_on_length for layer in layers)

    def forward(self, tokens: Tensor, cap: Cap = EVALUATION_CAP, mask: Tensor | None = None) -> ModelOutput:
        """tokens (B, T) indices; `cap` bounds the solvers' iterations.

        `mask` (B, T) is true at real tokens, which must come first: a ValueError where padding is not on the right.
        """
        if mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("padding must be on the right: a real token follows a padded one")
        u = self.dropout(self.embedding(tokens))
        solves: list[SolveResult] = []
        for layer in self.layers:
            u, found = layer(u, cap, mask)
            solves += found
        return ModelOutput(self.head(self.norm(u)), tuple(solves))

    def parameter_count(self) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
