"""Where random numbers come from: every draw has a stream with a name and an index, so nothing depends on order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SPLITS = {"train": 0, "validation": 1, "test": 2}


def derive_seed(seed: int, stream: str, index: int = 0) -> int:
    """Return 32 bits, all that torch's CPU generator reads of a seed.

    Two bits are the data split's, so that splits never share a seed; the others no two indices of a stream share.
    """
    start = int.from_bytes(hashlib.sha256(f"{seed}/{stream}".encode()).digest()[:4])
    return SPLITS.get(stream, 3) << 30 | (start + index) % 2**30


def generator(seed: int, stream: str, index: int = 0) -> torch.Generator:
    """Return a fresh CPU generator for the `index`-th draw of a stream."""
    return torch.Generator().manual_seed(derive_seed(seed, stream, index))


@contextmanager
def seeded(seed: int, stream: str) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, stream))
        yield
