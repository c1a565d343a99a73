"""What holds for every choice of `model`: decoding, causality, padding, short inputs, training."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import LENGTHS, tiny
from torch import Tensor, nn

from fpexp.config.catalogue import choices
from fpexp.fixed_point import Cap
from fpexp.models import LanguageModel
from fpexp.ops.backend import only_reference
from fpexp.training.optimizer import parameter_groups

MODELS = sorted(choices("model"))
WITH_DELTA = [name for name in MODELS if name not in ("lstm", "transformer") and not name.startswith("fp_rnn")]
BASELINES = [name for name in MODELS if not name.startswith("fp_")]
EXACT = "precision=float64"
CAP = Cap(4, stop_early=False)

SOLVED = [(name, f"solver={solver}") for name in MODELS if name not in BASELINES for solver in ("picard", "sequential")]

every_model = pytest.mark.parametrize("name", MODELS)
baselines = pytest.mark.parametrize("name", BASELINES)
solved = pytest.mark.parametrize("words", SOLVED, ids=" ".join)
every_solve = pytest.mark.parametrize("words", [*((name,) for name in BASELINES), *SOLVED], ids=" ".join)


def built(name: str, *words: str) -> LanguageModel:
    """A model with a convolution of width 4 where it can have one."""
    convolution = ["model.conv_width=4"] if name.startswith("fp_mamba") else []
    return tiny(f"model={name}", *convolution, *words).model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss(model: LanguageModel, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
    logits = model(inputs, CAP, mask).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs.roll(1, dims=1).flatten())


def decoded(model: LanguageModel, inputs: Tensor, parts: list[int]) -> Tensor:
    state, logits = None, []
    for part in inputs.split(parts, dim=1):
        output, state = model.decode(part, state)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


@baselines
@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("parts", [[64, 66], [1, 129], [1] * 130], ids=["64+66", "1+129", "one by one"])
def test_any_cut_gives_the_logits_of_one_pass(name: str, mlp: bool, parts: list[int]) -> None:
    """CASES.md 17, in float32."""
    words = ["model.mlp_expand=2"] if mlp and name != "lstm" else []
    model = tiny(f"model={name}", "model.layers=2", *words).model.eval()
    inputs = tokens(3, 130)
    torch.testing.assert_close(decoded(model, inputs, parts), model(inputs).logits, rtol=0, atol=1e-4)


@every_solve
def test_what_comes_later_changes_nothing_before(words: tuple[str, ...]) -> None:
    """CASES.md 6; picard at a fixed count."""
    model = built(*words, EXACT).eval()
    inputs = tokens(2, 32)
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 12
    before, after = model(inputs, CAP).logits, model(changed, CAP).logits
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-12)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).gt(1e-9).all()


@solved
def test_an_easy_sequence_is_the_same_beside_hard_ones(words: tuple[str, ...]) -> None:
    """CASES.md 6, where each sequence stops by itself: no value and no count depends on neighbours."""
    mild = ["solver.tolerance=1e-3", "model.channel_mixer.a_max=0.5"]
    model = built(*words, EXACT, *(["solver.tolerance=1e-6"] if words[0].startswith("fp_rnn") else mild)).eval()
    inputs = tokens(6, 8)
    together = model(inputs, Cap(60))
    alone = [model(inputs[i : i + 1], Cap(60)) for i in range(6)]
    torch.testing.assert_close(together.logits, torch.cat([one.logits for one in alone]), rtol=0, atol=1e-9)
    counts = together.solves[0].iterations
    assert counts.tolist() == [int(one.solves[0].iterations) for one in alone]
    assert counts.min() < counts.max()


@every_solve
@pytest.mark.parametrize("cap", [CAP, Cap(60)], ids=["fixed", "converge"])
def test_padding_on_the_right_changes_nothing_real(words: tuple[str, ...], cap: Cap) -> None:
    """CASES.md 18: neither logits nor what is told of the solves."""
    name, *solver = words
    model = built(name, EXACT, *solver, *(["solver.tolerance=1e-4"] if solver else [])).eval()
    lengths = [3, 17, 1, 12]
    mask = torch.arange(17) < torch.tensor(lengths)[:, None]
    together = model(tokens(4, 17), cap, mask)
    assert len(together.solves) == (len(model.layers) if solver else 0)
    for i, length in enumerate(lengths):
        alone = model(tokens(4, 17)[i : i + 1, :length], cap)
        torch.testing.assert_close(together.logits[i, :length], alone.logits[0], rtol=0, atol=1e-10)
        for padded, single in zip(together.solves, alone.solves, strict=True):
            assert padded.iterations[i] == single.iterations[0]
            assert padded.residual[i].item() == pytest.approx(single.residual[0].item(), rel=1e-6, abs=1e-12)


@every_model
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(name: str, length: int) -> None:
    """CASES.md 7, with random biases of Delta: logits and every gradient are those of plain loops in float64.

    In float64 each by itself; in float32 beside the largest, for a sum over all tokens may cancel.
    """
    solver = [] if name in BASELINES else ["solver=picard", "model.channel_mixer.a_max=0.5"]
    single = built(name, "model.d_model=4", *solver)
    with torch.no_grad():
        for parameter_name, parameter in single.named_parameters():
            if parameter_name.endswith(("dt_projection.bias", "dt_bias")):
                parameter.copy_(2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) - 2)
    double, plain = copy.deepcopy(single).double(), copy.deepcopy(single).double()
    with only_reference():
        expected = results(plain, tokens(2, length))
    largest = max(gradient.abs().max() for gradient in expected[1:])
    for exact, rounded, truth in zip(
        results(double, tokens(2, length)), results(single, tokens(2, length)), expected, strict=True
    ):
        assert (exact - truth).abs().max() <= 1e-9 * truth.abs().max()
        assert (rounded - truth).abs().max() <= 1e-4 * max(largest, truth.abs().max())


@pytest.mark.parametrize("name", ["fp_mamba2_h", "fp_rnn_h"])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_of_a_sweep(name: str, length: int) -> None:
    """CASES.md 7, in float64, with the gradient of what the sweep has left; FP-Mamba's is in test_fixed_point_sweep."""
    words = ["solver=sequential", "solver.inner_max_iterations=3", "model.channel_mixer.a_max=0.5", "model.d_model=4"]
    model, inputs = built(name, EXACT, *words), tokens(1, length)
    with only_reference():
        expected = results(model, inputs)
    for found, truth in zip(results(model, inputs), expected, strict=True):
        assert (found - truth).abs().max() <= 1e-9 * truth.abs().max()


