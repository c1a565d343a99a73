"""AdamW with the right groups, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import nn

from fpexp.config.run import Training

EXEMPT_NAMES = ("A_log", "omega", "D")
"""Parameters that are no weights though they may be matrices: decay would pull the dynamics to zero (Mamba)."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups; vectors (biases, norms, D), A_log, omega and weight-norm magnitudes are not decayed.

    Every trainable parameter is in exactly one group.
    """
    decayed: list[nn.Parameter] = []
    exempt: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (exempt if _is_exempt(name, parameter) else decayed).append(parameter)
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]


def make_optimizer(model: nn.Module, config: Training) -> torch.optim.AdamW:
    """Return AdamW over `parameter_groups`."""
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def learning_rate(config: Training, step: int) -> float:
    """Return the learning rate of `step` (0-based): linear warm-up, then the schedule to its final fraction."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if config.lr_schedule == "cosine" else 1 - progress
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * remaining)


def _is_exempt(name: str, parameter: nn.Parameter) -> bool:
    magnitude_of_weight_norm = ".parametrizations." in f".{name}" and name.endswith(".original0")
    return parameter.ndim < 2 or name.rpartition(".")[2] in EXEMPT_NAMES or magnitude_of_weight_norm
