"""Loss and accuracies as sums over scored positions (CASES 19-21)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fpexp.evaluation.metrics import Accuracy, LayerStatistics, summed_loss
from fpexp.fixed_point import SolveResult, Status
from fpexp.tasks import IGNORE


def logits_for(predictions: Tensor, vocabulary: int) -> Tensor:
    """Logits (B, T, V) whose argmax is `predictions`."""
    return torch.nn.functional.one_hot(predictions, vocabulary) * 10.0


def accuracy_of(predictions: Tensor, targets: Tensor, vocabulary: int = 64) -> Accuracy:
    accuracy = Accuracy()
    accuracy.add(logits_for(predictions, vocabulary), targets)
    return accuracy


def test_right_only_on_bos_and_padding_scores_nothing() -> None:
    """CASES 19: `B x x x . .`, right at B and at the padding, wrong in between."""
    bos, pad = 60, 61
    truth = torch.tensor([[bos, 3, 4, 5, pad, pad], [bos, 7, 8, 9, 10, pad]])
    targets = torch.where(truth < bos, truth, IGNORE)
    predictions = torch.where(truth < bos, truth + 1, truth)
    summary = accuracy_of(predictions, targets).summary()
    assert summary["token_accuracy"] == summary["sequence_accuracy"] == summary["last_token_accuracy"] == 0
    assert summary["n"] == 2
    wrong_there = torch.where(truth < bos, truth, 0)
    summary = accuracy_of(wrong_there, targets).summary()
    assert summary["token_accuracy"] == summary["sequence_accuracy"] == summary["last_token_accuracy"] == 1


def test_uniform_guess_scores_one_in_sixty() -> None:
    source = torch.Generator().manual_seed(0)
    guesses, targets = torch.randint(60, (2, 3000, 20), generator=source)
    accuracy = Accuracy()
    accuracy.add_predictions(guesses, targets)
    deviation = math.sqrt(1 / 60 * 59 / 60)
    summary = accuracy.summary()
    assert summary["token_accuracy"] == pytest.approx(1 / 60, abs=4 * deviation / math.sqrt(60_000))
    assert summary["last_token_accuracy"] == pytest.approx(1 / 60, abs=4 * deviation / math.sqrt(3000))
    assert summary["sequence_accuracy"] == 0


def test_uniform_logits_lose_the_log_of_the_vocabulary() -> None:
    accuracy = Accuracy()
    accuracy.add(torch.zeros(2, 3, 60), torch.tensor([[1, 2, 3], [4, 5, IGNORE]]))
    assert accuracy.summary()["loss"] == pytest.approx(math.log(60), rel=1e-6)


def test_one_wrong_token_in_four_rows_of_ten() -> None:
    """CASES 20."""
    targets = torch.arange(40).reshape(4, 10)
    predictions = targets.clone()
    predictions[2, 4] += 1
    summary = accuracy_of(predictions, targets).summary()
    assert summary["token_accuracy"] == 0.975
    assert summary["sequence_accuracy"] == 0.75
    assert summary["last_token_accuracy"] == 1
    predictions[2, 4] -= 1
    predictions[1, 9] += 1
    assert accuracy_of(predictions, targets).summary()["last_token_accuracy"] == 0.75


@pytest.mark.parametrize("size", [1, 8, 37])
def test_any_batch_size_gives_the_same_numbers(size: int) -> None:
    """CASES 21: 37 samples of mixed length, each batch padded to its own longest."""
    source = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 20, (37,), generator=source)
    logits = [torch.randn(int(n), 5, generator=source) for n in lengths]
    targets = [torch.randint(5, (int(n),), generator=source) for n in lengths]
    every_logit, every_target = torch.cat(logits), torch.cat(targets)
    loss = float(torch.nn.functional.cross_entropy(every_logit.double(), every_target))
    right = every_logit.argmax(-1) == every_target

    accuracy = Accuracy()
    for start in range(0, 37, size):
        pad = torch.nn.utils.rnn.pad_sequence
        batch = pad(logits[start : start + size], batch_first=True, padding_value=3.0)
        accuracy.add(batch, pad(targets[start : start + size], batch_first=True, padding_value=IGNORE))
    summary = accuracy.summary()
    assert summary["loss"] == pytest.approx(loss, abs=1e-5)
    assert math.exp(summary["loss"]) == pytest.approx(math.exp(loss), abs=1e-5)
    assert summary["token_accuracy"] == pytest.approx(float(right.double().mean()), abs=1e-12)
    ends = lengths.cumsum(0) - 1
    assert summary["last_token_accuracy"] == pytest.approx(float(right[ends].double().mean()), abs=1e-12)
    assert summary["n"] == 37


def test_a_sequence_without_scored_positions_does_not_count() -> None:
    targets = torch.tensor([[IGNORE, IGNORE], [1, IGNORE]])
    assert accuracy_of(torch.ones(2, 2, dtype=torch.long), targets).summary() == pytest.approx(
        {"token_accuracy": 1, "last_token_accuracy": 1, "sequence_accuracy": 1, "n": 1, "loss": pytest.approx(0, abs=1)}
    )


def test_nothing_scored_is_none_not_zero() -> None:
    summary = accuracy_of(torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2), IGNORE)).summary()
    assert summary["n"] == 0
    assert [value for name, value in summary.items() if name != "n"] == [None] * 4


def test_loss_is_computed_in_float32_or_better() -> None:
    source = torch.Generator().manual_seed(2)
    logits = torch.randn(2, 50, 9, generator=source, dtype=torch.float64)
    targets = torch.randint(9, (2, 50), generator=source)
    exact = summed_loss(logits, targets)
    assert exact.dtype == torch.float64
    rounded = logits.bfloat16()
    assert summed_loss(rounded, targets).dtype == torch.float32
    assert float(summed_loss(rounded, targets)) == pytest.approx(
        float(summed_loss(rounded.double(), targets)), rel=1e-5
    )


def solve(iterations: list[int], status: list[Status], residual: list[float]) -> SolveResult:
    return SolveResult(
        torch.zeros(len(status), 1, 1), torch.tensor(iterations), torch.tensor(residual), torch.tensor(status)
    )


def test_layers_are_weighed_by_sequences_and_the_worst_layer_shows() -> None:
    statistics = LayerStatistics()
    good, capped, gone = Status.CONVERGED, Status.CAP_REACHED, Status.DIVERGED
    statistics.add(
        [solve([2, 4, 6], [good] * 3, [0.1, 0.0, 0.05]), solve([9, 9, 9], [capped, capped, good], [1, 2, 0])]
    )
    statistics.add([solve([8], [good], [0.02]), solve([1], [gone], [0.0])])
    summary = statistics.summary()
    assert [layer["iterations_mean"] for layer in summary["layers"]] == [5, 7]
    assert [layer["iterations_max"] for layer in summary["layers"]] == [8, 9]
    assert summary["iterations_mean"] == 6
    assert summary["iterations_max"] == 9
    assert summary["fraction_converged"] == 0.25
    assert summary["cap_hits"] == 2
    assert summary["diverged"] == 1
    assert summary["residual_max"] == 2
