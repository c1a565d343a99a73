"""Gated DeltaNet and DeltaProduct as the command line builds them (CASES.md 5, 6, 8, 11, 14, 15, 17, 18)."""

from __future__ import annotations

from typing import cast

import numpy as np
import oracle
import pytest
import torch
from helpers import convolve, to_numpy
from torch import Tensor, nn
from torch.nn import functional

from fpexp.build import build
from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.fixed_point import Cap
from fpexp.models import DecodingState, LanguageModel
from fpexp.models.delta_net import Carried, DeltaNetLayer
from fpexp.ops.backend import only_reference
from fpexp.training.optimizer import parameter_groups

VARIANTS = {
    "gdn": ["model=gdn"],
    "gdn negative": ["model=gdn", "model.negative_eigenvalues=true"],
    "deltanet": ["model=gdn", "model.decay=false", "model.expand_v=1"],
    "deltaproduct": ["model=deltaproduct"],
    "gated deltaproduct, 3 steps, no conv": [
        "model=deltaproduct", "model.householder_steps=3", "model.decay=true", "model.conv_width=0"
    ],
}  # fmt: skip
EXACT = "precision=float64"
PARTS = {"64+66": [64, 66], "1+129": [1, 129], "one by one": [1] * 130}

variants = pytest.mark.parametrize("words", VARIANTS.values(), ids=VARIANTS)


def built(*words: str, d_model: int = 8) -> LanguageModel:
    return build(compose(["task=a4", "device=cpu", f"model.d_model={d_model}", *words])).model


def delta_layers(model: LanguageModel) -> list[DeltaNetLayer]:
    layers = [module for module in model.modules() if isinstance(module, DeltaNetLayer)]
    assert layers
    return layers


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(seed))


def decode(model: LanguageModel, inputs: Tensor, parts: list[int]) -> tuple[Tensor, DecodingState]:
    state, logits = None, []
    for part in inputs.split(parts, dim=1):
        output, state = model.decode(part, state)
        logits.append(output.logits)
    assert state is not None
    return torch.cat(logits, dim=1), state


def by_hand(layer: DeltaNetLayer, u: np.ndarray, *, beta_max: float) -> np.ndarray:
    """One sequence u (T, d_model) through the layer, a matrix S (V, K) a head as in the papers."""
    projected = u @ to_numpy(layer.in_projection.weight).T
    x, gate, b, a = np.split(projected, np.cumsum(layer.sizes)[:-1], axis=-1)
    if layer.convolution is None:
        x = oracle.silu(x)
    else:
        x = convolve(x, to_numpy(layer.convolution.weight)[:, 0], to_numpy(layer.convolution.bias))
    T, heads, n = len(u), layer.heads, layer.steps
    q, k, v = np.split(x, np.cumsum(layer.convolved)[:-1], axis=-1)
    q, k, v = q.reshape(T, heads, -1), k.reshape(T, n, heads, -1), v.reshape(T, n, heads, -1)
    K, V = k.shape[-1], v.shape[-1]
    beta = beta_max * oracle.sigmoid(b).reshape(T, n, heads)
    o = np.zeros((T, heads, V))
    for h in range(heads):
        S = np.zeros((V, K))
        for t in range(T):
            if hasattr(layer, "A_log"):
                rate = np.log1p(np.exp(a[t, h] + to_numpy(layer.dt_bias)[h]))
                S = np.exp(-np.exp(to_numpy(layer.A_log)[h]) * rate) * S
            for i in range(n):
                unit = k[t, i, h] / np.sqrt((k[t, i, h] ** 2).sum() + 1e-6)
                S = S @ (np.eye(K) - beta[t, i, h] * np.outer(unit, unit)) + beta[t, i, h] * np.outer(v[t, i, h], unit)
            o[t, h] = S @ q[t, h] / np.sqrt((q[t, h] ** 2).sum() + 1e-6) / np.sqrt(K)
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * to_numpy(layer.norm.weight)
    return (o.reshape(T, -1) * oracle.silu(gate)) @ to_numpy(layer.out_projection.weight).T


