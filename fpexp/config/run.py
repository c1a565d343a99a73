"""The schema of a run. Values and their reasons stand in conf/; this file says which are sensible."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fpexp.config.migration import migrate
from fpexp.config.schema import Checker, Component, plain
from fpexp.config.values import parse_value
from fpexp.errors import UserError
from fpexp.ranges import Count, CountOrZero, Fraction, NonNegative, Positive, Probability, Range


@dataclass(frozen=True)
class Choices:
    """Which file of each config group was chosen; names for people, never read by the computation."""

    task: str
    model: str
    solver: str
    schedule: str
    gradient: str
    scale: str
    tracking: str
    experiment: str | None = None


@dataclass(frozen=True)
class Training:
    """Optimiser steps, AdamW (Loshchilov and Hutter 2019), its learning-rate schedule, and when to look and save."""

    steps: Count
    batch_size: Annotated[int, Range(1, 2**20)]  # sequences a step
    accumulation: Count  # micro-batches that a batch is split into
    lr: Positive
    weight_decay: NonNegative
    betas: tuple[Probability, Probability]
    clip: Positive | None  # largest gradient norm
    lr_schedule: Literal["constant", "cosine", "linear"]
    warmup_steps: CountOrZero
    final_lr_fraction: Fraction
    non_finite: Literal["stop", "skip"]  # what a non-finite loss or gradient does
    log_every: Count
    evaluate_every: Count
    stop_at_accuracy: Fraction | None  # early stop: whole-sequence accuracy in validation
    checkpoint_every: Count
    keep_checkpoints: Count  # the newest ones; the best is kept beside them


@dataclass(frozen=True)
class Evaluation:
    """The length curve after training, and the validation during it."""

    lengths: list[Count]
    samples: Count  # sequences a length in the curve
    validation_samples: Count
    batch_size: Count


@dataclass(frozen=True)
class Tracking:
    """Where metrics go beside the run's own JSONL files."""

    wandb: bool
    project: str
    entity: str | None
    mode: Literal["auto", "online", "offline"]


@dataclass(frozen=True)
class Scale:
    """What a scale decides for models; its protocol (steps, widths, lengths) is in the keys that it sets."""

    name: str
    weight_norm: bool


@dataclass(frozen=True)
class Sweep:
    """How a multirun treats its jobs."""

    fail_fast: bool  # stop at the first job that fails
    rerun: bool  # run jobs again that an earlier run has finished
    recorded: str | None = None  # a results folder whose finished runs count as done, or auto (fpexp.kept)


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    task: Component
    model: Component
    solver: Component
    schedule: Component
    gradient: Component
    scale: Scale
    training: Training
    evaluation: Evaluation
    tracking: Tracking
    sweep: Sweep
    choices: Choices
    device: Annotated[str, "auto, cpu, cuda or cuda:<n>"]
    precision: Literal["auto", "float32", "bfloat16", "float64"]
    threads: Annotated[int, Range(0, 1024)]  # 0: torch's own choice
    seed: Annotated[int, Range(0, maximum=2**31 - 1)]
    deterministic: bool
    results_dir: str
    parallel: Literal["ddp", "fsdp"] = "ddp"  # how several processes share the model: copies, or a part each

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> RunConfig:
        """Check a plain mapping; raise a `UserError` that names the full key."""
        config: RunConfig = Checker(raw).check(cls, raw, "")
        _cross_check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the plain mapping that `parse` takes."""
        result: dict[str, Any] = plain(self)
        return result

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with top-level fields changed."""
        return dataclasses.replace(self, **changes)

    def fingerprint(self, leaving_out: Iterable[str] = ()) -> str:
        """Hash of all that decides the numbers, but for top-level fields left out: equal for the same run repeated.

        The number of threads decides no more than the order of sums.
        """
        tree = self.to_dict()
        for name in ("results_dir", "tracking", "sweep", "choices", "scale", "parallel", "threads", *leaving_out):
            del tree[name]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _cross_check(config: RunConfig) -> None:
    if not config.results_dir.strip():
        raise UserError("results_dir is empty; name a folder, such as results_dir=results")
    if not config.evaluation.lengths:
        raise UserError("evaluation.lengths=[] is empty: name at least one length, such as evaluation.lengths=[16]")
    training = config.training
    if training.accumulation > training.batch_size:
        raise UserError(
            f"training.accumulation={training.accumulation} is more than training.batch_size={training.batch_size}"
        )


def write_config(config: RunConfig, path: Path) -> None:
    """Write the config as YAML, or as JSON (which is YAML too) on a machine without a YAML package."""
    try:
        import yaml
    except ImportError:
        path.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    else:
        path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))


def read_config(path: Path) -> RunConfig:
    """Read a saved config, YAML or JSON and of an earlier version too, with the same checks as the command line."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"cannot read the config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the config {path}: it is not text") from error
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = parse_value(text, f"{path} is neither YAML nor JSON")
    if not isinstance(raw, Mapping):
        raise UserError(f"{path} holds no config: expected keys such as 'task' and 'model'")
    try:
        return RunConfig.parse(migrate(raw))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