SIXTEEN_DELTAS = {
    **{name: ["model.head_size=1"] for name in ("mamba2", "fp_mamba2_h", "fp_mamba2_k")},
    "gdn": ["model.heads=16", "model.head_size=4"],
    "deltaproduct": ["model.heads=16", "model.head_size=4", "model.decay=true"],
}
"""What it takes for as many Deltas a layer as the others have channels."""


@pytest.mark.parametrize("name", WITH_DELTA)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_delta_at_its_extremes(name: str, precision: str) -> None:
    """CASES.md 9 and 10: Deltas from 0 to 3e4 side by side give finite logits and gradients, in float32 near the truth.

    FP-Mamba's Delta by itself is in test_fp_mamba.
    """
    solver = [] if name in BASELINES else ["solver=picard", "model.channel_mixer.a_max=0.5"]
    model = tiny(f"model={name}", *solver, *SIXTEEN_DELTAS.get(name, [])).model
    values = torch.tensor([0.0, *(sign * v for v in (10.0, 20.0, 88.0, 1e3, 3e4) for sign in (-1, 1))])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("dt_projection.bias", "dt_bias")):
                assert len(parameter) == 16
                parameter.copy_(torch.cat([values, values[:5]]))
    exact = copy.deepcopy(model).double()
    inputs = tokens(2, 17)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        found = results(model, inputs)
    assert all(tensor.isfinite().all() for tensor in found)
    if precision == "float32":
        with only_reference():
            expected = results(exact, inputs)
        assert (found[0] - expected[0]).abs().max() <= 1e-3 * expected[0].abs().max()
        names = [parameter_name for parameter_name, _ in model.named_parameters()]
        for parameter_name, one, other in zip(names, found[1:], expected[1:], strict=True):
            if parameter_name.endswith(("dt_projection.bias", "dt_bias")):
                assert (one - other).abs().max() <= 1e-3 * other.abs().max()