@variants
def test_the_layer_by_hand(words: list[str]) -> None:
    layer = delta_layers(built(*words, EXACT))[0]
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 2)
    u = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).double()
    output, solves = layer(u, Cap(1), None)
    negative = "deltaproduct" in words[0] or "model.negative_eigenvalues=true" in words
    expected = np.stack([by_hand(layer, to_numpy(sequence), beta_max=2.0 if negative else 1.0) for sequence in u])
    np.testing.assert_allclose(to_numpy(output), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert solves == ()


@variants
@pytest.mark.parametrize(("precision", "atol"), [("float32", 1e-4), ("float64", 1e-10)])
def test_any_cut_gives_the_logits_of_one_pass(words: list[str], precision: str, atol: float) -> None:
    """CASES.md 17, a batch of 3."""
    model = built(*words, f"precision={precision}").eval()
    inputs = tokens(3, 130)
    with torch.no_grad():
        whole = model(inputs).logits
    for parts in PARTS.values():
        torch.testing.assert_close(decode(model, inputs, parts)[0], whole, rtol=0, atol=atol)


@variants
def test_the_chunks_give_the_logits_and_gradients_of_the_loop(words: list[str]) -> None:
    model, inputs = built(*words, EXACT), tokens(2, 70)

    def run() -> list[Tensor]:
        logits = model(inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), inputs.roll(1, dims=1).flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        assert all(gradient.abs().max() > 0 for gradient in gradients)
        return [logits.detach(), *gradients]

    with only_reference():
        expected = run()
    for found, value in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=0, atol=float(1e-9 * value.abs().max()))


@variants
def test_the_state_does_not_grow(words: list[str]) -> None:
    model = built(*words).eval()
    sizes = set()
    for length in (1, 10, 100):
        for parts in ([length], [1] * length):
            held = 0
            for carried in decode(model, tokens(3, length), parts)[1].layers:
                for tensor in (carried.S, carried.inputs):
                    held += 0 if tensor is None else tensor.untyped_storage().nbytes()
            sizes.add(held)
    layers = delta_layers(model)
    convolved = sum(3 * sum(layer.convolved) for layer in layers if layer.convolution is not None)
    states = sum(layer.convolved[0] * layer.norm.weight.numel() for layer in layers)
    assert sizes == {4 * 3 * (convolved + states)}


@variants
def test_a_state_can_be_read_on_from_twice(words: list[str]) -> None:
    model = built(*words).eval()
    _, state = model.decode(tokens(2, 5))
    for length in (3, 20):
        first, second = (model.decode(tokens(2, length, seed=1), state)[0].logits for _ in range(2))
        assert torch.equal(first, second)


@variants
@pytest.mark.parametrize("length", [1, 3])
def test_inputs_shorter_than_the_convolution(words: list[str], length: int) -> None:
    """CASES.md 8: batch 1, and what comes out is what the same tokens give in front of longer input."""
    model, inputs = built(*words), tokens(1, 40)
    short, long = model(inputs[:, :length]).logits, model(inputs).logits
    torch.testing.assert_close(short, long[:, :length], rtol=0, atol=1e-5)
    short.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@variants
def test_causality(words: list[str]) -> None:
    """CASES.md 6."""
    model, inputs = built(*words), tokens(2, 50)
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 12
    with torch.no_grad():
        before, after = model(inputs).logits, model(changed).logits
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert (before[:, 20] - after[:, 20]).abs().amax() > 1e-4
    assert (before[:, 30:] - after[:, 30:]).abs().amax() > 1e-4, "beyond the convolution's reach"


@variants
def test_right_padding_changes_nothing(words: list[str]) -> None:
    """CASES.md 18."""
    model = built(*words, EXACT).eval()
    inputs, mask = tokens(2, 40), torch.arange(40) < torch.tensor([[11], [40]])
    with torch.no_grad():
        padded = model(inputs.where(mask, 0), Cap(1), mask).logits[:1, :11]
        torch.testing.assert_close(padded, model(inputs[:1, :11]).logits, rtol=0, atol=1e-10)


@variants
def test_bfloat16_autocast(words: list[str]) -> None:
    """CASES.md 14: near float32; weights, gradients and the carried S stay float32.

    With a few channels a head, the norm would enlarge the rounding where they all happen to be near 0.
    """
    model, inputs = built(*words, d_model=64), tokens(4, 40)
    plain = model(inputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(inputs).logits
        rounded.float().square().sum().backward()
        _, state = model.eval().decode(inputs)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - plain).abs().max() < 4e-2 * plain.abs().max()
    assert not torch.equal(rounded.float(), plain)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    assert all(cast(Carried, carried).S.dtype == torch.float32 for carried in state.layers)


