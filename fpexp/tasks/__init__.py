"""Tasks: a generator of sequences, a vocabulary and a mask of what is scored. One file each."""

from fpexp.tasks.copying import Copy
from fpexp.tasks.language import Language
from fpexp.tasks.lengths import LengthPolicy
from fpexp.tasks.modular_arithmetic import ModularArithmetic
from fpexp.tasks.task import (
    IGNORE,
    Answered,
    Batch,
    Gapped,
    Generating,
    HeldOut,
    KnownAnswer,
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
    "Copy",
    "Gapped",
    "Generating",
    "HeldOut",
    "KnownAnswer",
    "Language",
    "LengthPolicy",
    "Mixed",
    "ModularArithmetic",
    "Prompted",
    "Stream",
    "Streamed",
    "Tagging",
    "Task",
    "WordProblem",
]
