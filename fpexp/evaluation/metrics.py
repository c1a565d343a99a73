"""Loss and accuracies over scored positions, and what solvers report, as sums that batches add to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from fpexp.fixed_point import BackwardRecord, SolveResult, Status
from fpexp.tasks import IGNORE
from fpexp.world import World


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy (nats) summed over scored positions; logits (B, T, V), targets (B, T)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


@dataclass
class Accuracy:
    """Sums of correct predictions; `add` takes batches in any split and order to the same result."""

    loss: float = 0.0
    tokens: int = 0
    tokens_right: int = 0
    sequences: int = 0
    sequences_right: int = 0
    last_right: int = 0

    def add(self, logits: Tensor, targets: Tensor, examples: Tensor | None = None) -> None:
        """Count a batch: logits (B, T, V), targets and examples (B, T) as in `Batch`."""
        self.add_predictions(logits.argmax(-1), targets, examples)
        self.loss += float(summed_loss(logits.detach(), targets))

    def add_predictions(self, predictions: Tensor, targets: Tensor, examples: Tensor | None = None) -> None:
        """Count predicted indices (B, T). A sequence is an example; one without a scored position does not count."""
        scored = targets != IGNORE
        wrong = (predictions != targets) & scored
        self.tokens += int(scored.sum())
        self.tokens_right += int(scored.sum() - wrong.sum())
        rows, positions = scored.nonzero(as_tuple=True)
        if len(rows) == 0:
            return
        numbers = rows if examples is None else rows * scored.shape[1] + examples[rows, positions]
        _, lengths = numbers.unique_consecutive(return_counts=True)  # scored positions of each example
        last = lengths.cumsum(0) - 1
        mistakes = wrong[rows, positions].cumsum(0)[last].diff(prepend=lengths.new_zeros(1))
        self.sequences += len(lengths)
        self.sequences_right += int((mistakes == 0).sum())
        self.last_right += int((~wrong[rows, positions])[last].sum())

    def over(self, world: World) -> Accuracy:
        """Return the sums over all processes."""
        loss, *counts = map(sum, zip(*world.gather(astuple(self)), strict=True))
        return Accuracy(loss, *map(int, counts))

    def summary(self) -> dict[str, Any]:
        """Return the accuracies; None where nothing was scored."""
        return {
            "token_accuracy": _ratio(self.tokens_right, self.tokens),
            "last_token_accuracy": _ratio(self.last_right, self.sequences),
            "sequence_accuracy": _ratio(self.sequences_right, self.sequences),
            "loss": _ratio(self.loss, self.tokens),
            "n": self.sequences,
        }


def scaled_accuracy(accuracy: float | None, chance: float) -> float | None:
    """Return (accuracy - chance) / (1 - chance): 0 for a guess, 1 for all right."""
    return None if accuracy is None else (accuracy - chance) / (1 - chance)


@dataclass
class TextStatistics:
    """How often each token of a text was scored: `counts` (V,)."""

    counts: Tensor

    @classmethod
    def of(cls, vocabulary_size: int) -> TextStatistics:
        """Return those of no text."""
        return cls(torch.zeros(vocabulary_size, dtype=torch.long))

    def add(self, targets: Tensor) -> None:
        """Count a batch: targets (B, T) as in `Batch`."""
        self.counts += targets[targets != IGNORE].cpu().bincount(minlength=len(self.counts))

    def over(self, world: World) -> TextStatistics:
        """Return the counts over all processes."""
        counts = torch.tensor(world.gather(self.counts.tolist()), dtype=torch.float64).sum(0)
        return TextStatistics(counts.long())

    def summary(self, loss: float, text_bytes: int) -> dict[str, Any]:
        """Return perplexities of a model with `loss` nats on the whole text of so many bytes, and the best that one
        distribution for all positions could have.
        """
        tokens = int(self.counts.sum())
        shares = self.counts / tokens
        return {
            "perplexity": _exp(loss, tokens),
            "byte_perplexity": _exp(loss, text_bytes),
            "unigram_perplexity": _exp(float(torch.special.entr(shares).sum()), 1),
            "tokens": tokens,
            "bytes": text_bytes,
        }


def _exp(nats: float, parts: int) -> float:
    """Return e^(nats / parts), infinity where that is no number or larger than any."""
    return math.exp(nats / parts) if parts and nats / parts < 700 else math.inf


@dataclass
class BackwardStatistics:
    """What the equations of one layer's backward passes took, summed over them."""

    equations: int = 0
    iterations: int = 0
    iterations_max: int = 0
    residual_max: float = 0.0

    def add(self, record: BackwardRecord) -> None:
        """Count what a backward pass has recorded."""
        if sum(map(len, record.iterations)) == 0:
            return
        iterations, residual = torch.cat(record.iterations), torch.cat(record.residual)
        self.equations += len(iterations)
        self.iterations += int(iterations.sum())
        self.iterations_max = max(self.iterations_max, int(iterations.max()))
        self.residual_max = _worst([self.residual_max, float(residual.max())])

    @classmethod
    def of_all(cls, parts: Sequence[Self]) -> Self:
        """Return the statistics of several parts together."""
        return cls(
            equations=sum(part.equations for part in parts),
            iterations=sum(part.iterations for part in parts),
            iterations_max=max(part.iterations_max for part in parts),
            residual_max=_worst([part.residual_max for part in parts]),
        )

    def summary(self) -> dict[str, Any]:
        """Return mean and extremes over the equations; empty where there was none."""
        if self.equations == 0:
            return {}
        return {
            "gradient_iterations_mean": self.iterations / self.equations,
            "gradient_iterations_max": self.iterations_max,
            "gradient_residual_max": self.residual_max,
        }


