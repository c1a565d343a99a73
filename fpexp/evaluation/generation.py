"""Reading token by token with a carried state: tags of a prompt, and greedy continuations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.build import Experiment
from fpexp.evaluation.metrics import Accuracy
from fpexp.machine import autocast
from fpexp.models import DecodingState, LanguageModel
from fpexp.randomness import generator
from fpexp.sharding import gathered
from fpexp.tasks import IGNORE, Answered
from fpexp.world import ALONE, World


@dataclass(frozen=True)
class Read:
    """`tokens` (B, T): the likeliest output at each position that was read or written.

    `state_bytes` are what the model carried after the first step and after the last.
    """

    tokens: Tensor
    state_bytes: tuple[int, int]


def tag(model: LanguageModel, inputs: Tensor) -> Read:
    """Read inputs (B, T) one token at a time; return the likeliest output at each."""
    state: DecodingState | None = None
    outputs, sizes = [], []
    for token in inputs.split(1, dim=1):
        output, state = model.decode(token, state)
        outputs.append(output.logits.argmax(-1))
        sizes.append(state_bytes(state))
    return Read(torch.cat(outputs, dim=1), (sizes[0], sizes[-1]))


def continue_greedily(model: LanguageModel, prompt: Tensor, stop_token: int | None, limit: int) -> Read:
    """Read the prompt (B, T) at once, then write the likeliest token, at most `limit` times, and read it in turn.

    After its first `stop_token` a sequence holds nothing but that; when all have one, no more is written. So `tokens`
    is (B, n), 1 <= n <= limit. ValueError where `limit` is not positive.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    output, state = model.decode(prompt)
    first_size = state_bytes(state)
    written = [output.logits[:, -1:].argmax(-1)]
    ended = torch.zeros_like(written[0], dtype=torch.bool)
    while len(written) < limit:
        if stop_token is not None:
            ended = ended | (written[-1] == stop_token)
            if bool(ended.all()):
                break
        output, state = model.decode(written[-1], state)
        token = output.logits.argmax(-1)
        written.append(token if stop_token is None else token.masked_fill(ended, stop_token))
    return Read(torch.cat(written, dim=1), (first_size, state_bytes(state)))


@torch.no_grad()
def measure_generation(experiment: Experiment, task: Answered, length: int, world: World = ALONE) -> dict[str, Any]:
    """Return the accuracies of answers that the model writes by itself, examples of one length; empty for none.

    An answer that stops early or late is wrong from there on.
    """
    config, model, accuracy = experiment.config, experiment.model, Accuracy()
    source = generator(config.seed, "test generation", length)
    was_training = model.training
    model.eval()
    try:
        with gathered(model):  # answers end after different numbers of tokens, so weights cannot be fetched for each
            for start in range(0, task.generated_samples, config.evaluation.batch_size):
                size = min(config.evaluation.batch_size, task.generated_samples - start)
                prompts, answers = (part[world.share] for part in task.sample_prompts(size, length, source))
                if len(prompts) == 0:
                    continue
                with autocast(config):
                    read = continue_greedily(model, prompts.to(config.device), task.stop_token, answers.shape[1])
                accuracy.add_predictions(_up_to_the_stop(read.tokens.cpu(), task.stop_token, answers.shape[1]), answers)
    finally:
        model.train(was_training)
    accuracy = accuracy.over(world)
    summary = accuracy.summary()
    names = ("token_accuracy", "sequence_accuracy", "n")
    return {f"generated_{name}": summary[name] for name in names} if accuracy.sequences else {}


def _up_to_the_stop(tokens: Tensor, stop_token: int | None, length: int) -> Tensor:
    """Return what was written (B, n) as (B, length), with `IGNORE`, which is never right, behind each first stop."""
    tokens = functional.pad(tokens, (0, length - tokens.shape[1]), value=IGNORE)  # all sequences have stopped before
    if stop_token is None:
        return tokens
    stops = torch.eq(tokens, stop_token).cumsum(1)
    return tokens.masked_fill(functional.pad(stops[:, :-1], (1, 0)) > 0, IGNORE)


def state_bytes(state: Any) -> int:
    """Return the memory of all tensors in a decoding state."""
    return sum(tensor.nbytes for tensor in _tensors(state))


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            yield from _tensors(getattr(state, field.name))
    elif isinstance(state, tuple | list):
        for part in state:
            yield from _tensors(part)
