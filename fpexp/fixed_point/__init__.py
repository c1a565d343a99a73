"""Fixed points of causal maps over sequences: the problem, the solvers, the caps and the gradient."""

from fpexp.fixed_point.anderson import Anderson
from fpexp.fixed_point.auto import Auto
from fpexp.fixed_point.gradient import OneStep, Unrolled
from fpexp.fixed_point.implicit import Implicit
from fpexp.fixed_point.lagged import Lagged
from fpexp.fixed_point.picard import Picard
from fpexp.fixed_point.schedule import Converge, Fixed, Gamma, Schedule
from fpexp.fixed_point.sequential import Sequential
from fpexp.fixed_point.types import (
    BackwardRecord,
    Cap,
    Gradient,
    LaggedProblem,
    Problem,
    Solver,
    SolveResult,
    TokenwiseProblem,
)
from fpexp.status import Status

__all__ = [
    "Anderson",
    "Auto",
    "BackwardRecord",
    "Cap",
    "Converge",
    "Fixed",
    "Gamma",
    "Gradient",
    "Implicit",
    "Lagged",
    "LaggedProblem",
    "OneStep",
    "Picard",
    "Problem",
    "Schedule",
    "Sequential",
    "SolveResult",
    "Solver",
    "Status",
    "TokenwiseProblem",
    "Unrolled",
]