def results(model: LanguageModel, inputs: Tensor) -> list[Tensor]:
    """The logits, and the gradient of a loss in every parameter."""
    logits = model(inputs, CAP).logits
    value = nn.functional.cross_entropy(logits.flatten(0, 1), inputs.roll(1, dims=1).flatten())
    return [logits.detach(), *torch.autograd.grad(value, list(model.parameters()))]


@every_model
@pytest.mark.parametrize("length", [1, 3])
def test_short_inputs(name: str, length: int) -> None:
    """CASES.md 8: below the width of a convolution, batch 1, training and evaluation."""
    model = built(name)
    for training in (True, False):
        model.train(training)
        value = loss(model, tokens(1, length))
        value.backward()
        assert value.isfinite()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@every_model
def test_two_steps_teach_every_parameter(name: str) -> None:
    """A finite gradient that is not zero, and a loss that falls."""
    model = tiny(f"model={name}", EXACT).model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model, tokens(8, 9))
        value.backward()
        losses.append(value.item())
        for parameter_name, parameter in model.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.isfinite().all(), parameter_name
        optimizer.step()
    assert losses[2] < losses[0]
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not silent


@every_model
def test_bfloat16_is_near_float32(name: str) -> None:
    """CASES.md 14: autocast leaves weights, gradients, what is solved and what is carried in float32.

    At one evaluation from zero: iterating on may lead to another of several solutions.
    """
    solver = [] if name in BASELINES else ["solver=picard"]
    model = tiny(f"model={name}", "model.d_model=64", *solver).model.eval()  # norms of few channels cancel
    inputs, once = tokens(2, 7), Cap(1, stop_early=False)
    exact = model(inputs, once).logits
    with torch.autocast("cpu", torch.bfloat16):
        output = model(inputs, once)
        output.logits.float().square().sum().backward()
        _, state = model.decode(inputs)
    torch.testing.assert_close(output.logits.float(), exact, rtol=0, atol=4e-2 * exact.abs().max().item())
    assert output.logits.dtype == torch.bfloat16
    for parameter_name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, parameter_name
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.dtype == torch.float32, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
    assert all(solve.value.dtype == torch.float32 for solve in output.solves)
    assert len(output.solves) == len([] if name in BASELINES else model.layers)
    for layer in state.layers:
        carried = getattr(layer, "loop", layer)
        states = [getattr(carried, key) for key in ("H", "S", "h") if hasattr(carried, key)]
        assert states or name in ("lstm", "transformer")
        assert all(tensor.dtype == torch.float32 for tensor in states)


@every_model
def test_every_parameter_is_in_one_group(name: str) -> None:
    """CASES.md 15: vectors, A_log and D are not decayed."""
    model = tiny(f"model={name}").model
    decayed, exempt = (group["params"] for group in parameter_groups(model, 0.1))
    assert isinstance(decayed, list)
    assert isinstance(exempt, list)
    ids = [id(parameter) for parameter in decayed + exempt]
    assert sorted(ids) == sorted(id(parameter) for parameter in model.parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(p.ndim >= 2 and names[id(p)].rpartition(".")[2] not in ("A_log", "D") for p in decayed)


@pytest.mark.parametrize("name", WITH_DELTA)
def test_delta_starts_in_its_range(name: str) -> None:
    """CASES.md 15, after the whole model is built."""
    experiment = tiny(f"model={name}", *(["model.decay=true"] if name == "deltaproduct" else []))
    settings = experiment.config.model.settings
    low, high = settings["delta_range"]
    biases = [p for n, p in experiment.model.named_parameters() if n.endswith(("dt_projection.bias", "dt_bias"))]
    assert len(biases) == settings["layers"]
    for bias in biases:
        delta = nn.functional.softplus(bias)
        assert delta.min() >= 0.999 * low
        assert delta.max() <= 1.001 * high


@every_model
def test_accumulated_micro_batches_are_the_batch(name: str) -> None:
    """CASES.md 31: the gradient of 8 sequences is that of 4 times 2."""
    whole = tiny(f"model={name}", EXACT).model.eval()
    parts = copy.deepcopy(whole)
    inputs = tokens(8, 6)
    loss(whole, inputs).backward()
    for part in inputs.split(2):
        (loss(parts, part) / 4).backward()
    for (parameter_name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-10, msg=parameter_name)
