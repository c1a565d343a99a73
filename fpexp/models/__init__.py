"""Models: token indices in, logits at every position out. One file each."""

from fpexp.models.fp_mamba import fp_mamba
from fpexp.models.fp_mamba2 import fp_mamba2
from fpexp.models.lm import DecodingState, LanguageModel, ModelOutput
from fpexp.models.lstm import lstm
from fpexp.models.mamba2 import mamba2

__all__ = ["DecodingState", "LanguageModel", "ModelOutput", "fp_mamba", "fp_mamba2", "lstm", "mamba2"]
