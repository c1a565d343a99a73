"""torch's LSTM, the baseline that solves every word problem."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fpexp.fixed_point import Cap, SolveResult
from fpexp.models.lm import LanguageModel, SequenceLayer
from fpexp.ranges import Count, Depth, Probability


class LSTMLayers(SequenceLayer):
    """nn.LSTM of hidden size `hidden`, without residual connections, as it is usually run."""

    def __init__(self, d_model: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(d_model, hidden, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.output_size = hidden

    def forward(self, u: Tensor, cap: Cap, mask: Tensor | None) -> tuple[Tensor, tuple[SolveResult, ...]]:
        """Return the hidden states (B, T, hidden); there is nothing to solve."""
        return self.lstm(u)[0], ()

    def decode(self, u: Tensor, state: Any) -> tuple[Tensor, tuple[SolveResult, ...], Any]:
        """Return the hidden states, no solves, and h and c after the last token, (layers, B, hidden) each."""
        output, state = self.lstm(u, state)
        return output, (), state


def lstm(vocabulary_size: int, *, d_model: Count, layers: Depth, expand: Count, dropout: Probability) -> LanguageModel:
    """Return an LSTM language model with hidden size `expand * d_model`."""
    return LanguageModel(vocabulary_size, d_model, [LSTMLayers(d_model, expand * d_model, layers, dropout)], dropout)
