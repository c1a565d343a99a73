"""The lagged iteration: the scan's h_{t-1} is that of the iterate before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.fixed_point.iterate import Stopping, iterate
from fpexp.fixed_point.picard import Damped, DampedIteration
from fpexp.fixed_point.types import Cap, LaggedProblem, Problem, SolveResult


@dataclass(frozen=True)
class Pair:
    """(y, memory) <- evaluate_lagged(y, memory) as a problem of one tensor (B, T, d + m): y, then the memory flat.

    `width` is d, `shape` that of a token's memory.
    """

    problem: LaggedProblem
    width: int
    shape: torch.Size

    @property
    def mask(self) -> Tensor | None:
        """(B, T), true at real tokens; None: all are real."""
        return self.problem.mask

    def start(self) -> Tensor:
        """Return zeros (B, T, d + m)."""
        return self._join(self.problem.start(), self.problem.start_lagged())

    def evaluate(self, pair: Tensor) -> Tensor:
        """Return the lagged map at `pair`, (B, T, d + m)."""
        y, memory = pair[..., : self.width], pair[..., self.width :].unflatten(-1, self.shape)
        return self._join(*self.problem.evaluate_lagged(y, memory))

    def select(self, rows: Tensor) -> Self:
        """Return the problem of the sequences `rows` alone; the memory is in the iterate and goes with it."""
        return replace(self, problem=self.problem.select(rows))

    def _join(self, y: Tensor, memory: Tensor) -> Tensor:
        return torch.cat([y, memory.flatten(2)], dim=-1)


@dataclass(frozen=True)
class PairStopping(Stopping):
    """The residual of y or that of the memory, whichever is larger; each relative to its own size.

    y alone would stop at once where the memory has still to travel: H_t reaches token t + n after n iterations, and on
    the way moves tokens that y's residual does not see.
    """

    width: int = 0

    def measure(self, f_y: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual of each sequence and the size of both, (B,) each."""
        of_y, of_memory = (
            super(PairStopping, self).measure(f_part, part, mask)
            for f_part, part in zip(self._parts(f_y), self._parts(y), strict=True)
        )
        return torch.maximum(of_y[0], of_memory[0]), torch.maximum(of_y[1], of_memory[1])

    def _parts(self, pair: Tensor) -> tuple[Tensor, Tensor]:
        return pair[..., : self.width], pair[..., self.width :]


class Lagged(DampedIteration):
    """Whole-sequence solver without a scan: every token of (y, H) from the iterate before (paper's first version).

        H_t <- decay_t * H_{t-1}^{previous iterate} + write_t,   y_t <- read_t(H_t)

    has the fixed point of picard's map, but carries nothing further than one token an iteration: it needs about T of
    them. It has converged when y and H have both stopped, and the residual that is reported is the larger one. The
    same iterate's residual under f, whose scan carries at once, is another number. Settings and damping are picard's.
    """

    @torch.no_grad()
    def solve(self, problem: Problem, cap: Cap, *, training: bool) -> SolveResult:
        """Solve under `cap`. In training the batch stops together at the outlier quantile.

        UserError where the problem has no `evaluate_lagged`.
        """
        if not isinstance(problem, LaggedProblem):
            raise UserError(
                f"solver=lagged needs evaluate_lagged, which {type(problem).__name__} does not have; use solver=picard"
            )
        width, shape = problem.start().shape[-1], problem.start_lagged().shape[2:]
        stopping = PairStopping(
            self.tolerance, self.tolerance_kind, self.divergence_limit, training, self.outlier_quantile, width
        )
        method = Damped(self.damping, self.damping_decay, self.patience)
        result = iterate(Pair(problem, width, shape), method, cap, stopping)
        return replace(result, value=result.value[..., :width].clone())  # and not a view that keeps the memory
