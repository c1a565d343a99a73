"""What a solve took, for those benchmarks that time one."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fpexp.fixed_point import SolveResult, Status

Solve = Callable[[], list[SolveResult]]
"""Solves the problem of every layer once."""


def solve_numbers(found: Solve) -> dict[str, float]:
    """Iterations a sequence (of the sequential solver: of its hardest token) and the share that has converged."""
    results = found()
    iterations = torch.cat([result.iterations for result in results]).double()
    status = torch.cat([result.status for result in results])
    numbers = {
        "iterations_mean": float(iterations.mean()),
        "iterations_max": int(iterations.max()),
        "converged": float((status == Status.CONVERGED).double().mean()),
    }
    tokens = [result.tokens.iterations.flatten() for result in results if result.tokens is not None]
    return numbers | ({"iterations_a_token": float(torch.cat(tokens).double().mean())} if tokens else {})
