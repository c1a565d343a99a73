"""The checks pass what is right and name what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from helpers import tiny
from torch import Tensor

from fpexp.bench.truth import Given, posed, residual_error, solving_layers, step_checks
from fpexp.build import Experiment
from fpexp.fixed_point import Cap, Picard, Sequential
from fpexp.models import LanguageModel
from fpexp.ops.selective_scan import reference, selective_scan
from fpexp.tasks import Batch


def sample(experiment: Experiment, length: int = 5) -> Batch:
    return experiment.task.sample(4, length, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "words",
    [
        ["model=lstm"],
        ["model=fp_mamba_k"],
        ["model=fp_mamba_h", "model.layers=2"],
        ["model=fp_mamba_h", "model.gate=inside"],
    ],
    ids=" ".join,
)
def test_a_right_step_passes(words: list[str]) -> None:
    experiment = tiny(*words)
    model = experiment.model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checks = step_checks(model, sample(experiment), Cap(100))
    assert all(check.passed for check in checks), checks
    assert len(checks) == (2 if words == ["model=lstm"] else 3)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(layer.solver, Given) for layer in solving_layers(model))


def wrong_scan(factor: float, gradient: float) -> Any:
    """The reference with a value or a gradient that is off."""

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * factor

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * gradient

    def scan(*arguments: Any) -> tuple[Tensor, Tensor]:
        y, H = reference.selective_scan(*arguments)
        return Off.apply(y), H

    return scan


@pytest.mark.parametrize(
    ("factor", "gradient", "what"),
    [(1.0, 1.01, "relative error of a gradient"), (1.05, 1.0, "error of the loss")],
)
def test_a_wrong_scan_is_found(monkeypatch: pytest.MonkeyPatch, factor: float, gradient: float, what: str) -> None:
    """At norm=none: a LayerNorm would take a factor out again."""
    pytest.importorskip("numba")
    from fpexp.ops.selective_scan import cpu

    experiment = tiny("model=fp_mamba_h", "model.norm=none")
    batch = sample(experiment)
    monkeypatch.setattr(cpu, "selective_scan", wrong_scan(factor, gradient))
    failed = [check.what for check in step_checks(experiment.model, batch, Cap(100)) if not check.passed]
    assert what in failed


@pytest.mark.parametrize("solver", [Picard(tolerance=0.1), Sequential(tolerance=0.1)], ids=lambda s: type(s).__name__)
def test_a_residual_is_true_at_the_value_it_is_reported_with(solver: Any) -> None:
    experiment = tiny("model=fp_mamba_h")
    (layer,) = posed(experiment.model.eval(), sample(experiment).inputs)
    found = solver.solve(layer.problem(), Cap(100), training=False)
    assert layer.check(found, "relative").passed
    moved = dataclasses.replace(found, value=found.value + 0.01)
    assert not layer.check(moved, "relative").passed
    nan = dataclasses.replace(found, residual=torch.full_like(found.residual, torch.nan))
    assert not layer.check(nan, "relative").passed


def test_padding_does_not_count() -> None:
    experiment = tiny("model=fp_mamba_h")
    (layer,) = posed(experiment.model.eval(), sample(experiment).inputs)
    mask = torch.arange(5).expand(4, 5) < 3
    problem = dataclasses.replace(layer.problem(), mask=mask)
    found = Sequential(tolerance=0.1).solve(problem, Cap(100), training=False)
    assert residual_error(problem, found, "relative") < 1e-3


def test_posed_problems_are_those_of_every_layer() -> None:
    experiment = tiny("model=fp_mamba_h", "model.layers=2")
    model: LanguageModel = experiment.model
    first, second = posed(model, sample(experiment).inputs)
    assert first.layer is not second.layer
    assert first.u.shape == second.u.shape == (4, 5, 8)
    assert not torch.equal(first.u, second.u)
    assert not any(layer._forward_pre_hooks for layer in solving_layers(model))


def test_the_reference_of_the_checks_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused scan must not be its own judge."""
    pytest.importorskip("numba")
    from fpexp.ops.selective_scan import cpu

    experiment = tiny("model=fp_mamba_h")
    (layer,) = posed(experiment.model.eval(), sample(experiment).inputs)
    found = Sequential(tolerance=0.1).solve(layer.problem(), Cap(100), training=False)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("the fused scan was asked")

    monkeypatch.setattr(cpu, "selective_scan", refuse)
    assert layer.check(found, "relative").passed
    x = torch.ones(1, 2, 3)
    with pytest.raises(AssertionError, match="the fused scan was asked"):
        selective_scan(x, x, -torch.ones(3, 1), x[..., :1], x[..., :1], x[0, 0])
