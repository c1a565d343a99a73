"""The LSTM baseline."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from helpers import tiny, to_numpy

from fpexp.fixed_point import Cap


def rms_norm(v: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return v / np.sqrt((v**2).mean(axis=-1, keepdims=True) + 1e-5) * weight


def test_logits_by_hand() -> None:
    """i, f, g, o = W x + U h + biases;  c <- sigmoid(f) c + sigmoid(i) tanh(g);  h <- sigmoid(o) tanh(c)."""
    model = tiny("model=lstm", "precision=float64").model
    cell = model.layers[0].lstm
    tokens = torch.randint(12, (2, 6), generator=torch.Generator().manual_seed(0))
    output = model(tokens, Cap(1))
    W, U = to_numpy(cell.weight_ih_l0), to_numpy(cell.weight_hh_l0)
    bias = to_numpy(cell.bias_ih_l0) + to_numpy(cell.bias_hh_l0)
    h = c = np.zeros((2, 16))
    for t in range(6):
        x = to_numpy(model.embedding.weight)[tokens[:, t].numpy()]
        i, f, g, o = np.split(x @ W.T + h @ U.T + bias, 4, axis=-1)
        c = oracle.sigmoid(f) * c + oracle.sigmoid(i) * np.tanh(g)
        h = oracle.sigmoid(o) * np.tanh(c)
        logits = rms_norm(h, to_numpy(model.norm.weight)) @ to_numpy(model.head.weight).T
        np.testing.assert_allclose(to_numpy(output.logits[:, t]), logits, rtol=0, atol=1e-12)
    assert output.solves == ()


@pytest.mark.parametrize(("expand", "layers"), [(1, 1), (2, 1), (2, 3)])
def test_size(expand: int, layers: int) -> None:
    model = tiny("model=lstm", f"model.expand={expand}", f"model.layers={layers}").model
    hidden = 8 * expand
    cells = sum(4 * hidden * (n + hidden) + 8 * hidden for n in [8] + [hidden] * (layers - 1))
    assert model.parameter_count() == 12 * 8 + cells + hidden + 12 * hidden
    assert not model.iterations_depend_on_length


def test_the_cap_means_nothing_to_it() -> None:
    model = tiny("model=lstm").model
    tokens = torch.arange(6).reshape(1, 6)
    assert torch.equal(model(tokens, Cap(1)).logits, model(tokens, Cap(100)).logits)
