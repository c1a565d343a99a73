"""How far two solvers are apart, on solvers of which that is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from runs import tiny

from fpexp.build import build
from fpexp.evaluation.agreement import agreement
from fpexp.fixed_point import Cap, Sequential, Status


class Elsewhere(Sequential):
    """Ends at twice the solution in the last token of the first sequence, and does not converge there."""

    def solve(self, problem: Any, cap: Cap, *, training: bool) -> Any:
        found = super().solve(problem, cap, training=training)
        value, status = found.value.clone(), found.status.clone()
        value[0, -1] *= 2
        status[0] = Status.CAP_REACHED
        return dataclasses.replace(found, value=value, status=status, known=None)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_distance_is_the_largest_of_a_token_and_relative(tmp_path: Path, layers: int) -> None:
    experiment = build(tiny(tmp_path, f"model.layers={layers}", "solver=sequential", model="fp_mamba_h"))
    own = [module.solver for module in experiment.model.modules() if hasattr(module, "solver")]
    (row,) = agreement(experiment, Elsewhere(tolerance=0.1), [4], 8)
    assert row["length"] == 4
    assert row["n"] == 8
    assert row["distance_max"] == pytest.approx(0.5)
    assert row["distance_mean"] == pytest.approx(0.5 / 8)
    assert row["distance_median"] == 0.0
    assert row["both_converged"] == 7 / 8
    assert row["distance_max_converged"] == 0.0
    assert row["iterations_mean"] == row["iterations_mean_against"]
    assert [module.solver for module in experiment.model.modules() if hasattr(module, "solver")] == own
    assert len(own) == layers


def test_samples_are_those_asked_for_whatever_the_batch(tmp_path: Path) -> None:
    words = ["solver=sequential", "seed=3"]
    rows = []
    for size in (3, 8):
        experiment = build(tiny(tmp_path, *words, f"evaluation.batch_size={size}", model="fp_mamba_h"))
        rows.append(list(agreement(experiment, Sequential(tolerance=1e-5), [2, 4], 8)))
    assert [row["n"] for row in rows[0]] == [8, 8]
    assert rows[0][0]["distance_mean"] > 0
    assert 0 <= rows[0][0]["answers_alike"] <= 1
