"""DPLR that is contractive, and orthogonal vectors against rank collapse (paper's first version)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import random, tiny
from torch import Tensor
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, Householder
from fpexp.channel_mixers.base import LowRank
from fpexp.errors import UserError

VARIANTS: dict[str, Callable[[int, int], LowRank]] = {
    "DPLR contractive": lambda width, rank: DPLR(width, rank=rank, a_max=2.0, contractive=True),
    "DPLR orthogonal": lambda width, rank: DPLR(width, rank=rank, a_max=2.0, orthogonal=True),
    "DPLR both": lambda width, rank: DPLR(width, rank=rank, a_max=2.0, contractive=True, orthogonal=True),
    "H orthogonal": lambda width, rank: Householder(width, rank=rank, a_max=2.0, orthogonal=True),
}
variants = pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)


def dense(mixer: LowRank, coefficients: Tensor) -> Tensor:
    """Q (..., width, width), column by column."""
    factors = mixer.factors(coefficients)
    columns = [
        mixer.apply(factors, unit.expand(*coefficients.shape[:-1], -1))
        for unit in torch.eye(mixer.width).to(coefficients)
    ]
    return torch.stack(columns, dim=-1)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_contractive_dplr_has_eigenvalues_from_0_to_1(orthogonal: bool) -> None:
    """Where the vectors align too, which makes plain DPLR reach 1 - 4 * 2."""
    coefficients = random(50, 4 * 6 + 4) * 3
    coefficients[0, :24] = coefficients[0, :6].repeat(4)
    coefficients[0, 24:] = 20
    plain = torch.linalg.eigvalsh(dense(DPLR(6, rank=4, a_max=2.0), coefficients))
    assert plain.min() < -6.9
    found = dense(DPLR(6, rank=4, a_max=2.0, contractive=True, orthogonal=orthogonal), coefficients)
    assert_close(found, found.mT)
    eigenvalues = torch.linalg.eigvalsh(found)
    assert eigenvalues.min() > -1e-6
    assert eigenvalues.max() < 1 + 1e-6
    assert orthogonal or eigenvalues.min() < 1e-3  # the bound is met


def test_weights_that_sum_to_less_than_one_stay() -> None:
    coefficients = torch.cat([random(2, 12), torch.tensor([[-4.0, -3], [2, 1]])], dim=-1).double()
    _, before = DPLR(6, rank=2, a_max=1.0).factors(coefficients)
    _, after = DPLR(6, rank=2, a_max=1.0, contractive=True).factors(coefficients)
    assert torch.equal(after[0], before[0])
    assert_close(after[1], before[1] / before[1].sum())


@pytest.mark.parametrize("name", ["DPLR orthogonal", "DPLR both", "H orthogonal"])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_orthogonal_vectors_are_orthonormal(name: str, rank: int) -> None:
    """They span what the plain ones span, the first is the plain first, and Q has the singular values |1 - a_i|."""
    mixer = VARIANTS[name](12, rank)
    coefficients = 3 * random(20, mixer.coefficient_size)
    u, a = mixer.factors(coefficients)
    assert_close(u @ u.mT, torch.eye(rank).double().expand(20, -1, -1), rtol=0, atol=1e-4)
    plain, _ = DPLR(12, rank=rank, a_max=2.0).factors(coefficients)
    assert_close(plain @ u.mT @ u, plain, rtol=0, atol=1e-4)
    assert_close(u[:, 0], plain[:, 0], rtol=0, atol=1e-5)
    found = torch.linalg.svdvals(dense(mixer, coefficients))
    expected = torch.cat([(1 - a).abs(), a.new_ones(20, 12 - rank)], dim=-1).sort(-1, descending=True).values
    assert_close(found, expected, rtol=0, atol=1e-3)


@variants
def test_factors_by_finite_differences(make: Callable[[int, int], LowRank]) -> None:
    mixer = make(4, 3)
    coefficients = random(5, mixer.coefficient_size).requires_grad_()
    assert torch.autograd.gradcheck(mixer.factors, (coefficients,))
    v = random(5, 4, seed=1)
    assert torch.autograd.gradcheck(lambda p: mixer.apply(mixer.factors(p), v), (coefficients,))


@variants
def test_collapsed_and_zero_vectors_stay_finite(make: Callable[[int, int], LowRank]) -> None:
    mixer = make(4, 3)
    coefficients = random(3, mixer.coefficient_size)
    coefficients[0] = 0
    coefficients[1, :12] = coefficients[1, :4].repeat(3)
    coefficients.requires_grad_()
    output = mixer.apply(mixer.factors(coefficients), random(3, 4, seed=1))
    (gradient,) = torch.autograd.grad(output.square().sum(), coefficients)
    assert output.isfinite().all()
    assert output.abs().max() < 1e3
    assert gradient.isfinite().all()


@variants
def test_a_variant_has_no_kernel(make: Callable[[int, int], LowRank]) -> None:
    """And the plain mixers keep theirs."""
    assert make(6, 2).form is None
    assert DPLR(6, rank=2, a_max=1.0).form is not None
    assert Householder(6, rank=2, a_max=1.0).form is not None


def test_more_vectors_than_channels_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.channel_mixer\.rank=7"):
        Householder(6, rank=7, a_max=1.0, orthogonal=True)


@pytest.mark.parametrize(
    "words",
    [
        ["model=fp_mamba_dplr", "model.channel_mixer.contractive=true", "model.channel_mixer.orthogonal=true"],
        ["model=fp_mamba2_h", "model.channel_mixer.orthogonal=true"],
    ],
    ids=str,
)
def test_a_model_with_it_is_solved(words: list[str]) -> None:
    experiment = tiny(*words)
    tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(0))
    output = experiment.model.eval()(tokens)
    assert output.logits.isfinite().all()
    output.logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in experiment.model.parameters())
