"""Weights of which each process of a run holds a part (FSDP), as seen by code that wants whole ones.

On weights that are whole already, nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have all weights whole inside the block, for reading them otherwise than by the forward pass."""
    shards = [module for module in model.modules() if hasattr(module, "unshard")]  # FSDP's
    for module in shards:
        module.unshard()  # type: ignore[operator]
    try:
        yield
    finally:
        for module in shards:
            module.reshard()  # type: ignore[operator]


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor of which each process may have a part; every process must ask."""
    fetch: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return tensor if fetch is None else fetch()


def shared_like(tensor: Tensor, target: Tensor) -> Tensor:
    """Return of a whole tensor, which all processes have, what this one keeps of `target`."""
    if not hasattr(target, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(target, DTensor)
    mesh = target.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, target.placements, src_data_rank=None)
