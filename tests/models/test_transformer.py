"""The Transformer baseline."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from helpers import random, tiny, to_numpy

from fpexp.errors import UserError
from fpexp.fixed_point import Cap
from fpexp.models.blocks import GatedMLP
from fpexp.models.transformer import Attention


def turned(v: np.ndarray, t: int, base: float) -> np.ndarray:
    """v (K,) as K/2 complex numbers v_i + i v_{i + K/2}, each turned by t / base^(2i / K)."""
    half = len(v) // 2
    z = (v[:half] + 1j * v[half:]) * np.exp(1j * t * base ** (-2 * np.arange(half) / len(v)))
    return np.concatenate([z.real, z.imag])


@pytest.mark.parametrize("size", [4, 8, 24, 48, 72, 100])
def test_attention_by_hand(size: int) -> None:
    """softmax over the tokens so far of q_t . k_s / sqrt(K), positions as rotations; K as in CASES.md 11."""
    torch.manual_seed(0)
    layer = Attention(2 * size, 2, 100.0).double()
    u = random(5, 2 * size)
    q, k, v = np.split(to_numpy(u) @ to_numpy(layer.in_projection.weight).T, 3, axis=-1)
    expected = np.zeros((5, 2 * size))
    for head in (slice(0, size), slice(size, 2 * size)):
        for t in range(5):
            query = turned(q[t, head], t, 100.0)
            scores = np.array([query @ turned(k[s, head], s, 100.0) / size**0.5 for s in range(t + 1)])
            weights = np.exp(scores) / np.exp(scores).sum()
            expected[t, head] = weights @ v[: t + 1, head]
    expected = expected @ to_numpy(layer.out_projection.weight).T
    np.testing.assert_allclose(to_numpy(layer(u[None], Cap(1), None)[0][0]), expected, rtol=0, atol=1e-12)


def test_gated_mlp_by_hand() -> None:
    layer = GatedMLP(4, 6).double()
    u = random(3, 4)
    gate, value = np.split(to_numpy(u) @ to_numpy(layer.in_projection.weight).T, 2, axis=-1)
    expected = (oracle.silu(gate) * value) @ to_numpy(layer.out_projection.weight).T
    np.testing.assert_allclose(to_numpy(layer(u[None], Cap(1), None)[0][0]), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.heads=3"], r"model\.heads=3 does not divide .*model\.d_model / 2 = 4; use 2 or 4"),
        (["model.heads=8"], r"model\.heads=8 does not divide .*model\.d_model / 2 = 4; use 4"),
        (["model.d_model=7"], r"model\.d_model=7 must be even"),
        (["model.rope_base=0.5"], r"model\.rope_base=0\.5"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tiny("model=transformer", *words)


def test_what_is_carried_is_no_view_of_more() -> None:
    """Keys and values of a prompt hold the memory of keys and values alone."""
    _, _, state = Attention(8, 2, 100.0).decode(torch.zeros(3, 5, 8), None)
    for part in (state.keys, state.values):
        assert part.untyped_storage().nbytes() == part.nbytes


def test_an_mlp_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.mlp_expand=0\.01 times model\.d_model=8"):
        tiny("model=transformer", "model.mlp_expand=0.01")
