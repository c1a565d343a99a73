"""What a layer hands to a solver, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from fpexp.ops.fixed_point_iteration import IterationResult, IterationSettings
from fpexp.ops.sweep import SweepResult, SweepSettings


@dataclass(frozen=True)
class Cap:
    """Bound on whole-sequence evaluations of f. Without `stop_early` exactly that many are made."""

    max_iterations: int
    stop_early: bool = True


@dataclass(frozen=True)
class SolveResult:
    """What a solver found.

    `value` (B, T, d) is the iterate that `residual` (B,) was measured at; `status` (B,) holds `Status` codes, and a
    NaN residual is never CONVERGED. `iterations` (B,) counts whole-sequence evaluations of f, or, for the sequential
    solver, the largest number of evaluations that one token of the sequence took; `tokens` then has them all. `known`
    is what the problem's own sweep has left for `evaluate`, so that it need not compute it again. `backward` is there
    where the gradient solves equations of its own.
    """

    value: Tensor
    iterations: Tensor
    residual: Tensor
    status: Tensor
    tokens: TokenRecord | None = None
    known: Any = None
    backward: BackwardRecord | None = None

    def used(self) -> SolveResult:
        """Return the result without `known`, which is as large as the activations of an evaluation."""
        return self if self.known is None else replace(self, known=None)

    def prefix(self, length: int) -> SolveResult:
        """Return what the same solver finds on the first `length` tokens; needs `tokens`."""
        if self.tokens is None:
            raise ValueError("a whole-sequence solve says nothing of its prefixes; solve them by themselves")
        return self.tokens.first(length).result(self.value[:, :length])


@dataclass(frozen=True)
class TokenRecord:
    """How each token was solved, (B, T) each, from a solver that solves tokens in order."""

    iterations: Tensor
    residual: Tensor
    status: Tensor

    def first(self, length: int) -> TokenRecord:
        """Return the record of the first `length` tokens."""
        return TokenRecord(self.iterations[:, :length], self.residual[:, :length], self.status[:, :length])

    def result(self, value: Tensor) -> SolveResult:
        """Return the result whose sequences are as good as their worst token; a NaN residual stays one."""
        return SolveResult(value, self.iterations.amax(-1), self.residual.amax(-1), self.status.amax(-1), self)


@dataclass
class BackwardRecord:
    """What the linear equations of a backward pass took: filled in while it runs, empty before.

    Each entry has the `iterations` and relative `residual` of some equations that were solved together, (n,) each.
    """

    iterations: list[Tensor] = field(default_factory=list)
    residual: list[Tensor] = field(default_factory=list)

    def add(self, iterations: Tensor, residual: Tensor, mask: Tensor | None) -> None:
        """Add the equations of a batch, (B,) each; one without a real token in `mask` (B, T) does not count."""
        if mask is not None:
            real = mask.any(-1)
            iterations, residual = iterations[real], residual[real]
        self.iterations.append(iterations)
        self.residual.append(residual)


class Problem(Protocol):
    """A causal map f on (B, T, d) whose fixed point is sought; every solver starts from `start()`."""

    @property
    def mask(self) -> Tensor | None:
        """(B, T), true at real tokens; None: all are real."""
        ...

    def start(self) -> Tensor:
        """Return the first iterate, zeros (B, T, d)."""
        ...

    def evaluate(self, y: Tensor) -> Tensor:
        """Return f(y), (B, T, d)."""
        ...

    def select(self, rows: Tensor) -> Self:
        """Return the problem of the sequences `rows` (long indices) alone."""
        ...


@runtime_checkable
class LaggedProblem(Problem, Protocol):
    """A problem whose scan can take what it carries from the iterate before: see `Lagged`."""

    def start_lagged(self) -> Tensor:
        """Return the first memory, zeros (B, T, ...) of y's type: what each token hands to the next."""
        ...

    def evaluate_lagged(self, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next y (B, T, d) and memory, each token by y and the memory of the token before it."""
        ...


@runtime_checkable
class TokenwiseProblem(Problem, Protocol):
    """A problem that can also be solved token by token, carrying what the past leaves behind."""

    @property
    def length(self) -> int:
        """Number of tokens T."""
        ...

    def initial_state(self) -> Any:
        """Return the state before the first token."""
        ...

    def token_problem(self, t: int, state: Any) -> Problem:
        """Return the problem in y_t alone, on (B, 1, d), given the state before token t."""
        ...

    def advance(self, token: Any, y: Tensor) -> Any:
        """Return the state after the token whose problem was solved by `y` (B, 1, d)."""
        ...

    def split(self) -> Sequence[Self]:
        """Return the problems of T = 1 whose token 0 is this one's token t, cut in one go.

        For what is differentiated: the gradients of T slices are T tensors of the full length.
        """
        ...


@runtime_checkable
class Sweepable(Protocol):
    """A tokenwise problem with a fused kernel for the whole sweep."""

    def sweep(self, settings: SweepSettings, backend: str = "auto") -> SweepResult | None:
        """Solve all tokens in order; None where no kernel knows this problem on this machine.

        UserError where `backend` is a kernel that is not there.
        """
        ...

    def state_after(self, swept: SweepResult) -> Any:
        """Return the state after the last token of a sweep."""
        ...

    def evaluate(self, y: Tensor, known: Any = None) -> Tensor:
        """Return f(y), (B, T, d), where `known` is what a sweep that ended at y has left."""
        ...


@runtime_checkable
class FusedIteration(Protocol):
    """A problem with a fused kernel for Picard's iteration on all tokens."""

    def iterate(self, settings: IterationSettings, backend: str) -> IterationResult | None:
        """Iterate from `start()`; None where no kernel knows this problem on this machine.

        UserError for a `backend` that is not to be had.
        """
        ...


class Solver(Protocol):
    """Finds a fixed point. `whole_sequence` tells whether its iterations are evaluations of f on all tokens."""

    whole_sequence: bool

    def solve(self, problem: Any, cap: Cap, *, training: bool) -> SolveResult:
        """Solve without gradient. In training the batch stops together; otherwise each sequence by itself."""
        ...


class Gradient(Protocol):
    """Makes of a solve, which has no gradient, an output that has one.

    One that evaluates f at the solution itself, and so can use `SolveResult.known`, says so by `takes_over = True`.
    """

    def attach(self, problem: Any, result: SolveResult) -> tuple[Tensor, SolveResult]:
        """Return f at what was found, (B, T, d), with gradient, and the result, with its `backward` if there is one."""
        ...
