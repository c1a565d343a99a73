"""What the metrics say of solves (CASES.md 1 and 2)."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from helpers import affine

from fpexp.evaluation.metrics import LayerStatistics
from fpexp.fixed_point import BackwardRecord, Cap, Picard


def summary(*batches: list[float], cap: int = 5, offset: float = 1.0) -> dict:
    statistics = LayerStatistics()
    solver = Picard(tolerance=1e-6)
    for slopes in batches:
        statistics.add([solver.solve(affine(slopes, offset), Cap(cap), training=False)])
    return statistics.summary()


def test_the_row_of_a_solve_that_reached_its_cap() -> None:
    row = summary([0.999])
    assert row["iterations_mean"] == row["iterations_max"] == 5
    assert row["fraction_converged"] == 0
    assert row["cap_hits"] == 1
    assert row["residual_max"] == pytest.approx(0.999**4 / sum(0.999**i for i in range(5)), rel=1e-12)


def test_rows_add_up_over_batches_of_unequal_size() -> None:
    """A slope of 0 converges at its second evaluation."""
    row = summary([0.0, 0.999, 0.0], [0.0])
    assert row["iterations_mean"] == (2 + 5 + 2 + 2) / 4
    assert row["iterations_max"] == 5
    assert row["fraction_converged"] == 3 / 4
    assert row["cap_hits"] == 1


def test_a_non_finite_solve_is_neither_converged_nor_hidden() -> None:
    for row in (summary([0.5], offset=math.nan), summary([0.0], [math.nan]), summary([math.nan], [0.0])):
        assert row["fraction_converged"] < 1
        assert row["cap_hits"] == 0
        assert not math.isfinite(row["residual_max"])


def test_a_model_without_solver_has_no_row() -> None:
    statistics = LayerStatistics()
    statistics.add(())
    assert statistics.summary() == {}


def backward_summary(*records: BackwardRecord) -> dict:
    """Of one layer and a batch for each record."""
    statistics = LayerStatistics()
    solve = Picard(tolerance=1e-6).solve(affine([0.5]), Cap(5), training=False)
    for record in records:
        statistics.add([dataclasses.replace(solve, backward=record)])
    return {name: value for name, value in statistics.summary().items() if name.startswith("gradient_")}


def record_of(*equations: tuple[int, float]) -> BackwardRecord:
    """A record of equations that were solved one after the other."""
    record = BackwardRecord()
    for iterations, residual in equations:
        record.add(torch.tensor([iterations]), torch.tensor([residual]), None)
    return record


def test_equations_of_the_backward_pass_add_up() -> None:
    row = backward_summary(record_of((2, 0.25), (4, 0.125)), record_of((9, 0.0)), BackwardRecord())
    assert row["gradient_iterations_mean"] == 5
    assert row["gradient_iterations_max"] == 9
    assert row["gradient_residual_max"] == 0.25


def test_an_equation_that_is_not_finite_is_not_hidden() -> None:
    for records in ([record_of((1, math.nan), (1, 0.0))], [record_of((1, 0.0)), record_of((0, math.nan))]):
        assert math.isnan(backward_summary(*records)["gradient_residual_max"])


def test_a_forward_pass_alone_has_no_such_numbers() -> None:
    assert backward_summary(BackwardRecord()) == {}
    padded = BackwardRecord()
    padded.add(torch.tensor([1]), torch.tensor([0.5]), torch.tensor([[False, False]]))
    assert backward_summary(padded) == {}
