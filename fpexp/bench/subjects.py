"""The models that benchmarks time: fresh ones from conf/, trained ones from a run's folder."""

from __future__ import annotations

from fpexp.bench.context import Context
from fpexp.bench.truth import solving_layers
from fpexp.build import Experiment, build
from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.loading import load_run
from fpexp.models import LanguageModel
from fpexp.tracking.console import warn

TASK = "a5"


def fresh(model: str, *words: str, task: str = TASK) -> Experiment:
    """Build a model at its initialisation, for a task on a CPU at scale=cpu."""
    return build(compose([f"task={task}", f"model={model}", "scale=cpu", "device=cpu", *words]))


def trained(run: str, context: Context) -> tuple[str, Experiment]:
    """Load a run's id and its experiment with the trained weights, on the CPU."""
    loaded = load_run(run, results_dir=context.results_dir, device="cpu")
    for warning in loaded.warnings:
        warn(warning)
    return loaded.run.id, loaded.experiment


def fixed_point_subject(run: str, context: Context) -> tuple[str, Experiment]:
    """Return a name and an experiment whose model solves fixed points: a run's, or a fresh FP-Mamba-K without one."""
    if not run:
        return "FP-Mamba-K at initialisation, not trained", fresh("fp_mamba_k")
    name, experiment = trained(run, context)
    if not solving_layers(experiment.model):
        raise UserError(f"run={run} is a {experiment.config.choices.model}, which solves no fixed point")
    return name, experiment


def check_same_task(run: str, model: LanguageModel, expected: LanguageModel) -> None:
    """Refuse a run that does not share embedding size and vocabulary with what it is compared to."""
    found, wanted = (tuple(m.embedding.weight.shape) for m in (model, expected))
    if found != wanted:
        raise UserError(
            f"run={run} has a vocabulary of {found[0]} and d_model {found[1]}, the benchmark {wanted[0]} and "
            f"{wanted[1]}; name a run of task={TASK} at model.d_model={wanted[1]}"
        )
