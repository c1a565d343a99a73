"""Mamba-2: one pass against decoding, the layer by hand, its sizes and its start (CASES.md 8, 11, 14, 15, 17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import convolve, random, tiny, to_numpy
from torch import Tensor
from torch.nn import functional

from fpexp.errors import UserError
from fpexp.models import DecodingState, LanguageModel, mamba2
from fpexp.training.optimizer import parameter_groups

WORDS = ["model=mamba2", "model.head_size=4"]
PARTS = {"whole": [130], "64+66": [64, 66], "1+129": [1, 129], "one by one": [1] * 130}


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(seed))


def built(*words: str, precision: str = "float64") -> LanguageModel:
    """Two layers in evaluation mode, every parameter away from its special start."""
    model = tiny(*WORDS, f"precision={precision}", *words).model.eval()
    with torch.no_grad():
        for i, block in enumerate(model.layers):
            if hasattr(block.layer, "D"):
                block.layer.D.copy_(random(len(block.layer.D), seed=i))
                block.layer.norm.weight.copy_(1 + 0.5 * random(*block.layer.norm.weight.shape, seed=i))
    return model


def decode(model: LanguageModel, inputs: Tensor, parts: list[int]) -> tuple[Tensor, DecodingState]:
    """The logits of all parts, read one after the other."""
    state, logits = None, []
    for part in inputs.split(parts, dim=1):
        output, state = model.decode(part, state)
        logits.append(output.logits)
    assert state is not None
    return torch.cat(logits, dim=1), state


@pytest.mark.parametrize("groups", [1, 2])
def test_the_layer_by_hand(groups: int) -> None:
    """Token after token and head after head, in numbers of the class docstring."""
    layer = built(f"model.groups={groups}").layers[0].layer
    u = random(1, 7, 8)
    with torch.no_grad():
        found, _ = layer(u, None, None)
    heads, size, N = 4, 4, 4
    projected = torch.from_numpy(to_numpy(u[0]) @ to_numpy(layer.in_projection.weight).T)
    z, xbc, dt = projected.split([16, 16 + 2 * groups * N, heads], dim=-1)
    kernel, bias = to_numpy(layer.convolution.weight)[:, 0], to_numpy(layer.convolution.bias)
    xbc = torch.from_numpy(convolve(xbc.numpy(), kernel, bias))
    H = torch.zeros(heads, size, N, dtype=torch.float64)
    for t in range(7):
        y = torch.zeros(16, dtype=torch.float64)
        for h in range(heads):
            group = h // (heads // groups)
            x = xbc[t, h * size : (h + 1) * size]
            b = xbc[t, 16 + group * N :][:N]
            c = xbc[t, 16 + groups * N + group * N :][:N]
            delta = torch.log1p(torch.exp(dt[t, h] + layer.dt_bias[h]))
            H[h] = torch.exp(-delta * layer.A_log[h].exp()) * H[h] + torch.outer(delta * x, b)
            y[h * size : (h + 1) * size] = H[h] @ c + layer.D[h] * x
        gated = (y * z[t] * torch.sigmoid(z[t])).reshape(groups, -1)
        normed = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten() * layer.norm.weight
        expected = layer.out_projection.weight @ normed
        torch.testing.assert_close(found[0, t], expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("precision", "atol"), [("float32", 1e-4), ("float64", 1e-10)])
@pytest.mark.parametrize("words", [[], ["model.groups=2", "model.mlp_expand=2"], ["model.conv_width=1"]], ids=" ".join)
def test_any_cut_gives_the_logits_of_one_pass(words: list[str], precision: str, atol: float) -> None:
    """CASES.md 17, a batch of 3."""
    model = built(*words, precision=precision)
    inputs = tokens(3, 130)
    with torch.no_grad():
        whole = model(inputs)
    assert whole.solves == ()
    for parts in PARTS.values():
        torch.testing.assert_close(decode(model, inputs, parts)[0], whole.logits, rtol=0, atol=atol)


@pytest.mark.parametrize("length", [1, 3])
def test_shorter_than_the_convolution(length: int) -> None:
    """CASES.md 8: batch 1, evaluation and training; the first tokens of a longer sequence are the same."""
    model = built()
    inputs = tokens(1, 20)
    with torch.no_grad():
        whole = model(inputs).logits[:, :length]
        torch.testing.assert_close(model(inputs[:, :length]).logits, whole, rtol=0, atol=1e-12)
    model.train()
    model(inputs[:, :length]).logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_it_is_causal_and_padding_changes_nothing() -> None:
    """CASES.md 6, 18."""
    model = built()
    inputs = tokens(2, 32)
    changed = inputs.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 12
    mask = (torch.arange(32) < 20).expand(2, 32)
    with torch.no_grad():
        a, b, padded = model(inputs).logits, model(changed).logits, model(changed, mask=mask).logits
        alone = model(inputs[:1, :20]).logits
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-12)
    assert (a[:, 20:] - b[:, 20:]).abs().amax(-1).min() > 0
    torch.testing.assert_close(padded[:1, :20], alone, rtol=0, atol=1e-12)


def test_the_state_does_not_grow() -> None:
    """Neither its tensors nor the memory behind them; reading on leaves it as it was."""
    model = built(precision="float32")
    sizes = set()
    for length in (1, 10, 100):
        for parts in ([length], [1] * length):
            state = decode(model, tokens(3, length), parts)[1]
            held = [part for layer in state.layers for part in (layer.inputs, layer.H)]
            assert not any(part.requires_grad for part in held)
            sizes.add((sum(part.numel() for part in held), sum(part.untyped_storage().nbytes() for part in held)))
    assert sizes == {(2 * 3 * (3 * 24 + 16 * 4), 4 * 2 * 3 * (3 * 24 + 16 * 4))}
    before = [part.clone() for part in held]
    first, second = (model.decode(tokens(3, 2, seed=1), state)[0].logits for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_bfloat16_keeps_state_and_weights_in_float32() -> None:
    """CASES.md 14."""
    model = built(precision="float32")
    inputs = tokens(2, 66)
    with torch.no_grad():
        exact = model(inputs).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits, state = decode(model, inputs, [64, 1, 1])
        model.train()(inputs).logits.float().square().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert (logits - exact).abs().max() < 4e-2 * exact.abs().max()
    assert {layer.H.dtype for layer in state.layers} == {torch.float32}
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_the_start() -> None:
    """CASES.md 15: Delta and A in their ranges and spread over them, D ones, in the whole model."""
    words = ["model.d_model=64", "model.head_size=1", "model.a_range=[2,5]", "model.delta_range=[1e-2,1e-1]"]
    model = tiny(*WORDS, *words).model
    for block in model.layers:
        delta, A = functional.softplus(block.layer.dt_bias.detach()), block.layer.A_log.detach().exp()
        for values, low, high in ((delta, 1e-2, 1e-1), (A, 2, 5)):
            assert low * (1 - 1e-5) <= values.min() < 1.3 * low
            assert high / 1.3 < values.max() <= high * (1 + 1e-5)
        assert abs(float(A.mean()) - 3.5) < 0.5
        assert torch.equal(block.layer.D, torch.ones(128))
    assert not torch.equal(model.layers[0].layer.A_log, model.layers[1].layer.A_log)


def test_the_output_starts_smaller_with_depth() -> None:
    bounds = {}
    for layers in (1, 16):
        model = tiny(*WORDS, f"model.layers={layers}").model
        bounds[layers] = max(float(block.layer.out_projection.weight.detach().abs().max()) for block in model.layers)
    assert bounds[16] < 0.3 * bounds[1]


def test_what_is_not_decayed() -> None:
    """CASES.md 15: every parameter in one group; decayed are the matrices and the convolution's kernel alone."""
    model = tiny(*WORDS, "model.mlp_expand=2").model
    decayed, exempt = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert len(decayed["params"]) + len(exempt["params"]) == len(names)
    found = {names[id(parameter)].removeprefix("layers.0.layer.") for parameter in exempt["params"]}
    assert {"A_log", "D", "dt_bias", "convolution.bias", "norm.weight", "layers.0.norm.weight"} <= found
    matrices = ("embedding.weight", "projection.weight", "convolution.weight", "head.weight")
    assert all(names[id(parameter)].endswith(matrices) for parameter in decayed["params"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.d_model=64", "model.head_size=48"],
            "model.head_size=48 does not divide the inner width model.expand * model.d_model = 128; use 32 or 64",
        ),
        (["model.head_size=64"], "model.expand * model.d_model = 16; use 16"),
        (
            ["model.groups=3"],
            "model.groups=3 does not divide the number of heads model.expand * model.d_model / model.head_size = 4; "
            "use 2 or 4",
        ),
        (["model.expand=0.05"], "model.expand=0.05 times model.d_model=8 is an inner width of 0"),
        (["model.a_range=[16,1]"], "model.a_range=[16.0, 1.0] must ascend"),
        (["model.a_range=[0,1]"], "model.a_range[0]=0 is out of range"),
        (["model.delta_range=[1e-1,1e-3]"], "model.delta_range=[0.1, 0.001] must ascend"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_sizes_that_do_not_fit(words: list[str], message: str) -> None:
    """CASES.md 11: both keys and what is allowed."""
    with pytest.raises(UserError) as error:
        tiny(*WORDS, *words)
    assert message in str(error.value)


@pytest.mark.parametrize("head_size", [8, 24, 72, 100])
def test_any_head_size_that_fits(head_size: int) -> None:
    """CASES.md 11: correct and the same twice."""
    torch.manual_seed(0)
    model = tiny(*WORDS, f"model.d_model={head_size}", f"model.head_size={head_size}", "precision=float64").model.eval()
    inputs = tokens(2, 9)
    with torch.no_grad():
        first, second = model(inputs).logits, model(inputs).logits
    assert torch.equal(first, second)
    torch.testing.assert_close(decode(model, inputs, [4, 1, 4])[0], first, rtol=0, atol=1e-10)


def test_dropout() -> None:
    """In training alone."""
    model = built("model.dropout=0.1")
    inputs = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, model(inputs).logits)
        model.train()
        assert not torch.equal(model(inputs).logits, model(inputs).logits)


def test_it_learns() -> None:
    """To repeat the token of three steps before."""
    torch.manual_seed(0)
    model = tiny(*WORDS, "model.d_model=16").model
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.0), lr=1e-2)
    for step in range(80):
        inputs = tokens(16, 24, seed=step)
        loss = functional.cross_entropy(model(inputs).logits[:, 3:].flatten(0, 1), inputs[:, :-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.5


def copied(theirs: Any, groups: int) -> LanguageModel:
    """Our model with the weights of transformers' Mamba2ForCausalLM."""
    config = theirs.config
    model = mamba2(
        config.vocab_size,
        d_model=config.hidden_size,
        layers=config.num_hidden_layers,
        expand=config.expand,
        head_size=config.head_dim,
        state_size=config.state_size,
        groups=groups,
        conv_width=config.conv_kernel,
        a_range=(1, 16),
        delta_range=(1e-3, 1e-1),
        mlp_expand=0,
        dropout=0.0,
    )
    weights = {
        "embedding.weight": theirs.backbone.embeddings.weight,
        "norm.weight": theirs.backbone.norm_f.weight,
        "head.weight": theirs.lm_head.weight,
    }
    ours = {"in_proj": "in_projection", "conv1d": "convolution", "out_proj": "out_projection"}
    for i, block in enumerate(theirs.backbone.layers):
        weights[f"layers.{i}.norm.weight"] = block.norm.weight
        for name, parameter in block.mixer.named_parameters():
            part, dot, rest = name.partition(".")
            weights[f"layers.{i}.layer.{ours.get(part, part)}{dot}{rest}"] = parameter
    model.load_state_dict(weights)
    return model.eval()


@pytest.mark.parametrize("groups", [1, 2])
def test_the_logits_of_transformers(groups: int) -> None:
    """Another implementation, its parameters moved away from where they start."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Mamba2Config(
        vocab_size=12, hidden_size=16, expand=2, head_dim=8, num_heads=4, state_size=8, n_groups=groups, conv_kernel=4,
        num_hidden_layers=2, chunk_size=16, use_bias=False, use_conv_bias=True, rms_norm=True, norm_before_gate=False,
        layer_norm_epsilon=1e-5, residual_in_fp32=True, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.add_(0.3 * random(*parameter.shape, seed=i, dtype=torch.float32))
        model = copied(theirs, groups)
        inputs = tokens(2, 37)
        expected = theirs(inputs, use_cache=False).logits
        found = model(inputs).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
