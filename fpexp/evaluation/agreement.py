"""How far apart the fixed points are that two solvers find of a trained model (paper fig. 12)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fpexp.build import Experiment
from fpexp.evaluation.metrics import Accuracy
from fpexp.fixed_point import Cap, Solver, SolveResult, Status
from fpexp.fixed_point.iterate import EPSILON
from fpexp.machine import autocast
from fpexp.randomness import generator
from fpexp.tasks import IGNORE, Batch


class Twice:
    """Finds every fixed point by two solvers, keeps what both have found, and hands on what the first has."""

    def __init__(self, one: Solver, other: Solver) -> None:
        self.one, self.other = one, other
        self.whole_sequence = one.whole_sequence
        self.found: list[tuple[SolveResult, SolveResult]] = []

    def solve(self, problem: Any, cap: Cap, *, training: bool) -> SolveResult:
        """Solve by both under the same cap."""
        one, other = (solver.solve(problem, cap, training=training) for solver in (self.one, self.other))
        self.found.append((one, other))
        return one


@torch.no_grad()
def agreement(
    experiment: Experiment, against: Solver, lengths: Sequence[int], samples: int
) -> Iterator[dict[str, Any]]:
    """Yield one row a length: how far the solver of the model's layers is from `against`, on fresh test sequences.

    The distance of a token is |y - y'|_inf / |y'|_inf, y' by `against`; of a sequence its largest, over all layers,
    of which both solvers are given the same input. `answers_alike` is the share of scored tokens that the model
    answers alike by either.
    """
    size = experiment.config.evaluation.batch_size
    for length in sorted(set(lengths)):
        source = generator(experiment.config.seed, "test", length)
        sums = _Sums()
        for start in range(0, samples, size):
            batch = experiment.task.sample(min(size, samples - start), length, source)
            sums.add(experiment, against, batch.to(experiment.config.device))
        yield {"length": length, **sums.summary()}


class _Sums:
    """What is known of the sequences of one length."""

    def __init__(self) -> None:
        self.distance: list[Tensor] = []
        self.status: list[Tensor] = []
        self.iterations: list[Tensor] = []
        self.accuracies = Accuracy(), Accuracy()
        self.alike = 0

    def add(self, experiment: Experiment, against: Solver, batch: Batch) -> None:
        """Solve a batch by both, and let the model answer by either."""
        layers: list[Any] = [module for module in experiment.model.modules() if hasattr(module, "solver")]
        twice = [Twice(layer.solver, against) for layer in layers]
        logits = [_logits(experiment, layers, solvers, batch) for solvers in (twice, [against] * len(layers))]
        for answered, accuracy in zip(logits, self.accuracies, strict=True):
            accuracy.add(answered, batch.targets, batch.examples)
        same = logits[0].argmax(-1) == logits[1].argmax(-1)
        self.alike += int(same[batch.targets != IGNORE].sum())
        found = [pair for solver in twice for pair in solver.found]
        self.distance.append(torch.stack([_distance(one, other, batch.mask) for one, other in found]).amax(0))
        self.status.append(torch.stack([result.status for pair in found for result in pair]).amax(0))
        counts = [torch.stack([result.iterations for result in pair]) for pair in found]
        self.iterations.append(torch.stack(counts).amax(0))

    def summary(self) -> dict[str, Any]:
        """Return the row."""
        distance, iterations = torch.cat(self.distance), torch.cat(self.iterations, dim=1).double()
        both = torch.cat(self.status) == Status.CONVERGED
        one, other = (accuracy.summary() for accuracy in self.accuracies)
        return {
            "n": len(distance),
            "distance_mean": float(distance.mean()),
            "distance_median": float(distance.median()),
            "distance_max": float(distance.max()),
            "distance_max_converged": float(distance[both].max()) if both.any() else None,
            "both_converged": float(both.double().mean()),
            "iterations_mean": float(iterations[0].mean()),
            "iterations_mean_against": float(iterations[1].mean()),
            "token_accuracy": one["token_accuracy"],
            "token_accuracy_against": other["token_accuracy"],
            "answers_alike": self.alike / self.accuracies[0].tokens if self.accuracies[0].tokens else None,
        }


def _logits(experiment: Experiment, layers: Sequence[Any], solvers: Sequence[Any], batch: Batch) -> Tensor:
    """Return what the model says with these solvers in the place of its layers' own, which it has again afterwards."""
    own = [layer.solver for layer in layers]
    try:
        for layer, solver in zip(layers, solvers, strict=True):
            layer.solver = solver
        with autocast(experiment.config):
            logits: Tensor = experiment.model(batch.inputs, experiment.schedule.evaluation_cap(), batch.mask).logits
        return logits
    finally:
        for layer, solver in zip(layers, own, strict=True):
            layer.solver = solver


def _distance(one: SolveResult, other: SolveResult, mask: Tensor | None) -> Tensor:
    """Return the largest relative distance of a real token, (B,)."""
    difference = (one.value - other.value).abs().amax(-1) / other.value.abs().amax(-1).clamp_min(EPSILON)
    return (difference if mask is None else difference.masked_fill(~mask, 0.0)).amax(-1).float()
