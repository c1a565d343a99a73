"""Arguments of an op that have to fit each other."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def check_shapes(op: str, shapes: Mapping[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Raise a ValueError where a tensor that is there has not the shape beside it.

    Broadcasting would make something of a size of 1, and a kernel would read past the end of what is too small.
    """
    for name, (tensor, expected) in shapes.items():
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{op}: {name} is {tuple(tensor.shape)}, not {expected}")
