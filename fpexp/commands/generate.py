"""fpexp generate: what a recorded run makes of a prompt, token by token with a carried state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from fpexp.commands.arguments import parse
from fpexp.errors import UserError
from fpexp.ranges import Count

if TYPE_CHECKING:
    from torch import Tensor

    from fpexp.evaluation.generation import Read
    from fpexp.loading import LoadedRun

OPTIONS = {
    "run": str,
    "prompt": str,
    "limit": Count,
    "checkpoint": Literal["newest", "best"],
    "device": str,
    "results_dir": str,
}


def run(arguments: list[str]) -> int:
    """Print what the model answers to a prompt and how large a state it carries."""
    options = parse(arguments, OPTIONS)
    for key, example in (("run", "run=<run id>; `fpexp runs` lists them"), ("prompt", "prompt='<text>'")):
        if key not in options:
            raise UserError(f"which {key}? write {example}")

    from fpexp.loading import load_run
    from fpexp.tasks import Generating, Prompted, Tagging
    from fpexp.tracking.console import warn

    loaded = load_run(
        options["run"],
        results_dir=options.get("results_dir", "results"),
        device=options.get("device", "auto"),
        checkpoint=options.get("checkpoint", "newest"),
    )
    for warning in loaded.warnings:
        warn(warning)
    task: Any = loaded.experiment.task
    if not isinstance(task, Prompted) or not isinstance(task, Tagging | Generating):
        raise UserError(f"{type(task).__name__} reads no prompts: it has no method read_prompt, or nothing to answer")
    if "limit" in options and not isinstance(task, Generating):
        raise UserError(f"limit={options['limit']} has no meaning here: {type(task).__name__} answers at every token")
    prompt = task.read_prompt(options["prompt"])[None]
    read = _continue(loaded, prompt, options.get("limit")) if isinstance(task, Generating) else _tag(loaded, prompt)
    first, last = read.state_bytes
    growth = "the same" if first == last else f"{last:,} bytes"
    print(f"state     {first:,} bytes after the first step, {growth} after the last")
    return 0


def _tag(loaded: LoadedRun, prompt: Tensor) -> Read:
    """Print the prompt, the model's tags and the right ones, one under the other."""
    from fpexp.evaluation.generation import tag
    from fpexp.tasks import IGNORE

    task: Any = loaded.experiment.task
    read = tag(loaded.model, prompt.to(loaded.experiment.config.device))
    targets = task.tag(prompt)
    scored = targets != IGNORE
    answers = read.tokens.cpu()[scored]
    right = int((answers == targets[scored]).sum())
    columns = [task.write(row).split() for row in (prompt[scored], answers, targets[scored])]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    for name, row in zip(("prompt", "model", "target"), columns, strict=True):
        print(f"{name:<9} " + " ".join(word.rjust(width) for word, width in zip(row, widths, strict=True)))
    print(f"right     {right} of {int(scored.sum())}")
    return read


def _continue(loaded: LoadedRun, prompt: Tensor, limit: int | None) -> Read:
    """Print the prompt and the model's greedy continuation, no longer than a known answer, which is printed below."""
    import torch

    from fpexp.evaluation.generation import continue_greedily
    from fpexp.tasks import KnownAnswer

    task: Any = loaded.experiment.task
    target = task.answer(prompt[0]) if isinstance(task, KnownAnswer) else None
    if limit is None:
        limit = 256 if target is None else len(target)
    read = continue_greedily(loaded.model, prompt.to(loaded.experiment.config.device), task.stop_token, limit)
    written = read.tokens[0].cpu()
    if target is None:
        print(task.write(torch.cat([prompt[0], written])))
        return read
    for name, tokens in (("prompt", prompt[0]), ("model", written), ("target", target)):
        print(f"{name:<9} {task.write(tokens)}")
    common = min(len(written), len(target))
    print(f"right     {int((written[:common] == target[:common]).sum())} of {len(target)}")
    return read
