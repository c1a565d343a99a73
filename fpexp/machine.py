"""The arithmetic and the limits of the machine that a run is on."""

from __future__ import annotations

import os

import torch

from fpexp.config.run import RunConfig

_OUT_OF_MEMORY = ("can't allocate memory", "Storage size calculation overflowed", "Overflow when unpacking")
_TORCHS_CHOICE_OF_THREADS = torch.get_num_threads()


def autocast(config: RunConfig) -> torch.autocast:
    """Return bfloat16 autocast where the run's precision asks for it; weights, scan states and norms stay float32."""
    return torch.autocast(
        torch.device(config.device).type, dtype=torch.bfloat16, enabled=config.precision == "bfloat16"
    )


def apply_settings(config: RunConfig) -> tuple[str, ...]:
    """Set threads and determinism for this process; return what cannot be pinned, a line each."""
    set_threads(config.threads)
    pinned = config.deterministic and config.device != "cpu"
    torch.use_deterministic_algorithms(pinned, warn_only=True)
    if not pinned:
        return ()
    torch.backends.cudnn.benchmark = False
    return ("deterministic=true: cuDNN's LSTM and atomics in library kernels are not pinned",)


def set_threads(threads: int) -> None:
    """Use so many CPU threads in this process; 0 is torch's own choice."""
    torch.set_num_threads(threads or _TORCHS_CHOICE_OF_THREADS)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception means that memory ran out; torch on a CPU says so in a RuntimeError's text only."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error) for text in _OUT_OF_MEMORY
    )


def total_memory(device: str) -> int:
    """Return the bytes of memory that a device has, in use or not."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
