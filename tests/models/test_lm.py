"""Whole models as the command line builds them: causality, padding, batches, short inputs (CASES.md 5-8, 14, 18)."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from helpers import LENGTHS, tiny
from torch import Tensor, nn

from fpexp.build import Experiment
from fpexp.fixed_point import Cap, Status
from fpexp.machine import autocast
from fpexp.models import LanguageModel

EXACT = "precision=float64"
FIXED = Cap(4, stop_early=False)
EVALUATION = Cap(1000)

FP_MODELS = {name: [f"model=fp_mamba_{name}"] for name in ("h", "k", "dplr")}
MODELS = {**FP_MODELS, "lstm": ["model=lstm"]}
SOLVED = {
    f"{name}-{solver}": [*words, f"solver={solver}"]
    for name, words in FP_MODELS.items()
    for solver in ("picard", "sequential")
} | {"lstm": MODELS["lstm"]}

ATTACHED = {
    f"{name}-{gradient}": [f"model=fp_mamba_{name}", f"gradient={gradient}"]
    for name in ("h", "k")
    for gradient in ("implicit", "unrolled")
}

OTHERS = {
    name: [f"model={name}"]
    for name in ("fp_mamba2_h", "fp_rnn_k", "mamba", "mamba2", "gdn", "deltaproduct", "transformer")
}
EVERY = {**SOLVED, **ATTACHED, **OTHERS}

attached = pytest.mark.parametrize("words", EVERY.values(), ids=EVERY)
solved = pytest.mark.parametrize("words", SOLVED.values(), ids=SOLVED.keys())
fp_solved = pytest.mark.parametrize("words", [w for n, w in SOLVED.items() if n != "lstm"], ids=lambda w: "-".join(w))


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(12, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss(model: LanguageModel, inputs: Tensor, cap: Cap = FIXED) -> Tensor:
    logits = model(inputs, cap).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), inputs.roll(1, dims=1).flatten())


def gradients(model: LanguageModel) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def test_blocks_are_pre_norm_and_residual() -> None:
    """u <- u + layer(rms_norm(u)) from the embedding on; logits = head(rms_norm(u))."""
    model = tiny(*MODELS["h"], EXACT, "model.layers=2").model
    with torch.no_grad():
        for norm in (model.norm, *(block.norm for block in model.layers)):
            norm.weight.uniform_(0.5, 2.0)
        u = model.embedding.weight[tokens(2, 4)]
        for block in model.layers:
            u = u + block.layer(rms_norm(u, block.norm.weight), FIXED, None)[0]
        expected = rms_norm(u, model.norm.weight) @ model.head.weight.T
        torch.testing.assert_close(model(tokens(2, 4), FIXED).logits, expected, rtol=0, atol=1e-8)


def rms_norm(u: Tensor, weight: Tensor) -> Tensor:
    return u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@attached
def test_three_passes_give_three_times_the_gradient(words: list[str]) -> None:
    """CASES.md 5: nothing is carried from one pass to the next."""
    model = tiny(*words, EXACT).model
    inputs = tokens(3, 5)
    loss(model, inputs).backward()
    once = gradients(model)
    for _ in range(2):
        loss(model, inputs).backward()
    for gradient, thrice in zip(once, gradients(model), strict=True):
        torch.testing.assert_close(thrice, 3 * gradient)


@attached
def test_two_forwards_before_one_backward(words: list[str]) -> None:
    """CASES.md 5."""
    model = tiny(*words, EXACT).model
    first, second = tokens(3, 5, seed=1), tokens(2, 7, seed=2)
    loss(model, first).backward()
    loss(model, second).backward()
    expected = gradients(model)
    model.zero_grad()
    (loss(model, first) + loss(model, second)).backward()
    for gradient, both in zip(expected, gradients(model), strict=True):
        torch.testing.assert_close(both, gradient)


@pytest.mark.parametrize(
    "name", ["k-picard", "h-sequential", "k-implicit", "h-unrolled", "lstm", "fp_mamba2_h", "fp_rnn_k", "mamba2", "gdn"]
)
def test_training_mixed_with_evaluation_holds_on_to_nothing(name: str) -> None:
    """CASES.md 5: twenty steps later no more tensors are alive."""
    model = tiny(*EVERY[name]).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        model.train()
        optimizer.zero_grad()
        loss(model, tokens(3, 4, seed=seed)).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(tokens(3, 6, seed=seed), Cap(20))

    step(0)
    before = live_tensors()
    for seed in range(1, 21):
        step(seed)
    assert live_tensors() == before


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@solved
@pytest.mark.parametrize("training", [False, True])
def test_causality(words: list[str], training: bool) -> None:
    """CASES.md 6: token 20 of 32 changes; outputs 0-19 stay and output 20 moves. Picard at a fixed count."""
    overrides = [] if words == MODELS["lstm"] else ["model.conv_width=4", "model.layers=2"]
    model = tiny(*words, *overrides).model.train(training)
    inputs = tokens(2, 32)
    changed = inputs.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 12
    with torch.no_grad():
        before, after = model(inputs, FIXED).logits, model(changed, FIXED).logits
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-6)
    assert (before[:, 20] - after[:, 20]).abs().amax() > 1e-4


@fp_solved
def test_an_easy_sequence_is_the_same_beside_a_hard_one(words: list[str]) -> None:
    """CASES.md 6, in evaluation, where each sequence stops by itself: value and count do not depend on neighbours."""
    model = hardened(tiny(*words, EXACT).model).eval()
    inputs = tokens(6, 8)
    with torch.no_grad():
        together = model(inputs, EVALUATION)
        alone = [model(inputs[i : i + 1], EVALUATION) for i in range(len(inputs))]
    torch.testing.assert_close(together.logits, torch.cat([one.logits for one in alone]), rtol=0, atol=1e-9)
    counts = together.solves[0].iterations
    assert counts.tolist() == [int(one.solves[0].iterations) for one in alone]
    assert counts.min() < counts.max()


def hardened(model: LanguageModel) -> LanguageModel:
    """Scale the embedding up, so that sequences differ in how many iterations they need."""
    with torch.no_grad():
        model.embedding.weight.mul_(50)
        for layer in model.layers:
            layer.layer.mixer_bias.normal_(generator=torch.Generator().manual_seed(0))
            layer.layer.x_projection.weight.mul_(4)
            layer.layer.D.fill_(0.5)
    return model


@pytest.mark.parametrize("name", ["k", "lstm"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_gives_finite_values_and_gradients(name: str, length: int) -> None:
    """CASES.md 7 for the whole model, with the short convolution; the layer's values are compared in test_fp_mamba."""
    words = MODELS[name]
    overrides = [] if words == MODELS["lstm"] else ["model.conv_width=4", "solver.inner_max_iterations=3"]
    model = tiny(*words, *overrides, "model.d_model=4").model
    logits = model(tokens(2, length), Cap(3)).logits
    logits.square().sum().backward()
    assert logits.shape == (2, length, 12)
    assert logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


