"""The sequential sweep: one small equation in d unknowns for each token (left open in the paper, sec. 5)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from fpexp.errors import UserError
from fpexp.fixed_point.iterate import Stopping, iterate
from fpexp.fixed_point.picard import Damped, Damping
from fpexp.fixed_point.types import Cap, Solver, SolveResult, Sweepable, TokenRecord, TokenwiseProblem
from fpexp.ops.sweep import SweepSettings
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
        backend: Literal["auto", "reference", "cpu", "triton"] = "auto",
    ) -> None:
        self.tolerance, self.tolerance_kind = tolerance, tolerance_kind
        self.inner_max_iterations = inner_max_iterations
        self.damping, self.damping_decay, self.patience = damping, damping_decay, patience
        self.divergence_limit, self.backend = divergence_limit, backend

    @classmethod
    def like(cls, solver: Solver) -> Sequential:
        """Return `solver` where it is sequential, else a sequential solver of its tolerance and defaults.

        UserError where `solver` has no tolerance.
        """
        if isinstance(solver, Sequential):
            return solver
        tolerance = getattr(solver, "tolerance", None)
        if tolerance is None:
            raise UserError(f"{type(solver).__name__} has no tolerance that the sequential solver could take over")
        return cls(tolerance=tolerance, tolerance_kind=getattr(solver, "tolerance_kind", "relative"))

    @torch.no_grad()
    def solve(self, problem: TokenwiseProblem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve token by token, by a fused kernel where there is one; `cap` and `training` change nothing here."""
        del cap, training
        return self._sweep(problem)[0]

    @torch.no_grad()
    def carry(self, problem: TokenwiseProblem) -> tuple[SolveResult, Any]:
        """Solve as `solve` does and return the state after the last token too; ValueError for a padded problem."""
        if problem.mask is not None:
            raise ValueError("the state after padding is not that after the last real token; leave the padding out")
        return self._sweep(problem)

    def _sweep(self, problem: TokenwiseProblem) -> tuple[SolveResult, Any]:
        if self.backend != "reference" and isinstance(problem, Sweepable):
            swept = problem.sweep(self._sweep_settings(), self.backend)
            if swept is not None:
                record = TokenRecord(swept.iterations, swept.residual, swept.status)
                return replace(record.result(swept.value), known=swept.known), problem.state_after(swept)
        if self.backend in ("cpu", "triton"):
            raise UserError(
                f"solver.backend={self.backend}: no fused sweep for this model here; use solver.backend=auto"
            )
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

    def _solve_tokens(self, problem: TokenwiseProblem) -> tuple[SolveResult, Any]:
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
        return record.result(torch.cat([r.value for r in results], dim=1)), state
