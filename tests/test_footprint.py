"""What cannot fit the machine's memory is refused before a start, and nothing that may fit is."""

from __future__ import annotations

import pytest
from helpers import tiny

from fpexp.errors import UserError
from fpexp.footprint import check_evaluation
from fpexp.machine import total_memory

SMALL = ["task.lengths.max=4", "training.batch_size=6", "evaluation.lengths=[2,64]", "evaluation.samples=32"]
OF_A_TOKEN = 8 + 8 + 4 * (16 + 12)  # index, target; the head's input of 16 numbers and 12 logits


def give(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr("fpexp.footprint.total_memory", lambda device: memory)


@pytest.mark.parametrize(("batch_size", "sequences"), [(8, 8), (100, 32)])
def test_the_longest_evaluation_by_hand(monkeypatch: pytest.MonkeyPatch, batch_size: int, sequences: int) -> None:
    words = [*SMALL, "model=lstm", f"evaluation.batch_size={batch_size}"]
    needed = sequences * 64 * OF_A_TOKEN
    give(monkeypatch, needed)
    experiment = tiny(*words)
    give(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=rf"evaluation.lengths: a length of 64 at evaluation.batch_size={batch_size} "):
        tiny(*words)
    arguments = (experiment.config, experiment.task, experiment.model)
    check_evaluation(*arguments, [2, 63], "lengths", "batch_size")
    with pytest.raises(UserError, match=rf"^lengths: a length of 65 at batch_size={batch_size} takes"):
        check_evaluation(*arguments, [65, 2], "lengths", "batch_size")


@pytest.mark.parametrize(("accumulation", "sequences"), [(1, 6), (4, 2)])
def test_the_longest_training_batch_by_hand(monkeypatch: pytest.MonkeyPatch, accumulation: int, sequences: int) -> None:
    """d_model 8, width 16, H r=2 (34 coefficients), N 4, dt_rank 1; every linear map's output, in float64."""
    words = ["model=fp_mamba_h", "precision=float64", "task.lengths.max=400", "training.batch_size=6"]
    words += [f"training.accumulation={accumulation}", "evaluation.lengths=[1]", "evaluation.batch_size=1"]
    needed = sequences * 400 * (8 + 8 + 8 * (2 * 16 + (34 + 4 + 4 + 1) + 16 + 8 + 12))
    give(monkeypatch, needed)
    tiny(*words)
    give(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=rf"task.lengths.max: a length of 400 .*accumulation={accumulation} takes"):
        tiny(*words)


def test_the_states_of_a_micro_batch_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba: width 16, N 100000; both keys are named."""
    words = ["model=mamba", "model.layers=1", "model.state_size=100000", "training.batch_size=600"]
    words += ["training.accumulation=2", "evaluation.batch_size=1", "task.lengths.max=2", "evaluation.lengths=[1]"]
    needed = 300 * 16 * 100_000 * 4
    give(monkeypatch, needed)
    tiny(*words)
    give(monkeypatch, needed - 1)
    with pytest.raises(UserError, match=r"model.state_size=100000 at training.batch_size=600 is a state of"):
        tiny(*words)


def test_weights_gradients_and_moments_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["model=lstm", "model.d_model=200", "task.lengths.max=2", "training.batch_size=1"]
    words += ["evaluation.lengths=[1]", "evaluation.batch_size=1"]
    count = tiny(*words).model.parameter_count()
    give(monkeypatch, 16 * count)
    tiny(*words)
    give(monkeypatch, 16 * count - 1)
    with pytest.raises(UserError, match=f"a model of {count:,} parameters takes at least"):
        tiny(*words)


def test_this_machine_has_some_memory() -> None:
    assert 2**28 < total_memory("cpu") < 2**50
