"""What the longest batches of a run take at the least, against the memory of the machine.

A length that no machine of this size can hold is refused before anything starts: the allocator would say so late, and
where the system hands out more memory than it has, it would end the process instead. What passes may still run out.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fpexp.config.run import RunConfig
from fpexp.errors import UserError
from fpexp.machine import total_memory
from fpexp.models import LanguageModel
from fpexp.models.lm import SequenceLayer
from fpexp.tasks import HeldOut, Task

_BYTES_OF_A_NUMBER = {"float32": 4, "bfloat16": 2, "float64": 8}
_BYTES_OF_AN_INDEX = 8


def check_training(config: RunConfig, task: Task, model: LanguageModel, processes: int = 1) -> None:
    """Raise a `UserError` where weights, states or a micro-batch of the longest training sequences cannot fit.

    Of each linear map, what it gives out is kept for the backward pass, in this form or another of its size. Each of
    several processes has a device of its own and a share of the micro-batch there; on a CPU they share its memory too.
    """
    devices = 1 if config.device == "cpu" else processes
    _check_weights(config, model, devices if config.parallel == "fsdp" else 1)
    training = config.training
    sequences = -(-training.batch_size // (training.accumulation * devices))
    _check_states(config, model, sequences)
    kept = sum(module.out_features for module in model.modules() if isinstance(module, nn.Linear))
    split = f"training.batch_size={training.batch_size} and training.accumulation={training.accumulation}"
    _check(config, task, sequences, task.lengths.max, kept, task.length_key, split)


def _check_weights(config: RunConfig, model: LanguageModel, shares: int) -> None:
    """Weights and gradients are there together with the optimizer's two moments, each device with a share of them."""
    count = model.parameter_count()
    needed, available = 4 * count * _bytes_of_a_weight(config) // shares, total_memory(config.device)
    if needed > available:
        raise UserError(
            f"a model of {count:,} parameters takes at least {needed / 1e9:.3g} GB of memory in training; "
            f"{config.device} has {available / 1e9:.3g} GB; lower model.d_model or the model's other sizes"
        )


def _check_states(config: RunConfig, model: LanguageModel, sequences: int) -> None:
    """Of each layer, the states of the sequences of a micro-batch."""
    training = config.training
    for layer in model.modules():
        if isinstance(layer, SequenceLayer) and layer.state_numbers:
            needed, available = (
                sequences * layer.state_numbers * _bytes_of_a_weight(config),
                total_memory(config.device),
            )
            if needed > available:
                value = config.model.settings[layer.state_key]
                setting = f"model.d_model={config.model.settings['d_model']}"
                if value is not None:
                    setting = f"model.{layer.state_key}={value}"
                raise UserError(
                    f"{setting} at training.batch_size={training.batch_size} is a state "
                    f"of at least {needed / 1e9:.3g} GB; {config.device} has {available / 1e9:.3g} GB; lower one"
                )


def _bytes_of_a_weight(config: RunConfig) -> int:
    """Weights and states are float32 under bfloat16 too."""
    return 8 if config.precision == "float64" else 4


def check_evaluation(
    config: RunConfig, task: Task, model: LanguageModel, lengths: Sequence[int], key: str, batch_key: str
) -> None:
    """Raise a `UserError`, with the keys as the user wrote them, where a batch of the longest of `lengths` cannot fit.

    The logits and what they are made from are there at the same time.
    """
    settings = config.evaluation
    sequences = settings.batch_size if isinstance(task, HeldOut) else min(settings.batch_size, settings.samples)
    alive = model.head.in_features + model.head.out_features
    _check(config, task, sequences, max(lengths), alive, key, f"{batch_key}={settings.batch_size}")


def _check(
    config: RunConfig, task: Task, sequences: int, length: int, numbers: int, key: str, batch_setting: str
) -> None:
    """`numbers` a token, beside its index and its target."""
    of_a_token = numbers * _BYTES_OF_A_NUMBER[config.precision] + 2 * _BYTES_OF_AN_INDEX
    needed, available = sequences * task.input_length(length) * of_a_token, total_memory(config.device)
    if needed > available:
        raise UserError(
            f"{key}: a length of {length} at {batch_setting} takes at least {needed / 1e9:.3g} GB of memory; "
            f"{config.device} has {available / 1e9:.3g} GB"
        )
