"""The order of documents: by epoch, file and shuffled block. A place in it is a few numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice

import torch

from fpexp.data.sources import Source
from fpexp.errors import UserError
from fpexp.randomness import generator


@dataclass(frozen=True)
class Start:
    """The first document that training may read, in the source's own order: all before it are held out."""

    part: int = 0
    row: int = 0


@dataclass(frozen=True)
class Place:
    """Document number `index` of the epoch's block number `block`.

    The block was filled from row `row` of the file whose turn in the epoch's order is `turn`.
    """

    epoch: int = 0
    block: int = 0
    turn: int = 0
    row: int = 0
    index: int = 0


@dataclass(frozen=True)
class Order:
    """Epoch after epoch, each with every document from `start` on once.

    Files come in an order drawn by (seed, epoch). Their documents fill a block of `shuffle_buffer`, which is emptied in
    an order drawn by (seed, epoch, block number) before the next is filled; with 0 nothing is shuffled, files included.
    """

    source: Source
    seed: int = 0
    shuffle_buffer: int = 0
    start: Start = Start()
    epochs: int | None = None
    """None for no end."""

    def documents(self, place: Place) -> Iterator[tuple[Place, str]]:
        """Yield documents with their places, from the one at `place` on."""
        for epoch in count(place.epoch) if self.epochs is None else range(place.epoch, self.epochs):
            first = place if epoch == place.epoch else Place(epoch)
            found = False
            for item in self._epoch(first):
                found = True
                yield item
            if not found and first == Place(epoch):
                raise UserError("there is no document to train on; give more files, or lower task.validation_tokens")

    def _epoch(self, place: Place) -> Iterator[tuple[Place, str]]:
        cursor = self._in_files(place)
        index = place.index
        for block in count(place.block):
            filled = list(islice(cursor, max(self.shuffle_buffer, 1)))
            if not filled:
                return
            turn, row, _ = filled[0]
            order = self._permutation(len(filled), f"data/epoch {place.epoch}/block", block)
            for i in range(index, len(filled)):
                yield Place(place.epoch, block, turn, row, i), filled[order[i]][2]
            index = 0

    def _in_files(self, place: Place) -> Iterator[tuple[int, int, str]]:
        """Yield (turn, row, text) from the first document of a block on."""
        files = self._permutation(self.source.parts - self.start.part, "data/files", place.epoch)
        row = place.row
        for turn in range(place.turn, len(files)):
            part = self.start.part + files[turn]
            if part == self.start.part:
                row = max(row, self.start.row)
            for text in self.source.read(part, row):
                yield turn, row, text
                row += 1
            row = 0

    def _permutation(self, n: int, stream: str, index: int) -> list[int]:
        if self.shuffle_buffer == 0 or n < 2:
            return list(range(n))
        return torch.randperm(n, generator=generator(self.seed, stream, index)).tolist()
