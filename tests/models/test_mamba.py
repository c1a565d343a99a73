"""The Mamba baseline, against numpy and against a published implementation."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from helpers import convolve, random, tiny, to_numpy

from fpexp.errors import UserError
from fpexp.fixed_point import Cap
from fpexp.models.initialisation import delta_logits, delta_projection
from fpexp.models.mamba import MambaLayer
from fpexp.models.mamba import mamba as make_mamba


@pytest.mark.parametrize("conv_width", [0, 4])
def test_a_layer_by_hand(conv_width: int) -> None:
    """H_t = exp(delta_t A) * H_{t-1} + (delta_t * x_t) b_t^T;  W_out(silu(z_t) * (H_t c_t + D * x_t))."""
    torch.manual_seed(0)
    layer = MambaLayer(4, 6, 3, 2, conv_width, (1e-3, 1e-1)).double()
    with torch.no_grad():
        layer.D.normal_()
        layer.A_log.add_(torch.randn_like(layer.A_log), alpha=0.3)
    u = random(9, 4)
    x, z = np.split(to_numpy(u) @ to_numpy(layer.in_projection.weight).T, 2, axis=-1)
    if layer.convolution is None:
        x = oracle.silu(x)
    else:
        x = convolve(x, to_numpy(layer.convolution.weight)[:, 0], to_numpy(layer.convolution.bias))
    dt, b, c = np.split(x @ to_numpy(layer.x_projection.weight).T, [2, 5], axis=-1)
    delta = np.log1p(np.exp(dt @ to_numpy(layer.dt_projection.weight).T + to_numpy(layer.dt_projection.bias)))
    A, H, rows = -np.exp(to_numpy(layer.A_log)), np.zeros((6, 3)), []
    for t in range(9):
        H = np.exp(delta[t][:, None] * A) * H + np.outer(delta[t] * x[t], b[t])
        rows.append(oracle.silu(z[t]) * (H @ c[t] + to_numpy(layer.D) * x[t]))
    expected = np.stack(rows) @ to_numpy(layer.out_projection.weight).T
    output, solves = layer(u[None], Cap(1), None)
    np.testing.assert_allclose(to_numpy(output[0]), expected, rtol=0, atol=1e-12)
    assert solves == ()


def test_the_residual_projections_start_smaller_with_depth() -> None:
    """As in Mamba: by the root of the number of residual layers."""
    wide = ["model=mamba", "model.d_model=64"]
    one, nine = (tiny(*wide, f"model.layers={n}").model for n in (1, 9))
    ratio = one.layers[0].layer.out_projection.weight.std() / nine.layers[0].layer.out_projection.weight.std()
    assert float(ratio) == pytest.approx(3, rel=0.05)


def test_a_width_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.expand=0\.01 times model\.d_model=8"):
        tiny("model=mamba", "model.expand=0.01")


def test_logits_are_those_of_transformers() -> None:
    """The weights of a published implementation give its logits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=12, hidden_size=16, state_size=5, num_hidden_layers=2, time_step_rank=3, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    theirs = transformers.MambaForCausalLM(config).eval()
    ours = make_mamba(
        12,
        d_model=16,
        layers=2,
        expand=2,
        state_size=5,
        dt_rank=3,
        conv_width=4,
        delta_range=(1e-3, 1e-1),
        mlp_expand=0.0,
        dropout=0.0,
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        renamed = {
            "backbone.embeddings.weight": "embedding.weight",
            "backbone.norm_f.weight": "norm.weight",
            "lm_head.weight": "head.weight",
        }
        parts = {"in_proj": "in_projection", "conv1d": "convolution", "x_proj": "x_projection"}
        parts |= {"dt_proj": "dt_projection", "out_proj": "out_projection"}
        weights = {}
        for name, value in theirs.state_dict().items():
            new = name.replace("backbone.layers", "layers").replace(".mixer.", ".layer.")
            for old_part, new_part in parts.items():
                new = new.replace(f".{old_part}.", f".{new_part}.")
            weights[renamed.get(name, new)] = value
        ours.load_state_dict(weights)
        tokens = torch.randint(12, (3, 17), generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-4)


def test_under_autocast_the_bias_of_delta_is_not_rounded() -> None:
    """CASES.md 14: W_dt dt may be bfloat16; with dt = 0, Delta is the float32 bias to the bit."""
    projection = delta_projection(2, 64, (1e-3, 1e-1))
    with torch.autocast("cpu", torch.bfloat16):
        logits = delta_logits(projection, torch.zeros(1, 1, 2))
    assert torch.equal(logits[0, 0], projection.bias)
