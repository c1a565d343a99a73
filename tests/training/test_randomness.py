"""Seeds: splits apart, no order, no global state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import tiny

from fpexp.build import build
from fpexp.randomness import derive_seed, generator, seeded

SEEN = 2**32
"""torch's CPU generator (mt19937) starts from the low 32 bits of a seed: two seeds equal there are one stream."""


def draw(source: torch.Generator) -> list[int]:
    return torch.randint(2**40, (4,), generator=source).tolist()


def test_the_premise_about_torch() -> None:
    one, two = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7 + 5 * SEEN)
    assert draw(one) == draw(two)


@pytest.mark.parametrize("seed", [0, 1])
def test_splits_never_share_a_stream(seed: int) -> None:
    """As many draws as the paper's training has steps (125,000), and as many again of each other split."""
    streams = {
        split: {derive_seed(seed, split, index) % SEEN for index in range(125_000)}
        for split in ("train", "validation", "test")
    }
    assert not streams["train"] & streams["validation"]
    assert not streams["train"] & streams["test"]
    assert not streams["validation"] & streams["test"]


def test_splits_are_apart_across_seeds() -> None:
    """What one seed trains on, another does not test on."""
    seeds, draws = range(50), range(2000)
    train = {derive_seed(seed, "train", n) % SEEN for seed in seeds for n in draws}
    for split in ("validation", "test"):
        assert not train & {derive_seed(seed, split, n) % SEEN for seed in seeds for n in draws}


def test_other_streams_are_apart_from_the_data() -> None:
    assert len({draw(generator(0, stream))[0] for stream in ("train", "validation", "test", "cap", "dropout")}) == 5


def test_seed_zero_is_a_seed() -> None:
    assert draw(generator(0, "train")) == draw(generator(0, "train"))
    assert draw(generator(0, "train")) != draw(generator(1, "train"))
    assert draw(generator(0, "train", 0)) != draw(generator(0, "train", 1))


def test_draws_do_not_depend_on_order() -> None:
    forward = [draw(generator(3, "train", index)) for index in (1, 2, 3)]
    backward = [draw(generator(3, "train", index)) for index in (3, 2, 1)]
    assert forward == backward[::-1]


def test_seeded_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with seeded(5, "initialisation"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(5, "initialisation"):
        assert torch.equal(torch.rand(3), inside)


def test_seeded_puts_the_global_generator_back_after_an_error() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    with pytest.raises(TypeError), seeded(5, "initialisation"):
        torch.rand(torch.rand(1))  # type: ignore[call-overload]
    assert torch.equal(torch.get_rng_state(), before)


def test_building_and_drawing_read_and_set_no_global_state(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    weights = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        experiment = build(config)
        experiment.task.sample(4, 4, generator(0, "train"))
        assert torch.equal(torch.get_rng_state(), before)
        weights.append(experiment.model.head.weight)
    assert torch.equal(*weights)


def test_another_seed_gives_other_weights(tmp_path: Path) -> None:
    heads = [build(tiny(tmp_path, f"seed={seed}")).model.head.weight for seed in (0, 1)]
    assert not torch.equal(*heads)
