"""What all models share: embedding, a stack of layers, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
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


@dataclass(frozen=True)
class DecodingState:
    """What the tokens so far leave behind of `batch_size` sequences: each layer's own state, of one size for
    ever but for attention's, which grows."""

    batch_size: int
    layers: tuple[Any, ...]


class SequenceLayer(nn.Module):
    """Base of what stands between embedding and head: causal, (B, T, d_model) -> (B, T, output_size)."""

    output_size: int
    iterations_depend_on_length = False
    """True where a sequence's solver counts cannot be read off a longer one's, as with whole-sequence solvers."""
    state_numbers = 0
    """How many numbers one sequence carries from token to token; 0 where that grows with the tokens, or is little."""
    state_key = "state_size"
    """The setting of the model that makes the state as large as it is."""

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the output and the solves; `cap` bounds them and `mask` (B, T) marks the real tokens."""
        raise NotImplementedError

    def decode(self, u: Tensor, state: Any) -> tuple[Tensor, tuple[SolveResult, ...], Any]:
        """Return the output, the solves and the state after u; `state` is the one before it, None at the start.

        In evaluation mode, without gradient. `state` is left as it was, and what is returned holds no more memory
        after many tokens than after one; attention's keys and values are the exception.
        """
        raise NotImplementedError(f"{type(self).__name__} does not decode: it has no method that carries a state")


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
        _check_tokens(tokens)
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"mask must be of type bool, not {mask.dtype}")
        if mask is not None and bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("padding must be on the right: a real token follows a padded one")
        u = self.dropout(self.embedding(tokens))
        solves: list[SolveResult] = []
        for layer in self.layers:
            u, found = layer(u, cap, mask)
            solves += found
        return ModelOutput(self.head(self.norm(u)), tuple(solves))

    @torch.no_grad()
    def decode(self, tokens: Tensor, state: DecodingState | None = None) -> tuple[ModelOutput, DecodingState]:
        """Read on: tokens (B, T), T >= 1, after those that `state` comes from, or from the start.

        A whole prompt at once or one token at a time, the logits are the same and so is the state. Layers that
        solve a fixed point do so token by token, whatever solver they were trained with. All tokens are real:
        sequences of unequal length are read separately. ValueError where the model is in training mode, where the
        tokens are not (B, T), or where the state is of another number of sequences; NotImplementedError where a layer
        carries no state.
        """
        if self.training:
            raise ValueError("decoding is for a model in evaluation mode; call model.eval() first")
        _check_tokens(tokens)
        batch = tokens.shape[0]
        if state is None:
            state = DecodingState(batch, (None,) * len(self.layers))
        if state.batch_size != batch:
            raise ValueError(f"the state is of batch size {state.batch_size}, the tokens are of {batch}")
        u = self.embedding(tokens)
        solves: list[SolveResult] = []
        states: list[Any] = []
        for layer, before in zip(self.layers, state.layers, strict=True):
            u, found, after = cast(SequenceLayer, layer).decode(u, before)
            solves += found
            states.append(after)
        return ModelOutput(self.head(self.norm(u)), tuple(solves)), DecodingState(batch, tuple(states))

    def parameter_count(self) -> int:
        """Return the number of trainable parameters."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)


def _check_tokens(tokens: Tensor) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.is_floating_point():
        raise ValueError(f"tokens must be indices (B, T) with T >= 1, not {tokens.dtype} {tuple(tokens.shape)}")
