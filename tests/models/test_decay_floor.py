"""The decay with a floor, of FP-Mamba and FP-Mamba-2 (paper's first version)."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import random, tiny, to_numpy
from torch import Tensor, nn
from torch.testing import assert_close

from fpexp.fixed_point import Cap, Picard, Sequential, Status
from fpexp.training.optimizer import parameter_groups

MODELS = ["fp_mamba_h", "fp_mamba2_h"]
models = pytest.mark.parametrize("model", MODELS)
HEADS = {"fp_mamba_h": [], "fp_mamba2_h": ["model.head_size=1"]}
FLOOR = ["model.decay=floor", "precision=float64"]


def floored(model: str, *words: str) -> Any:
    return tiny(f"model={model}", *FLOOR, *words).model.layers[0].layer


def inputs(batch: int = 2, length: int = 6) -> Tensor:
    return random(batch, length, 8)


@models
@pytest.mark.parametrize("weight_norm", [False, True])
def test_delta_starts_without_x_and_the_decay_at_its_floor(model: str, weight_norm: bool) -> None:
    """Delta log-uniform in its range whatever x is; exp(-k softplus(omega)) uniform in [0.9, 0.999]."""
    layer = floored(model, f"model.weight_norm={weight_norm}", "model.d_model=64", *HEADS[model])
    one, other = (layer.problem(random(1, 2, 64, seed=seed)) for seed in (0, 1))
    deltas = [problem.terms(problem.start()).delta for problem in (one, other)]
    assert torch.equal(*deltas)
    assert 0.9e-3 < deltas[0].min() < 2e-3
    assert 0.05 < deltas[0].max() < 0.1001
    floor = torch.exp(-8 * nn.functional.softplus(layer.omega))
    assert_close(floor.log(), layer.A(), rtol=1e-12, atol=1e-12)
    assert 0.899 < floor.min() < 0.91
    assert 0.99 < floor.max() < 0.9991
    assert not hasattr(layer, "A_log")


@models
def test_no_decay_falls_below_the_floor(model: str) -> None:
    """However much x and s ask for: the state of a token that writes nothing keeps at least the floor of itself."""
    layer = floored(model, "model.decay_scale=3", "model.dependence.lambda=true")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=30)
        layer.omega.normal_()
    problem = layer.problem(inputs())
    delta = problem.terms(30 * random(2, 6, 16, seed=1)).delta
    assert delta.min() < 1e-3
    assert delta.max() > 0.999
    decay = torch.exp(problem.channels(delta)[..., None] * problem.decay_rates())
    floor = torch.exp(-3 * nn.functional.softplus(layer.omega)).reshape(layer.dynamics.steps, -1)
    floor = floor.repeat_interleave(16 // layer.dynamics.steps, dim=0)
    assert (decay >= floor - 1e-12).all()
    assert (decay <= 1).all()
    assert (decay < floor + 0.01).any()


@models
def test_the_map_is_the_oracles_with_the_floors_delta_and_decay(model: str) -> None:
    """softplus(delta_x) of the oracle is made to be sigmoid(.); the rest of f stays."""
    dependence = "model.dependence={lambda:false,Q:false,b:false,c:false,gate:false}"
    layer = floored(model, dependence, "model.norm=none")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.from_numpy(np.random.default_rng(0).normal(size=parameter.shape)), alpha=0.3)
    u, y = inputs(1), random(1, 6, 16, seed=1)
    problem = layer.problem(u)
    coefficients, b, c, dt, _ = problem.from_x.split(problem.columns.sizes, dim=-1)
    Q = [torch.stack([layer.channel_mixer.apply(layer.channel_mixer.factors(p), e) for e in torch.eye(16).double()])
         for p in coefficients[0]]  # fmt: skip
    delta = oracle.sigmoid(to_numpy(problem.channels(dt[0])))
    A = -8 * oracle.softplus(to_numpy(layer.omega)).reshape(layer.dynamics.steps, -1)
    expected, _ = oracle.fp_mamba_evaluate(
        y=to_numpy(y[0]),
        x=to_numpy(problem.x[0]),
        z=to_numpy(problem.z[0]),
        delta_x=np.log(np.expm1(delta)),
        b_x=to_numpy(b[0]),
        c_x=to_numpy(c[0]),
        A=np.repeat(A, 16 // len(A), axis=0) * np.ones((16, 4)),
        D=to_numpy(problem.channels(layer.D)),
        Q=lambda t, s: to_numpy(Q[t].T),
        **dict.fromkeys(("W_bs", "W_cs", "W_ls", "W_zs", "norm_weight", "norm_bias")),
        gate_inside=False,
    )
    np.testing.assert_allclose(to_numpy(problem.evaluate(y)[0]), expected, rtol=0, atol=1e-10)


@models
def test_solvers_agree(model: str) -> None:
    """The plain sweep, which the model falls back to, and Picard."""
    layer = floored(model, "model.channel_mixer.a_max=0.5", "model.dependence.lambda=true")
    with torch.no_grad():
        layer.D.fill_(0.3)
        layer.norm.weight.mul_(0.05)
    problem = layer.problem(inputs())
    found = [
        solver.solve(problem, Cap(500), training=False)
        for solver in (Picard(tolerance=1e-12), Sequential(tolerance=1e-12))
    ]
    assert all((result.status == Status.CONVERGED).all() for result in found)
    assert_close(found[0].value, found[1].value, rtol=0, atol=1e-10)


@models
@pytest.mark.parametrize("weight_norm", [False, True])
def test_every_parameter_learns(model: str, weight_norm: bool) -> None:
    """At the second step: at the first, W_r of FP-Mamba waits for W_dt, which starts at zero."""
    experiment = tiny(f"model={model}", *FLOOR, f"model.weight_norm={weight_norm}")
    optimizer = torch.optim.Adam(experiment.model.parameters(), 1e-2)
    batch = experiment.task.sample(4, 6, torch.Generator().manual_seed(0))
    for _ in range(2):
        optimizer.zero_grad()
        logits = experiment.model(batch.inputs, Cap(10), batch.mask).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).backward()
        optimizer.step()
    for name, parameter in experiment.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
        if name.endswith("x_projection.weight"):
            assert parameter.grad.abs().amax(-1).min() > 0


@models
def test_omega_is_not_decayed(model: str) -> None:
    experiment = tiny(f"model={model}", *FLOOR)
    omega = experiment.model.layers[0].layer.omega
    decayed, exempt = parameter_groups(experiment.model, 0.1)
    assert any(parameter is omega for parameter in exempt["params"])  # type: ignore[attr-defined]
    assert not any(parameter is omega for parameter in decayed["params"])  # type: ignore[attr-defined]
