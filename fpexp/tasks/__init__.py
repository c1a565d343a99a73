"""Tasks: a generator of sequences, a vocabulary and a mask of what is scored. One file each."""

from fpexp.tasks.lengths import LengthPolicy
from fpexp.tasks.task import IGNORE, Batch, Generating, Prompted, Tagging, Task
from fpexp.tasks.word_problem import WordProblem

__all__ = ["IGNORE", "Batch", "Generating", "LengthPolicy", "Prompted", "Tagging", "Task", "WordProblem"]
