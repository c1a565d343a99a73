"""One training step of a model, for those benchmarks that time it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fpexp.build import Experiment
from fpexp.evaluation.metrics import summed_loss
from fpexp.fixed_point import Cap
from fpexp.machine import autocast
from fpexp.tasks import Batch
from fpexp.training.optimizer import make_optimizer


def training_step(experiment: Experiment, batch: Batch, cap: Cap) -> Callable[[], None]:
    """Return one step as `fpexp.training` makes it; the learning rate is zero, so that every call does the same."""
    model, config = experiment.model.train(), experiment.config.training
    optimizer = make_optimizer(model, config)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    limit = float("inf") if config.clip is None else config.clip

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(experiment.config):
            output = model(batch.inputs, cap, batch.mask)
        (summed_loss(output.logits, batch.targets) / batch.scored).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()

    return step
