"""The only place where a config becomes objects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fpexp.config.run import RunConfig
from fpexp.config.schema import Component
from fpexp.errors import FpexpError, UserError
from fpexp.fixed_point import Auto, Gradient, Schedule, Solver
from fpexp.footprint import check_evaluation, check_training
from fpexp.machine import is_out_of_memory
from fpexp.models import LanguageModel
from fpexp.ops.backend import check_device
from fpexp.randomness import seeded
from fpexp.tasks import Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
"""Type of the weights at each precision: bfloat16 is autocast over float32 weights."""


@dataclass(frozen=True)
class Experiment:
    """What a run is made of; `notes` are one-line remarks on choices that were made for the user."""

    config: RunConfig
    task: Task
    model: LanguageModel
    schedule: Schedule
    notes: tuple[str, ...] = ()


def settle(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Replace every `auto` by what it means on this machine; return the config and what to tell the user."""
    told: tuple[str, ...] = ()
    if config.device == "auto":
        config = config.replace(device="cuda" if torch.cuda.is_available() else "cpu")
        told = ("device=auto: cpu (no GPU here)",) if config.device == "cpu" else ()
    _check_device(config.device)
    config, notes = settle_for_device(config)
    return config, (*told, *notes)


def settle_for_device(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Replace what is `auto` for the config's device, whether this machine has it or not."""
    notes: list[str] = []
    if config.precision == "auto":
        config = config.replace(precision="float32" if config.device == "cpu" else "bfloat16")
    if config.solver.resolve() is Auto:
        capped = bool(getattr(config.schedule.resolve(), "caps_training", False))
        name, reason = Auto.choose(config.device, capped, functools.partial(_longest_solve, config))
        if uses_solver(config.model):
            notes.append(f"solver=auto: {name} ({reason})")
        config = config.replace(solver=config.solver.settings[name])
    training = config.training
    if training.warmup_steps > training.steps:
        notes.append(
            f"training ends in its warm-up: training.warmup_steps={training.warmup_steps}, "
            f"training.steps={training.steps}"
        )
    return config, tuple(notes)


def build(config: RunConfig, processes: int = 1) -> Experiment:
    """Build task, model and schedule of a run; the weights are drawn from the run's seed.

    `processes` share its batches out.
    """
    experiment = check(config, processes)
    with seeded(config.seed, "initialisation"):
        model = _make_model(experiment.config, experiment.task)
    model = model.to(experiment.config.device, DTYPES[experiment.config.precision])
    return dataclasses.replace(experiment, model=model)


def check(config: RunConfig, processes: int = 1) -> Experiment:
    """Check all that building needs; return the experiment with a model whose weights take no memory."""
    config, notes = settle(config)
    task: Task = make(config.task)
    for index, length in enumerate(config.evaluation.lengths):
        task.check_length(length, f"evaluation.lengths[{index}]")
    schedule: Schedule = make(config.schedule)
    solver: Solver = make(config.solver)
    gradient: Gradient = make(config.gradient)
    _expect(task, "sample", config.task)
    _expect(schedule, "training_cap", config.schedule)
    _expect(solver, "solve", config.solver)
    _expect(gradient, "attach", config.gradient)
    if schedule.caps_training and not solver.whole_sequence and uses_solver(config.model):
        raise UserError(
            f"schedule={config.choices.schedule} caps whole-sequence iterations, which the sequential solver does not "
            "make; use solver=picard, or schedule=converge"
        )
    check_device(getattr(solver, "backend", "auto"), torch.device(config.device), "solver.backend")
    model = _sketch(config, task)
    check_training(config, task, model, processes)
    check_evaluation(config, task, model, config.evaluation.lengths, "evaluation.lengths", "evaluation.batch_size")
    return Experiment(config, task, model, schedule, notes)


def parameter_count(config: RunConfig) -> int:
    """Return the number of trainable parameters of a run's model, without the memory that they take."""
    config, _ = settle(config)
    return _sketch(config, make(config.task)).parameter_count()


def _sketch(config: RunConfig, task: Task) -> LanguageModel:
    """Return the model with weights that take no memory."""
    try:
        with torch.device("meta"):
            return _make_model(config, task)
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise UserError("no memory holds a model of this size; lower model.d_model or its other sizes") from error
        raise


def _make_model(config: RunConfig, task: Task) -> LanguageModel:
    model = make(
        config.model,
        vocabulary_size=task.vocabulary_size,
        solver=make(config.solver),
        gradient=make(config.gradient),
    )
    if not isinstance(model, LanguageModel):
        raise UserError(f"{config.model.target} must return a fpexp.models.LanguageModel, not {type(model).__name__}")
    return model


def make(component: Component, **available: Any) -> Any:
    """Call a component's target with its settings and with those of `available` that it asks for by name."""
    target = component.resolve()
    wanted = _given_by_builder(target)
    missing = [name for name in wanted if name not in available]
    if missing:
        raise UserError(f"{component.target} asks for {', '.join(missing)}, which is not to be had here")
    try:
        return target(**{name: available[name] for name in wanted}, **_arguments(component.settings))
    except SystemExit as error:
        raise FpexpError(f"{component.target} ended the process with exit code {error.code}") from error


def _arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested components become factories, since their owner knows what else they need (a mixer's width)."""
    return {name: _factory(v) if isinstance(v, Component) else v for name, v in settings.items()}


def _factory(component: Component) -> Callable[..., Any]:
    return functools.partial(component.resolve(), **_arguments(component.settings))


def _given_by_builder(target: Callable[..., Any]) -> list[str]:
    return [
        parameter.name
        for parameter in inspect.signature(target).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and parameter.default is inspect.Parameter.empty
    ]


def _expect(part: object, method: str, component: Component) -> None:
    if not hasattr(part, method):
        raise UserError(f"{component.target} stands in the wrong place: it has no method '{method}'")


def _longest_solve(config: RunConfig) -> tuple[int, int]:
    """Return the tokens of the longest training sequence, and how many iterations are made on them at most."""
    task: Task = make(config.task)
    length = task.input_length(task.lengths.max)
    schedule: Schedule = make(config.schedule)
    return length, schedule.training_cap(length, torch.Generator()).max_iterations


def uses_solver(model: Component) -> bool:
    """Tell whether a model solves fixed points, so that solver, schedule and gradient mean something to it."""
    return "solver" in _given_by_builder(model.resolve())


def _check_device(device: str) -> None:
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"unknown device '{device}' (auto, cpu, cuda, cuda:<n>)") from error
    if parsed.type not in ("cpu", "cuda"):
        raise UserError(f"device={device} is not supported (auto, cpu, cuda, cuda:<n>)")
    if parsed.type == "cpu" and device != "cpu":
        raise UserError(f"device={device}: a CPU has no number; use device=cpu")
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device={device}: this machine has {torch.cuda.device_count()} CUDA devices; use device=cpu")
