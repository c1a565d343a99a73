"""The sequential sweep: one small equation in d unknowns for each token (left open in the paper, sec. 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from fpexp.errors import UserError
from fpexp.fixed_point.iterate import Stopping, iterate
from fpexp.fixed_point.picard import Damped, Damping
from fpexp.fixed_point.types import Cap, SolveResult, Sweepable, TokenRecord, TokenwiseProblem
from fpexp.ops.fixed_point_sweep import SweepSettings
from fpexp.ranges import Count, Positive


class Sequential:
    """Everything at token t but y_t depends on the past only, so tokens are solved in order, each by damped iteration.

    Each token of each sequence stops on its own, in training too. The caps of a schedule count whole-sequence
    evaluations and do not apply; `inner_max_iterations` bounds the evaluations of one token.
    """

    whole_sequence = False

    def __init__(
        self,
        *,
        tolerance: Positive,
        tolerance_kind: Literal["relative", "absolute"] = "relative",
        inner_max_iterations: Count = 100,
        damping: Damping = 1.0,
        damping_decay: Damping = 0.9,
        patience: Count = 15,
        divergence_limit: Positive = 1e8,
        backend: Literal["auto", "reference", "cpu"] = "auto",
    ) -> None:
        self.tolerance, self.tolerance_kind = tolerance, tolerance_kind
        self.inner_max_iterations = inner_max_iterations
        self.damping, self.damping_decay, self.patience = damping, damping_decay, patience
        self.divergence_limit, self.backend = divergence_limit, backend

    @torch.no_grad()
    def solve(self, problem: TokenwiseProblem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve token by token, by a fused kernel where there is one; `cap` and `training` change nothing here."""
        del cap, training
        if self.backend != "reference" and isinstance(problem, Sweepable):
            swept = problem.sweep(self._sweep_settings())
            if swept is not None:
                record = TokenRecord(swept.iterations, swept.residual, swept.status)
                return replace(record.result(swept.value), known=swept.known)
        if self.backend == "cpu":
            raise UserError("solver.backend=cpu: no fused sweep for this model here; use solver.backend=auto")
        return self._solve_tokens(problem)

    def _sweep_settings(self) -> SweepSettings:
        return SweepSettings(
            tolerance=self.tolerance,
            relative=self.tolerance_kind == "relative",
            inner_max_iterations=self.inner_max_iterations,
            damping=self.damping,
            damping_decay=self.damping_decay,
            patience=self.patience,
            divergence_limit=self.divergence_limit,
        )

    def _solve_tokens(self, problem: TokenwiseProblem) -> SolveResult:
        """The sweep in plain torch, any problem and device."""
        stopping = Stopping(self.tolerance, self.tolerance_kind, self.divergence_limit, together=False)
        inner = Cap(self.inner_max_iterations)
        state = problem.initial_state()
        results = []
        for t in range(problem.length):
            token = problem.token_problem(t, state)
            method = Damped(self.damping, self.damping_decay, self.patience)
            result = iterate(token, method, inner, stopping)
            state = problem.advance(token, result.value)
            results.append(result)
        record = TokenRecord(
            iterations=torch.stack([r.iterations for r in results], dim=1),
            residual=torch.stack([r.residual for r in results], dim=1),
            status=torch.stack([r.status for r in results], dim=1),
        )
        return record.result(torch.cat([r.value for r in results], dim=1))
