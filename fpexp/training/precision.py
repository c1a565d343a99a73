"""The arithmetic of a run."""

from __future__ import annotations

import torch

from fpexp.config.run import RunConfig


def autocast(config: RunConfig) -> torch.autocast:
    """Return bfloat16 autocast where the run's precision asks for it; weights, scan states and norms stay float32."""
    return torch.autocast(
        torch.device(config.device).type, dtype=torch.bfloat16, enabled=config.precision == "bfloat16"
    )


def apply_machine_settings(config: RunConfig) -> tuple[str, ...]:
    """Set threads and determinism for this process; return what cannot be pinned, a line each."""
    if config.threads:
        torch.set_num_threads(config.threads)
    if not config.deterministic or config.device == "cpu":
        return ()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    return ("deterministic=true: cuDNN's LSTM and atomics in library kernels are not pinned",)
