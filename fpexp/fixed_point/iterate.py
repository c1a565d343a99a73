"""The one loop: it owns the cap, the stopping rule and the check for non-finite values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fpexp.fixed_point.types import Cap, Problem, SolveResult
from fpexp.ops.token_residual import distances
from fpexp.status import Status

EPSILON = 1e-6


def token_residual(f_y: Tensor, y: Tensor, kind: str = "relative") -> Tensor:
    """Residual of each token (B, T): |f(y)_t - y_t|_inf, relative to max(|f(y)_t|_inf, eps) (paper sec. 3.4)."""
    difference, size = distances(f_y, y)
    return difference if kind == "absolute" else difference / size.clamp_min(EPSILON)


@dataclass(frozen=True)
class Stopping:
    """When to stop: a sequence converges when its largest token residual is at most `tolerance`.

    With `together`, the batch stops as one when all but the fraction `outlier_quantile` of it has converged, and goes
    on as one until then. Otherwise each sequence is frozen as it converges: its result does not depend on the others.
    """

    tolerance: float
    kind: Literal["relative", "absolute"]
    divergence_limit: float
    together: bool
    outlier_quantile: float = 0.0

    def measure(self, f_y: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the residual of each sequence and the size of f(y), (B,) each: the largest over its real tokens."""
        difference, size = distances(f_y, y)
        residual = difference if self.kind == "absolute" else difference / size.clamp_min(EPSILON)
        if mask is not None:
            residual, size = residual.masked_fill(~mask, 0.0), size.masked_fill(~mask, 0.0)
        return residual.amax(-1), size.amax(-1)


class Method(Protocol):
    """One way to choose the next iterate; per-sequence memory is kept by the instance."""

    def advance(self, y: Tensor, f_y: Tensor, residual: Tensor) -> Tensor:
        """Return the next iterate."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep the memory of the sequences `rows` alone."""
        ...


def iterate(problem: Problem, method: Method, cap: Cap, stopping: Stopping) -> SolveResult:
    """Iterate from `problem.start()` until the stopping rule or the cap, whichever is first."""
    y = problem.start()
    record = _Record(y)
    for iteration in range(1, cap.max_iterations + 1):
        f_y = problem.evaluate(y)
        residual, size = stopping.measure(f_y, y, problem.mask)
        status = _status(residual, size, stopping)
        record.update(y, residual, status, iteration)
        ended = status != Status.UNCONVERGED
        if stopping.together:
            bad = status >= Status.DIVERGED
            enough = (~ended).sum() <= stopping.outlier_quantile * len(ended)
            if bad.any() or (cap.stop_early and enough):
                break
        else:
            frozen = ended if cap.stop_early else status >= Status.DIVERGED
            if frozen.any():
                keep = (~frozen).nonzero().squeeze(-1)
                if keep.numel() == 0:
                    break
                record.select(keep)
                problem, y, f_y, residual = problem.select(keep), y[keep], f_y[keep], residual[keep]
                method.select(keep)
        if iteration < cap.max_iterations:
            y = method.advance(y, f_y, residual)
    return record.result(cap)


def _status(residual: Tensor, size: Tensor, stopping: Stopping) -> Tensor:
    status = torch.full_like(residual, Status.UNCONVERGED, dtype=torch.long)
    status[residual <= stopping.tolerance] = Status.CONVERGED
    status[size > stopping.divergence_limit] = Status.DIVERGED
    status[~(residual.isfinite() & size.isfinite())] = Status.NON_FINITE
    return status


def capped(status: Tensor, iterations: Tensor, cap: Cap) -> Tensor:
    """Return `status` with CAP_REACHED where the cap has left a sequence unconverged."""
    return status.masked_fill((status == Status.UNCONVERGED) & (iterations == cap.max_iterations), Status.CAP_REACHED)


class _Record:
    """What is known of each sequence; `rows` are the sequences that are still iterated."""

    def __init__(self, y: Tensor) -> None:
        batch = y.shape[0]
        self.rows: Tensor | None = None
        self.value = y
        self.residual = torch.full((batch,), float("inf"), dtype=y.dtype, device=y.device)
        self.status = torch.full((batch,), Status.UNCONVERGED, dtype=torch.long, device=y.device)
        self.iterations = torch.zeros(batch, dtype=torch.long, device=y.device)

    def update(self, y: Tensor, residual: Tensor, status: Tensor, iteration: int) -> None:
        if self.rows is None:
            self.value, self.residual, self.status = y, residual, status
            self.iterations.fill_(iteration)
            return
        self.value[self.rows] = y
        self.residual[self.rows] = residual
        self.status[self.rows] = status
        self.iterations[self.rows] = iteration

    def select(self, keep: Tensor) -> None:
        if self.rows is None:
            self.value, self.rows = self.value.clone(), keep
        else:
            self.rows = self.rows[keep]

    def result(self, cap: Cap) -> SolveResult:
        return SolveResult(self.value, self.iterations, self.residual, capped(self.status, self.iterations, cap))