@dataclass
class SolveStatistics:
    """What the solvers of one layer reported, summed over sequences."""

    sequences: int = 0
    iterations: int = 0
    iterations_max: int = 0
    converged: int = 0
    cap_hits: int = 0
    diverged: int = 0
    residual_max: float = 0.0
    backward: BackwardStatistics = field(default_factory=BackwardStatistics)

    def add(self, solve: SolveResult) -> None:
        """Count the solve of one batch and, where it came to one, of its backward pass."""
        self.sequences += len(solve.status)
        self.iterations += int(solve.iterations.sum())
        self.iterations_max = max(self.iterations_max, int(solve.iterations.max()))
        self.converged += int((solve.status == Status.CONVERGED).sum())
        self.cap_hits += int((solve.status == Status.CAP_REACHED).sum())
        self.diverged += int((solve.status >= Status.DIVERGED).sum())
        self.residual_max = _worst([self.residual_max, float(solve.residual.max())])
        if solve.backward is not None:
            self.backward.add(solve.backward)

    @classmethod
    def of_all(cls, parts: Sequence[Self]) -> Self:
        """Return the statistics of several parts together."""
        return cls(
            sequences=sum(part.sequences for part in parts),
            iterations=sum(part.iterations for part in parts),
            iterations_max=max(part.iterations_max for part in parts),
            converged=sum(part.converged for part in parts),
            cap_hits=sum(part.cap_hits for part in parts),
            diverged=sum(part.diverged for part in parts),
            residual_max=_worst([part.residual_max for part in parts]),
            backward=BackwardStatistics.of_all([part.backward for part in parts]),
        )

    def numbers(self) -> list[float]:
        """Return all fields as numbers, for `from_numbers`."""
        *own, backward = astuple(self)
        return [*own, *backward]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Self:
        """Return the statistics that the numbers are of."""
        sequences, iterations, most, converged, cap_hits, diverged = map(int, numbers[:6])
        equations, products, most_products = map(int, numbers[7:10])
        backward = BackwardStatistics(equations, products, most_products, numbers[10])
        return cls(sequences, iterations, most, converged, cap_hits, diverged, numbers[6], backward)

    def summary(self) -> dict[str, Any]:
        """Return means and extremes over the sequences."""
        return {
            "iterations_mean": _ratio(self.iterations, self.sequences),
            "iterations_max": self.iterations_max,
            "fraction_converged": _ratio(self.converged, self.sequences),
            "cap_hits": self.cap_hits,
            "diverged": self.diverged,
            "residual_max": self.residual_max,
            **self.backward.summary(),
        }


@dataclass
class LayerStatistics:
    """`SolveStatistics` of each layer that solves."""

    layers: list[SolveStatistics] = field(default_factory=list)

    def add(self, solves: Sequence[SolveResult]) -> None:
        """Count one forward pass."""
        self.expect(len(solves))
        for layer, solve in zip(self.layers, solves, strict=True):
            layer.add(solve)

    def expect(self, layers: int) -> None:
        """Make room for so many layers, also where no pass of theirs is counted."""
        while len(self.layers) < layers:
            self.layers.append(SolveStatistics())

    def over(self, world: World) -> LayerStatistics:
        """Return the statistics over all processes."""
        if world.is_alone or not self.layers:
            return self
        rows = world.gather([number for layer in self.layers for number in layer.numbers()])
        size = len(rows[0]) // len(self.layers)
        starts = range(0, len(rows[0]), size)
        parts = [[SolveStatistics.from_numbers(row[start : start + size]) for row in rows] for start in starts]
        return LayerStatistics([SolveStatistics.of_all(part) for part in parts])

    def summary(self) -> dict[str, Any]:
        """Return the numbers over all layers, and of each layer under `layers`; empty for a model without solver."""
        if not self.layers:
            return {}
        rows = [layer.summary() for layer in self.layers]
        return {
            "iterations_mean": sum(row["iterations_mean"] for row in rows) / len(rows),
            "iterations_max": max(row["iterations_max"] for row in rows),
            "fraction_converged": min(row["fraction_converged"] for row in rows),
            "cap_hits": sum(row["cap_hits"] for row in rows),
            "diverged": sum(row["diverged"] for row in rows),
            "residual_max": _worst([row["residual_max"] for row in rows]),
            **_gradient_summary([row for row in rows if "gradient_iterations_mean" in row]),
            "layers": rows,
        }


def _gradient_summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rows:
        return {}
    return {
        "gradient_iterations_mean": sum(row["gradient_iterations_mean"] for row in rows) / len(rows),
        "gradient_iterations_max": max(row["gradient_iterations_max"] for row in rows),
        "gradient_residual_max": _worst([row["gradient_residual_max"] for row in rows]),
    }


def _worst(residuals: Sequence[float]) -> float:
    """Return the largest, NaN if any is: a NaN compares with nothing and would be lost in `max`."""
    return math.nan if any(map(math.isnan, residuals)) else max(residuals)


def _ratio(part: float, whole: int) -> float | None:
    return part / whole if whole else None
