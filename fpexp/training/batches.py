"""What training reads: batches drawn from the task, or the next ones of its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fpexp.randomness import generator
from fpexp.tasks import Batch, Gapped, Mixed, Stream, Streamed, Task
from fpexp.tasks.lengths import Lengths


class Batches:
    """The training batches of a run, one after another, with their position."""

    def __init__(self, task: Task, size: int, seed: int) -> None:
        self.task, self.size, self.seed = task, size, seed
        self.lengths = Lengths(task.lengths, task.has_length) if isinstance(task, Gapped) else Lengths(task.lengths)
        self.stream: Stream | None = task.open_stream(seed) if isinstance(task, Streamed) else None

    def next(self, step: int) -> tuple[Batch, int]:
        """Return the batch of a step and the length of its longest examples."""
        source = generator(self.seed, "train", step)
        length = self.lengths.next(source)
        if self.stream is not None:
            batch, examples = self.stream.read(self.size), {length: self.size}
        elif isinstance(self.task, Mixed):
            batch, drawn = self.task.sample_mixed(self.size, length, source)
            examples = dict(zip(*map(torch.Tensor.tolist, drawn.unique(return_counts=True)), strict=True))
        else:
            batch, examples = self.task.sample(self.size, length, source), {length: self.size}
        for number, count in examples.items():
            self.lengths.count(number, count)
        return batch, length

    def observe(self, accuracies: Mapping[str, Any]) -> None:
        """Take note of how the last batch went."""
        self.lengths.observe(accuracies[self.task.mastered_by] or 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-able values."""
        stream = {} if self.stream is None else {"stream": self.stream.state_dict()}
        return {"lengths": self.lengths.state_dict(), **stream}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        self.lengths.load_state_dict(state["lengths"])
        if self.stream is not None:
            self.stream.load_state_dict(state["stream"])

    def close(self) -> None:
        """End what reads ahead."""
        if self.stream is not None:
            self.stream.close()
