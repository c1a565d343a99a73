"""Picard iteration, y <- f(y), damped where a sequence stalls."""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.fixed_point.iterate import Stopping, capped, iterate
from fpexp.fixed_point.types import Cap, FusedIteration, Problem, SolveResult
from fpexp.ops.fixed_point_iteration import IterationSettings
from fpexp.ranges import Count, Positive, Probability, Range

Damping = Annotated[float, Range(above=0, maximum=1)]


class Damped:
    """y <- delta f(y) + (1 - delta) y, per sequence (paper app. D.3).

    delta starts at `damping` and is multiplied by `decay` after `patience` iterations in which the residual of the
    sequence has not fallen below its best.
    """

    def __init__(self, damping: float, decay: float, patience: int) -> None:
        self.damping, self.decay, self.patience = damping, decay, patience
        self.delta: Tensor | None = None
        self.best: Tensor
        self.stalled: Tensor

    def advance(self, y: Tensor, f_y: Tensor, residual: Tensor) -> Tensor:
        """Return the next iterate, (B, T, d)."""
        delta, _ = self.observe(residual)
        return torch.lerp(y, f_y, delta[:, None, None])

    def observe(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the newest residual; return delta and where it has just decayed, (B,) each."""
        if self.delta is None:
            self.delta = torch.full_like(residual, self.damping)
            self.best = torch.full_like(residual, float("inf"))
            self.stalled = torch.zeros_like(residual)
        improved = residual < self.best
        self.best = torch.where(improved, residual, self.best)
        self.stalled = torch.where(improved, 0.0, self.stalled + 1)
        decays = self.stalled >= self.patience
        self.delta = torch.where(decays, self.delta * self.decay, self.delta)
        self.stalled = torch.where(decays, 0.0, self.stalled)
        return self.delta, decays

    def select(self, rows: Tensor) -> None:
        """Keep the memory of the sequences `rows` alone."""
        if self.delta is not None:
            self.delta, self.best, self.stalled = self.delta[rows], self.best[rows], self.stalled[rows]


class DampedIteration:
    """The settings of a whole-sequence solver that damps its iterates."""

    whole_sequence = True

    def __init__(
        self,
        *,
        tolerance: Positive,
        tolerance_kind: Literal["relative", "absolute"] = "relative",
        outlier_quantile: Probability = 0.25,
        damping: Damping = 1.0,
        damping_decay: Damping = 0.9,
        patience: Count = 15,
        divergence_limit: Positive = 1e8,
    ) -> None:
        self.tolerance, self.tolerance_kind = tolerance, tolerance_kind
        self.outlier_quantile = outlier_quantile
        self.damping, self.damping_decay, self.patience = damping, damping_decay, patience
        self.divergence_limit = divergence_limit


class Picard(DampedIteration):
    """Whole-sequence solver: every iteration evaluates f on all tokens (paper sec. 3.4)."""

    def __init__(
        self,
        *,
        tolerance: Positive,
        tolerance_kind: Literal["relative", "absolute"] = "relative",
        outlier_quantile: Probability = 0.25,
        damping: Damping = 1.0,
        damping_decay: Damping = 0.9,
        patience: Count = 15,
        divergence_limit: Positive = 1e8,
        backend: Literal["auto", "reference", "triton"] = "auto",
    ) -> None:
        super().__init__(
            tolerance=tolerance,
            tolerance_kind=tolerance_kind,
            outlier_quantile=outlier_quantile,
            damping=damping,
            damping_decay=damping_decay,
            patience=patience,
            divergence_limit=divergence_limit,
        )
        self.backend = backend

    @torch.no_grad()
    def solve(self, problem: Problem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve under `cap`, by a fused kernel where there is one.

        In training the batch stops together at the outlier quantile.
        """
        if self.backend != "reference" and isinstance(problem, FusedIteration):
            found = problem.iterate(self._settings(cap, training), self.backend)
            if found is not None:
                status = capped(found.status, found.iterations, cap)
                return SolveResult(found.value, found.iterations, found.residual, status)
        if self.backend == "triton":
            raise UserError("solver.backend=triton: no fused iteration for this model here; use solver.backend=auto")
        stopping = Stopping(self.tolerance, self.tolerance_kind, self.divergence_limit, training, self.outlier_quantile)
        return iterate(problem, Damped(self.damping, self.damping_decay, self.patience), cap, stopping)

    def _settings(self, cap: Cap, training: bool) -> IterationSettings:
        return IterationSettings(
            tolerance=self.tolerance,
            relative=self.tolerance_kind == "relative",
            divergence_limit=self.divergence_limit,
            together=training,
            outlier_quantile=self.outlier_quantile,
            damping=self.damping,
            damping_decay=self.damping_decay,
            patience=self.patience,
            max_iterations=cap.max_iterations,
            stop_early=cap.stop_early,
        )
