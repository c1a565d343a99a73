"""Caps on whole-sequence iterations, and which solvers obey them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import tiny

from fpexp import build
from fpexp.errors import UserError
from fpexp.fixed_point import Anderson, Auto, Cap, Converge, Fixed, Gamma, Lagged, Picard, Sequential, auto


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(schedule: Gamma, count: int, length: int = 16) -> torch.Tensor:
    source = generator()
    caps = [schedule.training_cap(length, source) for _ in range(count)]
    assert all(cap.stop_early for cap in caps)
    return torch.tensor([cap.max_iterations for cap in caps], dtype=torch.float64)


def rounded_up_moments(shape: int, mean: float) -> tuple[float, float]:
    """Mean and variance of ceil(G), G ~ Gamma(shape, scale = mean / shape), by the Erlang distribution."""
    rate = shape / mean

    def above(x: float) -> float:
        return math.exp(-rate * x) * sum((rate * x) ** i / math.factorial(i) for i in range(shape))

    pairs = [(k, above(k - 1) - above(k)) for k in range(1, int(30 * mean) + 30)]
    first = sum(k * p for k, p in pairs)
    return first, sum(k * k * p for k, p in pairs) - first**2


@pytest.mark.parametrize(
    ("shape", "mean", "mean_per_token", "length"),
    [(4, 4.0, 0.0, 16), (4, 4.0, 0.25, 16), (4, 4.0, 0.25, 128), (1, 2.0, 0.0, 16), (8, 4.0, 0.0, 16)],
)
def test_gamma_has_the_mean_and_variance_it_was_asked_for(
    shape: int, mean: float, mean_per_token: float, length: int
) -> None:
    """The draw has variance mean^2 / shape; what is seen of it is rounded up."""
    count = 10_000
    caps = draws(Gamma(shape=shape, mean=mean, mean_per_token=mean_per_token), count, length)
    expected_mean, expected_variance = rounded_up_moments(shape, mean + mean_per_token * length)
    assert caps.mean().item() == pytest.approx(expected_mean, abs=5 * math.sqrt(expected_variance / count))
    assert caps.var().item() == pytest.approx(expected_variance, rel=0.15)


def test_gamma_defaults_to_the_papers_shape_and_mean() -> None:
    default, explicit = Gamma(), Gamma(shape=4.0, mean=4.0, mean_per_token=0.0)
    assert torch.equal(draws(default, 50), draws(explicit, 50))


def test_gamma_is_at_least_one() -> None:
    caps = draws(Gamma(mean=1e-6), 200)
    assert caps.min() == 1
    assert draws(Gamma(), 2000).min() >= 1


def test_gamma_draws_from_its_generator_alone() -> None:
    schedule = Gamma()
    torch.manual_seed(1)
    first = [schedule.training_cap(16, generator(seed)) for seed in range(20)]
    torch.manual_seed(2)
    assert first == [schedule.training_cap(16, generator(seed)) for seed in range(20)]
    assert len({cap.max_iterations for cap in first}) > 3


@pytest.mark.parametrize(
    ("schedule", "training"),
    [
        (Converge(max_iterations=70, evaluation_max_iterations=90), Cap(70)),
        (Fixed(max_iterations=70, evaluation_max_iterations=90), Cap(70)),
        (Fixed(max_iterations=70, stop_early=False, evaluation_max_iterations=90), Cap(70, stop_early=False)),
    ],
)
def test_caps_in_training_and_evaluation(schedule: Converge | Fixed, training: Cap) -> None:
    assert {schedule.training_cap(length, generator(length)) for length in range(1, 9)} == {training}
    assert schedule.evaluation_cap() == Cap(90)


def test_defaults_are_the_papers_caps() -> None:
    assert Converge().training_cap(16, generator()) == Cap(100)
    for schedule in (Converge(), Fixed(max_iterations=2), Gamma()):
        assert schedule.evaluation_cap() == Cap(1000)


@pytest.mark.parametrize("schedule", [["schedule=fixed"], ["schedule=gamma"]])
def test_schedules_that_cap_need_a_whole_sequence_solver(schedule: list[str]) -> None:
    with pytest.raises(UserError, match="solver=picard"):
        tiny("model=fp_mamba_h", "solver=sequential", *schedule)
    for solver, kind in {"picard": Picard, "anderson": Anderson, "lagged": Lagged, "auto": Picard}.items():
        experiment = tiny("model=fp_mamba_h", f"solver={solver}", *schedule)
        assert isinstance(experiment.model.layers[0].layer.solver, kind)


def test_auto_sweeps_on_a_cpu() -> None:
    experiment = tiny("model=fp_mamba_h", "device=cpu")
    assert isinstance(experiment.model.layers[0].layer.solver, Sequential)
    assert experiment.notes == ("solver=auto: sequential (fewest operations, on a CPU)",)


def test_auto_on_a_gpu_goes_by_length_once_its_crossover_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of T tokens against as many iterations, at most 100."""
    experiment = tiny("model=fp_mamba_h", "task.bos=true")
    assert build._longest_solve(experiment.config) == (experiment.task.lengths.max + 1, 100)

    def choice(length: int, capped: bool = False) -> str:
        return Auto.choose("cuda", capped, lambda: (length, 100))[0]

    assert choice(16) == choice(2048) == "picard"
    monkeypatch.setattr(auto, "CROSSOVER", 4.0)
    assert (choice(16), choice(399), choice(400)) == ("sequential", "sequential", "picard")
    assert choice(16, capped=True) == "picard"
    monkeypatch.setattr(auto, "CROSSOVER", 0.5)
    assert choice(16) == "picard"
