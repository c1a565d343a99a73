"""Models: token indices in, logits at every position out. One file each."""

from fpexp.models.delta_net import delta_product, gated_delta_net
from fpexp.models.fp_mamba import fp_mamba
from fpexp.models.fp_mamba2 import fp_mamba2
from fpexp.models.fp_rnn import fp_rnn
from fpexp.models.lm import DecodingState, LanguageModel, ModelOutput, SequenceLayer
from fpexp.models.lstm import lstm
from fpexp.models.mamba import mamba
from fpexp.models.mamba2 import mamba2
from fpexp.models.transformer import transformer

__all__ = [
    "DecodingState",
    "LanguageModel",
    "ModelOutput",
    "SequenceLayer",
    "delta_product",
    "fp_mamba",
    "fp_mamba2",
    "fp_rnn",
    "gated_delta_net",
    "lstm",
    "mamba",
    "mamba2",
    "transformer",
]
