"""Tasks: a generator of sequences, a vocabulary and a mask of what is scored. One file each."""

from fpexp.tasks.language import Language
from fpexp.tasks.lengths import LengthPolicy
from fpexp.tasks.task import (
    IGNORE,
    Answered,
    Batch,
    Generating,
    HeldOut,
    Mixed,
    Prompted,
    Stream,
    Streamed,
    Tagging,
    Task,
)
from fpexp.tasks.word_problem import WordProblem

__all__ = [
    "IGNORE",
    "Answered",
    "Batch",
    "Generating",
    "HeldOut",
    "Language",
    "LengthPolicy",
    "Mixed",
    "Prompted",
    "Stream",
    "Streamed",
    "Tagging",
    "Task",
    "WordProblem",
]