@fp_solved
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("training", [False, True])
def test_inputs_shorter_than_the_convolution(words: list[str], length: int, training: bool) -> None:
    """CASES.md 8: batch 1, and what comes out is what the same tokens give in front of longer input."""
    model = tiny(*words, "model.conv_width=4").model.train(training)
    inputs = tokens(1, 6)
    short, long = model(inputs[:, :length], FIXED).logits, model(inputs, FIXED).logits
    torch.testing.assert_close(short, long[:, :length], rtol=0, atol=1e-5)
    loss(model, inputs[:, :length]).backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model))


@solved
@pytest.mark.parametrize("cap", [FIXED, EVALUATION], ids=["fixed", "converge"])
def test_right_padding_changes_nothing(words: list[str], cap: Cap) -> None:
    """CASES.md 18: alone, and padded beside longer ones; other tokens in the padding change nothing either."""
    overrides = [] if words == MODELS["lstm"] else ["model.conv_width=4", "model.layers=2"]
    model = tiny(*words, EXACT, *overrides).model.eval()
    lengths = torch.tensor([3, 8, 1, 5])
    mask = torch.arange(8) < lengths[:, None]
    with torch.no_grad():
        outputs = [model(tokens(4, 8).where(mask, padding), cap, mask) for padding in (0, 7)]
        assert all(len(output.solves) == (0 if words == MODELS["lstm"] else 2) for output in outputs)
        for i, length in enumerate(lengths.tolist()):
            alone = model(tokens(4, 8)[i : i + 1, :length], cap)
            for output in outputs:
                torch.testing.assert_close(output.logits[i, :length], alone.logits[0], rtol=0, atol=1e-9)
                for padded, single in zip(output.solves, alone.solves, strict=True):
                    assert padded.iterations[i] == single.iterations[0]
                    assert padded.status[i] == single.status[0]
                    torch.testing.assert_close(padded.residual[i], single.residual[0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("row", [[False, True, True], [True, False, True]])
def test_padding_elsewhere_is_refused(words: list[str], row: list[bool]) -> None:
    """CASES.md 18."""
    model = tiny(*words).model
    with pytest.raises(ValueError, match="padding must be on the right"):
        model(tokens(2, 3), FIXED, torch.tensor([[True] * 3, row]))


@solved
def test_bfloat16_autocast(words: list[str]) -> None:
    """CASES.md 14: float32 weights, gradients and solutions."""
    experiment = tiny(*words, "precision=bfloat16")
    model = experiment.model
    with autocast(experiment.config):
        output = model(tokens(4, 8), EVALUATION)
        loss(model, tokens(4, 8)).backward()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients(model))
    assert all(solve.value.dtype == torch.float32 for solve in output.solves)
    assert output.logits.dtype == torch.bfloat16
    assert output.logits.isfinite().all()


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS.keys())
def test_bfloat16_is_near_float32(words: list[str]) -> None:
    """At one evaluation from zero: iterating on may lead to another of several solutions."""
    solver = [] if words == MODELS["lstm"] else ["solver=picard"]
    experiment = tiny(*words, *solver, "precision=bfloat16")
    inputs, once = tokens(4, 8), Cap(1, stop_early=False)
    plain = experiment.model(inputs, once).logits
    with autocast(experiment.config):
        rounded = experiment.model(inputs, once).logits
    assert (rounded - plain).abs().max() < 4e-2 * plain.abs().max()
    assert not torch.equal(rounded.float(), plain)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_without_bfloat16_there_is_no_autocast(precision: str) -> None:
    experiment = tiny(*MODELS["h"], f"precision={precision}")
    with autocast(experiment.config):
        logits = experiment.model(tokens(2, 3), FIXED).logits
    assert logits.dtype == getattr(torch, precision)
    assert {parameter.dtype for parameter in experiment.model.parameters()} == {logits.dtype}


