"""The sequential sweep: one small equation in d unknowns for each token (left open in the paper, sec. 5)."""

from __future__ import annotations

from typing import Literal

import torch

from fpexp.fixed_point.iterate import Stopping, iterate
from fpexp.fixed_point.picard import Damped, Damping
from fpexp.fixed_point.types import Cap, SolveResult, TokenRecord, TokenwiseProblem
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
    ) -> None:
        self.tolerance, self.tolerance_kind = tolerance, tolerance_kind
        self.inner_max_iterations = inner_max_iterations
        self.damping, self.damping_decay, self.patience = damping, damping_decay, patience
        self.divergence_limit = divergence_limit

    @torch.no_grad()
    def solve(self, problem: TokenwiseProblem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve token by token; `cap` and `training` change nothing here."""
        del cap, training
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
