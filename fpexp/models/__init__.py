"""Models: token indices in, logits at every position out. One file each."""

from fpexp.models.fp_mamba import fp_mamba
from fpexp.models.lm import DecodingState, LanguageModel, ModelOutput
from fpexp.models.lstm import lstm
from fpexp.models.mamba import mamba
from fpexp.models.transformer import transformer

__all__ = ["DecodingState", "LanguageModel", "ModelOutput", "fp_mamba", "lstm", "mamba", "transformer"]