@fp_solved
def test_layers_report_their_solves(words: list[str]) -> None:
    """In training the caps hold for picard, while the sequential solver has its own."""
    model = tiny(*words, "model.layers=3").model
    solves = model(tokens(4, 5), Cap(2, stop_early=False)).solves
    assert len(solves) == 3
    for solve in solves:
        assert solve.iterations.shape == solve.residual.shape == solve.status.shape == (4,)
        if "solver=picard" in words:
            assert solve.iterations.tolist() == [2] * 4
        else:
            assert ((solve.residual <= 0.1) == (solve.status == Status.CONVERGED)).all()
    assert model.iterations_depend_on_length == ("solver=picard" in words)


@fp_solved
def test_training_stops_together_and_evaluation_by_itself(words: list[str]) -> None:
    model = hardened(tiny(*words, EXACT).model)
    inputs = tokens(6, 8)
    with torch.no_grad():
        together, apart = (model.train(mode)(inputs, EVALUATION).solves[0] for mode in (True, False))
    assert (len(together.iterations.unique()) == 1) == ("solver=picard" in words)
    assert len(apart.iterations.unique()) > 1


def build_with_dropout(seed: int = 0) -> Experiment:
    return tiny(*MODELS["h"], "model.dropout=0.5", "model.layers=2", f"seed={seed}")


def test_dropout_acts_in_training_only() -> None:
    model = build_with_dropout().model
    inputs = tokens(2, 4)
    with torch.no_grad():
        assert not torch.equal(model(inputs, FIXED).logits, model(inputs, FIXED).logits)
        model.eval()
        assert torch.equal(model(inputs, FIXED).logits, model(inputs, FIXED).logits)


def test_the_weights_come_from_the_seed_alone() -> None:
    """Seed 0 is a seed, and building leaves the global generator as it was."""
    torch.manual_seed(5)
    first = build_with_dropout().model
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))
    second, other = build_with_dropout().model, build_with_dropout(seed=1).model
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.embedding.weight, other.embedding.weight)


@pytest.mark.parametrize("words", MODELS.values(), ids=MODELS.keys())
def test_a_copied_model_computes_the_same(words: list[str]) -> None:
    model = tiny(*words).model.eval()
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(tokens(2, 4), FIXED).logits, model(tokens(2, 4), FIXED).logits)


def test_parameter_count_by_hand() -> None:
    """FP-Mamba-H: d_model 8, width 16, N 4, dt_rank 1, rank 2, V 12, gate outside, lambda off."""
    mixer = 2 * 16 + 2
    layer = (
        8 * 32 + 16 * (mixer + 4 + 4 + 1) + 16 * (mixer + 4 + 4 + 16) + mixer + (16 + 16) + 16 * 4 + 16 + 32 + 16 * 8
    )
    assert tiny(*MODELS["h"]).model.parameter_count() == 12 * 8 + 8 + layer + 8 + 8 * 12


@pytest.mark.parametrize("wrong", [torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 3), torch.zeros(3).long()])
def test_what_are_no_tokens_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="must be indices"):
        tiny(*MODELS["h"]).model(wrong)


def test_a_mask_is_of_booleans() -> None:
    with pytest.raises(ValueError, match="bool"):
        tiny(*MODELS["h"]).model(tokens(2, 3), mask=torch.ones(2, 3))
