"""The processes that train one run together, as `torchrun` starts them; one process is the world of size 1.

Nothing else reads torchrun's environment. What the processes tell each other here, beside the gradients, are a few
numbers a step, by gloo on the CPUs: so a process that has died is noticed on a GPU machine too.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from fpexp.errors import EndedElsewhere, FpexpError, UserError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a process waits for the others: more than a checkpoint, a picture or a slow share of an evaluation take."""

_START = "start with torchrun --nproc-per-node=<n> -m fpexp train, or unset RANK, LOCAL_RANK and WORLD_SIZE"

LOST_CONTACT = "another process of the run has ended or does not answer"


@dataclass(frozen=True)
class World:
    """This process among those of its run: `rank` of `size`, and `local_rank` among those of its machine."""

    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @classmethod
    def from_environment(cls) -> World:
        """Return the world that torchrun describes, of one process without it; a `UserError` where that is nonsense."""
        given = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        if None in given.values():
            return cls()
        try:
            world = cls(*(int(value or "") for value in given.values()))
        except ValueError:
            world = cls(size=0)
        if not (0 <= world.rank < world.size and 0 <= world.local_rank < world.size):
            raise UserError(f"{', '.join(f'{k}={v}' for k, v in given.items())} is no place in a run; {_START}")
        return world

    @property
    def is_alone(self) -> bool:
        """True where there is no other process."""
        return self.size == 1

    @property
    def is_first(self) -> bool:
        """True in the process that writes, prints and draws; the others are silent."""
        return self.rank == 0

    @property
    def share(self) -> slice:
        """Which rows of a batch are this process's."""
        return slice(self.rank, None, self.size)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Be connected with the other processes inside the block. After an error they are left, not waited for."""
        if self.is_alone:
            yield
            return
        on_gpu = self.local_rank < torch.cuda.device_count()
        if on_gpu:
            torch.cuda.set_device(self.local_rank)  # device=cuda is from now on this process's own
        with self._answered():
            try:
                distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=TIMEOUT)
            except ValueError as error:  # no address to meet at
                raise UserError(f"the other {self.size - 1} processes cannot be found; {_START}") from error
        atexit.register(gc.collect)  # DDP is a cycle; left to the interpreter's own end it may abort the process
        yield
        gc.collect()
        distributed.destroy_process_group()

    def check_device(self, device: str) -> None:
        """Raise a `UserError` where processes would share a device, or where this one has none."""
        if self.is_alone or device == "cpu":
            return
        if device not in ("auto", "cuda"):
            raise UserError(f"device={device} is one device for {self.size} processes; use device=cuda, or device=cpu")
        count = torch.cuda.device_count()
        if count and self.local_rank >= count:
            raise UserError(
                f"process {self.local_rank + 1} of this machine has no device: there are {count}; lower torchrun's "
                f"--nproc-per-node to {count}, or use device=cpu"
            )

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, by rank; all must give as many."""
        if self.is_alone:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        with self._answered():
            distributed.all_gather(parts, mine)
        return [part.tolist() for part in parts]

    def largest(self, number: int) -> int:
        """Return the largest of all processes' numbers."""
        return int(max(row[0] for row in self.gather([number])))

    def from_first(self, value: T) -> T:
        """Return the first process's value in every process."""
        if self.is_alone:
            return value
        held = [value]
        with self._answered():
            distributed.broadcast_object_list(held, src=0, device=torch.device("cpu"))
        return held[0]

    def together(self, work: Callable[[], T]) -> T:
        """Do the same in every process. An error in one of them ends all: one tells it, the others are silent."""
        if self.is_alone:
            return work()
        failure: FpexpError | None = None
        try:
            result = work()
        except FpexpError as error:
            failure = error
        codes = [int(row[0]) for row in self.gather([0 if failure is None else failure.exit_code])]
        failed = [rank for rank, code in enumerate(codes) if code]
        if not failed:
            return result
        if failure is not None and failed[0] == self.rank:
            raise failure
        raise EndedElsewhere(codes[failed[0]])

    def by_first(self, work: Callable[[], T]) -> T:
        """Let the first process do something; return in every process what it returned, or end as it did."""
        return self.from_first(self.together(lambda: work() if self.is_first else None))  # type: ignore[return-value]

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Say in one line that another process is gone; one that is not the first leaves that to it."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_contact(error):
                raise
            raise (FpexpError(LOST_CONTACT) if self.is_first else EndedElsewhere(1)) from error


ALONE = World()


def is_lost_contact(error: BaseException) -> bool:
    """Tell whether an exception means that another process of the run no longer answers."""
    return isinstance(error, distributed.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
    )
