"""Text as streams of tokens for language modelling: sources, tokenizers, packing, prepared shards."""

from fpexp.data.corpus import Corpus
from fpexp.data.held_out import HeldOutText
from fpexp.data.stream import WindowStream
from fpexp.data.tokenizer import Tokenizer, open_tokenizer

__all__ = ["Corpus", "HeldOutText", "Tokenizer", "WindowStream", "open_tokenizer"]
