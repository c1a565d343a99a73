"""Parameter groups, initial Delta and learning rates of whole models (CASES.md 15)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import tiny, to_numpy
from torch import nn

from fpexp.config.compose import compose
from fpexp.config.run import Training
from fpexp.models import LanguageModel
from fpexp.training.optimizer import learning_rate, make_optimizer, parameter_groups

MODELS = [
    [f"model=fp_mamba_{mixer}", f"model.weight_norm={weight_norm}", f"model.gate={gate}", "model.conv_width=4"]
    for mixer in ("h", "k", "dplr")
    for weight_norm, gate in ((False, "outside"), (True, "inside"))
]

models = pytest.mark.parametrize("words", [*MODELS, ["model=lstm"]], ids=" ".join)


def settings(*overrides: str) -> Training:
    return compose(["task=a4", "model=lstm", *(f"training.{override}" for override in overrides)]).training


@models
def test_every_parameter_is_in_exactly_one_group(words: list[str]) -> None:
    model = tiny(*words, "model.layers=2").model
    decayed, exempt = parameter_groups(model, 0.3)
    assert decayed["weight_decay"] == 0.3
    assert exempt["weight_decay"] == 0.0
    grouped = [id(parameter) for group in (decayed, exempt) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())


@models
def test_what_is_not_decayed(words: list[str]) -> None:
    """By what a parameter is for: A_log, D, every bias, every norm's weight, and the magnitudes of weight norm."""
    model = tiny(*words, "model.layers=2").model
    _, exempt = parameter_groups(model, 0.3)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {names[id(parameter)] for parameter in exempt["params"]}
    norms = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        for name, _ in module.named_parameters()
    }
    rest = {
        name
        for name in names.values()
        if name.endswith(("A_log", ".D", "original0")) or "bias" in name.rpartition(".")[2]
    }
    assert found == norms | rest
    if "model=lstm" not in words:
        for part in ("A_log", "D", "mixer_bias", "dt_projection.bias", "convolution.bias", "norm.weight", "norm.bias"):
            assert f"layers.1.layer.{part}" in found
        for part in ("in_projection.weight", "out_projection.weight", "dt_projection.weight", "convolution.weight"):
            assert f"layers.1.layer.{part}" not in found
        normed = "model.weight_norm=True" in words
        x_weight = "x_projection.parametrizations.weight.original1" if normed else "x_projection.weight"
        s_weight = "parametrizations.s_weight.original1" if normed else "s_weight"
        assert f"layers.1.layer.{x_weight}" not in found
        assert f"layers.1.layer.{s_weight}" not in found


def test_decay_moves_the_decayed_group_only() -> None:
    """With zero gradients AdamW only decays: w <- (1 - lr * decay) w."""
    model = tiny(*MODELS[0]).model
    optimizer = make_optimizer(model, settings("lr=0.1", "weight_decay=0.5"))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    layer = "layers.0.layer."
    after = dict(model.named_parameters())
    torch.testing.assert_close(after["embedding.weight"], 0.95 * before["embedding.weight"])
    torch.testing.assert_close(after[f"{layer}s_weight"], 0.95 * before[f"{layer}s_weight"])
    for name in (f"{layer}A_log", f"{layer}D", f"{layer}dt_projection.bias", f"{layer}norm.weight", "norm.weight"):
        assert torch.equal(after[name], before[name])


def test_adamw_gets_its_settings() -> None:
    optimizer = make_optimizer(tiny("model=lstm").model, settings("lr=0.2", "betas=[0.7,0.8]", "weight_decay=0.3"))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert all(group["lr"] == 0.2 and group["betas"] == (0.7, 0.8) for group in optimizer.param_groups)


@pytest.mark.parametrize("words", MODELS, ids=" ".join)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_delta_starts_in_its_range(words: list[str], precision: str) -> None:
    """softplus(b_dt) in [1e-3, 1e-1] in every layer, after everything that building does to weights."""
    model = tiny(*words, "model.layers=2", "model.d_model=16", f"precision={precision}").model
    for layer in model.layers:
        delta = np.logaddexp(0, to_numpy(layer.layer.dt_projection.bias))
        assert delta.min() >= 1e-3 * (1 - 1e-5)
        assert delta.max() <= 1e-1 * (1 + 1e-5)


def test_delta_starts_log_uniform() -> None:
    model = tiny("model=fp_mamba_h", "model.channel_mixer.rank=1", "model.d_model=512").model
    delta = np.logaddexp(0, to_numpy(model.layers[0].layer.dt_projection.bias))
    position = (np.log(delta) - math.log(1e-3)) / math.log(100)
    quantiles = np.quantile(position, [0.1, 0.25, 0.5, 0.75, 0.9])
    np.testing.assert_allclose(quantiles, [0.1, 0.25, 0.5, 0.75, 0.9], atol=0.06)


def rates(*overrides: str) -> list[float]:
    training = settings("steps=20", "lr=1.0", *overrides)
    return [learning_rate(training, step) for step in range(20)]


@pytest.mark.parametrize("warmup", [0, 4])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_learning_rates(warmup: int, final: float) -> None:
    """Linear from lr / warm-up to lr, then down from lr towards its final fraction."""
    progress = [step / (20 - warmup) for step in range(20 - warmup)]
    up = [(step + 1) / warmup for step in range(warmup)]
    words = (f"warmup_steps={warmup}", f"final_lr_fraction={final}")
    cosine = [final + (1 - final) * 0.5 * (1 + math.cos(math.pi * p)) for p in progress]
    linear = [final + (1 - final) * (1 - p) for p in progress]
    assert rates("lr_schedule=cosine", *words) == pytest.approx(up + cosine)
    assert rates("lr_schedule=linear", *words) == pytest.approx(up + linear)
    assert rates("lr_schedule=constant", *words) == pytest.approx(up + [1.0] * (20 - warmup))


def test_warm_up_alone() -> None:
    assert rates("warmup_steps=20") == pytest.approx([(step + 1) / 20 for step in range(20)])


@models
def test_frozen_parameters_are_in_no_group(words: list[str]) -> None:
    model: LanguageModel = tiny(*words).model
    model.embedding.weight.requires_grad_(False)
    for group in parameter_groups(model, 0.3):
        assert all(parameter is not model.embedding.weight for parameter in group["params"])
