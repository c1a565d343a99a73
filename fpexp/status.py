"""How the solve of one sequence or token ended. Shared by solvers and kernels."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """From best to worst; what is reported of several is the largest."""

    CONVERGED = 0
    UNCONVERGED = 1  # the batch stopped as one, before this sequence had converged
    CAP_REACHED = 2
    DIVERGED = 3
    NON_FINITE = 4
