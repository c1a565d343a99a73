"""One model over several processes: DDP, where each has all of it, or FSDP, where each has a part of every weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fpexp.config.run import RunConfig
from fpexp.errors import UserError
from fpexp.models import LanguageModel
from fpexp.sharding import whole
from fpexp.tasks import Batch
from fpexp.world import World


def check_shares(config: RunConfig, world: World) -> None:
    """Raise a `UserError` where a process would have no sequence for one of its micro-batches."""
    training = config.training
    if not world.is_alone and training.batch_size < world.size * training.accumulation:
        raise UserError(
            f"training.batch_size={training.batch_size} is less than a sequence for each of {world.size} processes in "
            f"training.accumulation={training.accumulation} parts; raise it to {world.size * training.accumulation}, "
            "or start fewer processes"
        )


def micro_batches(batch: Batch, accumulation: int, world: World) -> list[Batch]:
    """Return this process's share of the batch of a step, in parts; every process has as many, none empty."""
    if world.is_alone:
        return batch.chunk(accumulation)
    shares = world.size * accumulation
    return [batch.rows(slice(world.rank + world.size * part, None, shares)) for part in range(accumulation)]


class Replicas:
    """A process's part in training one model: `forward` is the model whose backward pass sums up the gradients.

    `scale` is what the loss is multiplied by, since what DDP and FSDP call the sum is the mean over the processes.
    """

    def __init__(self, model: LanguageModel, config: RunConfig, world: World) -> None:
        self.forward: Callable[..., Any] = model
        self.scale = world.size
        self._ddp: DistributedDataParallel | None = None
        if world.is_alone:
            return
        if config.parallel == "fsdp":
            _shard(model, config.device, world)
        else:
            self.forward = self._ddp = DistributedDataParallel(model, forward_sync_buffers=False)

    def accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch: all but the last may keep their gradients to themselves."""
        return nullcontext() if last or self._ddp is None else self._ddp.no_sync()


def _shard(model: LanguageModel, device: str, world: World) -> None:
    """Share out the weights, a layer at a time, in place; the rest, embedding and head, stands together."""
    from torch.distributed.fsdp import fully_shard  # two seconds, which one process need not wait

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nobody changes it in place
    mesh = init_device_mesh(torch.device(device).type, (world.size,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def gradient_norm(model: nn.Module, limit: float) -> float:
    """Return the norm of all gradients together, which are scaled down where it is over the limit."""
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = whole(nn.utils.get_total_norm(gradients))
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return float(norm)