@variants
def test_what_is_not_decayed(words: list[str]) -> None:
    """CASES.md 15, after the whole model is built, with residual_model's part in it."""
    model = built(*words, "model.mlp_expand=2", d_model=64)
    decayed, exempt = (set(map(id, cast("list[nn.Parameter]", g["params"]))) for g in parameter_groups(model, 0.1))
    assert not decayed & exempt
    assert decayed | exempt == set(map(id, model.parameters()))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[i].rpartition(".")[2] for i in decayed} == {"weight"}
    for layer in delta_layers(model):
        assert id(layer.norm.weight) in exempt
        assert {id(layer.in_projection.weight), id(layer.out_projection.weight)} <= decayed
        assert layer.out_projection.weight.abs().max() <= layer.out_projection.in_features**-0.5 / 4**0.5
        if hasattr(layer, "A_log"):
            assert {id(layer.A_log), id(layer.dt_bias)} <= exempt


@pytest.mark.parametrize("name", ["gdn", "deltaproduct"])
def test_the_rates_start_in_their_ranges(name: str) -> None:
    words = [f"model={name}", "model.decay=true", "model.heads=64", "model.head_size=4"]
    for layer in delta_layers(built(*words, "model.delta_range=[0.02,0.3]")):
        delta, A = functional.softplus(layer.dt_bias), layer.A_log.exp()
        assert 0.02 * 0.999 < delta.min() < 0.04
        assert 0.15 < delta.max() < 0.3 * 1.001
        assert 0 < A.min() < 2
        assert 14 < A.max() <= 16.001


def test_negative_eigenvalues_let_beta_pass_1(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    for negative in (False, True):
        model = built("model=gdn", f"model.negative_eigenvalues={negative}")

        def spy(
            q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *rest: Tensor, to: bool = negative
        ) -> tuple[Tensor, None]:
            seen[to] = beta.detach()
            return v[:, :, 0], None

        with monkeypatch.context() as patch:
            patch.setattr("fpexp.models.delta_net.delta_rule", spy)
            model(tokens(2, 30))
    assert 0 < seen[False].min() < seen[False].max() < 1
    torch.testing.assert_close(seen[True], 2 * seen[False])
    assert seen[True].max() > 1


def test_one_step_without_a_gate_is_deltanet() -> None:
    same = ["model.negative_eigenvalues=true", "model.expand_v=2", "model.decay=false"]
    delta_net = built("model=gdn", *same)
    product = built("model=deltaproduct", *same, "model.householder_steps=1")
    assert delta_net.state_dict().keys() == product.state_dict().keys()
    assert torch.equal(delta_net(tokens(2, 40)).logits, product(tokens(2, 40)).logits)


@pytest.mark.parametrize(
    ("d_model", "heads", "size"), [(64, 2, 32), (256, 2, 128), (512, 4, 128), (768, 6, 128), (1000, 5, 200), (3, 1, 3)]
)
def test_sizes_follow_d_model(d_model: int, heads: int, size: int) -> None:
    layer = delta_layers(built("model=gdn", "model.layers=1", d_model=d_model))[0]
    assert layer.heads == heads
    assert layer.convolved == (heads * size, heads * size, 2 * heads * size)


@pytest.mark.parametrize("size", [24, 100])
def test_a_head_size_of_its_own(size: int) -> None:
    """CASES.md 11: heads that do not divide d_model."""
    words = ["model=deltaproduct", "model.heads=3", f"model.head_size={size}", "model.expand_v=0.5"]
    layer = delta_layers(built(*words))[0]
    assert layer.convolved == (3 * size, 6 * size, 3 * size)
    assert layer.norm.weight.numel() == size / 2


@pytest.mark.parametrize("name", ["gdn", "deltaproduct"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.heads=3"], "model.heads=3 does not divide model.d_model = 8; use 2 or 4, or set model.head_size"),
        (["model.heads=16"], "model.heads=16 does not divide model.d_model = 8; use 8, or set model.head_size"),
        (["model.expand_v=1.3"], "model.expand_v=1.3 times model.head_size=4 is no whole .* model.expand_v=1.25 would"),
        (["model.expand_v=0.1"], "model.expand_v=0.1 times model.head_size=4 .* model.expand_v=0.25 would be"),
        (["model.delta_range=[0.1,0.01]"], "must ascend"),
    ],
)
def test_sizes_that_do_not_fit(name: str, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        built(f"model={name}", *words)


def test_a_size_that_the_message_proposes_is_taken() -> None:
    with pytest.raises(UserError) as refused:
        built("model=gdn", "model.head_size=7", "model.expand_v=1.3")
    proposed = str(refused.value).rpartition("model.expand_v=")[2].split()[0]
    built("model=gdn", "model.head_size=7", f"model.expand_v={proposed}")
