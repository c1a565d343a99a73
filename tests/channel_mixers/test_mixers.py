"""Channel mixers against the oracle's dense matrices."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from helpers import MIXERS, dense_matrix, random
from torch import Tensor

from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.config.compose import compose
from fpexp.errors import UserError

WIDTHS = [4, 6, 8, 24, 48, 72, 100]

mixers = pytest.mark.parametrize("mixer", MIXERS)


def matrix(mixer: ChannelMixer, coefficients: Tensor) -> Tensor:
    """Q (..., width, width), column by column."""
    factors = mixer.factors(coefficients)
    identity = torch.eye(mixer.width, dtype=coefficients.dtype)
    columns = [mixer.apply(factors, e.expand(*coefficients.shape[:-1], -1)) for e in identity]
    return torch.stack(columns, dim=-1)


@mixers
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("a_max", [0.5, 2.0])
def test_apply_is_the_dense_product(mixer: str, width: int, a_max: float) -> None:
    made = MIXERS[mixer](width, a_max)
    coefficients = 2 * random(2, 3, made.coefficient_size)
    v = random(2, 3, width, seed=1)
    mixed = made.apply(made.factors(coefficients), v)
    tokens = zip(coefficients.flatten(0, 1).numpy(), v.flatten(0, 1).numpy(), strict=True)
    expected = np.stack([dense_matrix(made, p) @ v_t for p, v_t in tokens])
    np.testing.assert_allclose(mixed.flatten(0, 1).numpy(), expected, atol=1e-12)


def test_the_first_householder_factor_stands_on_the_left() -> None:
    """Q = (I - 2 u_1 u_1^T)(I - 2 u_2 u_2^T) with u_1 = e_1, u_2 = (e_1 + e_2) / sqrt 2 takes e_1 to -e_2.

    In the other order it would take e_1 to +e_2.
    """
    mixer = Householder(2, rank=2, a_max=2.0)
    coefficients = torch.tensor([40.0, 0.0, 40.0, 40.0, 40.0, 40.0], dtype=torch.float64)
    image = mixer.apply(mixer.factors(coefficients), torch.tensor([1.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(image, torch.tensor([0.0, -1.0], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_full_reflections_are_orthogonal(rank: int) -> None:
    """a_i = 2, at its limit: Q Q^T = I and det Q = (-1)^r. The epsilon in l2norm leaves 1e-6."""
    mixer = Householder(6, rank=rank, a_max=2.0)
    coefficients = 3 * random(5, mixer.coefficient_size)
    coefficients[:, -rank:] = 50.0
    Q = matrix(mixer, coefficients)
    torch.testing.assert_close(Q @ Q.mT, torch.eye(6, dtype=torch.float64).expand(5, -1, -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(Q.det(), torch.full((5,), (-1.0) ** rank, dtype=torch.float64), atol=1e-5, rtol=0)


@pytest.mark.parametrize("a_max", [0.9, 2.0])
def test_a_reflection_has_the_eigenvalue_one_minus_a(a_max: float) -> None:
    mixer = Householder(6, rank=1, a_max=a_max)
    coefficients = 3 * random(mixer.coefficient_size)
    coefficients[-1] = -0.7
    values = torch.linalg.eigvalsh(matrix(mixer, coefficients))
    assert values[0].item() == pytest.approx(1 - a_max * oracle.sigmoid(-0.7), abs=1e-6)
    torch.testing.assert_close(values[1:], torch.ones(5, dtype=torch.float64))


def test_dplr_subtracts_the_sum() -> None:
    """With u_1 = u_2 = e_1 and a_1 = a_2 = 2, Q e_1 = -3 e_1, where Householder gives e_1 back."""
    coefficients = torch.tensor([40.0, 0.0, 40.0, 0.0, 40.0, 40.0], dtype=torch.float64)
    e1 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for kind, expected in ((DPLR, -3.0), (Householder, 1.0)):
        mixer = kind(2, rank=2, a_max=2.0)
        torch.testing.assert_close(mixer.apply(mixer.factors(coefficients), e1), expected * e1, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("width", "sizes"), [(4, (2, 2)), (6, (2, 3)), (12, (3, 4)), (128, (8, 16)), (34, (2, 17))])
def test_kronecker_sizes_are_as_square_as_possible(width: int, sizes: tuple[int, int]) -> None:
    d1, d2 = sizes
    mixer = Kronecker(width, a_max=1.0, normalise="rows")
    k1, k2 = mixer.factors(random(mixer.coefficient_size))
    assert (k1.shape, k2.shape) == ((d1, d1), (d2, d2))


@pytest.mark.parametrize("width", [1, 2, 3, 13, 127])
def test_a_prime_width_is_refused(width: int) -> None:
    with pytest.raises(UserError, match=rf"factorises, not {width}; change model\.d_model or model\.expand"):
        Kronecker(width, a_max=1.0, normalise="rows")


def kronecker_factors(mixer: Kronecker, coefficients: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """K1 and K2 of one token by the oracle, with the exact largest eigenvalue."""
    d1, d2 = mixer.sizes
    sizes = [d1, d1 * (d1 + 1) // 2, d2, d2 * (d2 + 1) // 2]
    diagonal1, upper1, diagonal2, upper2 = (part.numpy() for part in coefficients.split(sizes))
    return (
        oracle.kronecker_factor(diagonal1, upper1, mixer.normalise),
        oracle.kronecker_factor(diagonal2, upper2, mixer.normalise),
    )


def relative_errors(mixer: Kronecker, scale: float, samples: int = 100) -> np.ndarray:
    coefficients = scale * random(samples, mixer.coefficient_size)
    errors = []
    for p, *found in zip(coefficients, *mixer.factors(coefficients), strict=True):
        for factor, expected in zip(found, kronecker_factors(mixer, p), strict=True):
            errors.append(np.abs(factor.numpy() - expected).max() / np.abs(expected).max())
    return np.array(errors)


@pytest.mark.parametrize("width", [6, 12, 128])
@pytest.mark.parametrize("scale", [1e-3, 0.03, 0.3, 3.0])
def test_row_normalised_factors_are_the_oracles(width: int, scale: float) -> None:
    assert relative_errors(Kronecker(width, a_max=1.0, normalise="rows"), scale).max() < 1e-12


SCALES = [1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0]
"""Of the coefficients; the largest eigenvalue of U U^T goes from 1e-6 to 1e2."""


@pytest.mark.parametrize("width", [12, 128])
@pytest.mark.parametrize("scale", SCALES)
def test_ten_power_iterations_are_near_the_largest_eigenvalue(width: int, scale: float) -> None:
    """Measured with a power iteration whose steps are normalised exactly: median 1e-15 (width 12) and 2e-5 (128),
    mean 5e-3; where two eigenvalues are close the largest error in 600 factors is 0.43."""
    errors = relative_errors(Kronecker(width, a_max=1.0, normalise="spectral"), scale)
    assert np.median(errors) < 1e-4
    assert np.mean(errors) < 2e-2
    assert errors.max() < 0.5


@pytest.mark.parametrize("width", [12, 128])
@pytest.mark.parametrize("scale", SCALES)
def test_more_power_iterations_reach_it(width: int, scale: float) -> None:
    errors = relative_errors(Kronecker(width, a_max=1.0, normalise="spectral", power_iterations=300), scale)
    assert np.median(errors) < 1e-6
    assert errors.max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("width", [6, 128])
@pytest.mark.parametrize("scale", SCALES)
def test_spectral_normalisation_bounds_the_factors_at_every_scale(scale: float, width: int, dtype: torch.dtype) -> None:
    """With diag(sigmoid) at one the largest singular value of K_n is at most 1, or 1.5 for want of iterations."""
    mixer = Kronecker(width, a_max=1.0, normalise="spectral")
    d1, d2 = mixer.sizes
    coefficients = scale * random(200, mixer.coefficient_size, dtype=dtype)
    second = d1 + d1 * (d1 + 1) // 2
    coefficients[:, :d1] = coefficients[:, second : second + d2] = 50.0
    for factor in mixer.factors(coefficients):
        assert torch.linalg.matrix_norm(factor, 2).max().item() < 1.5


@mixers
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, -1e4, 1e4])
def test_degenerate_coefficients_give_finite_values_and_gradients(mixer: str, dtype: torch.dtype, value: float) -> None:
    """silu(0) = 0, and silu(-1e4) = 0: nothing to normalise."""
    made = MIXERS[mixer](6, 2.0)
    coefficients = torch.full((2, made.coefficient_size), value, dtype=dtype, requires_grad=True)
    v = random(2, 6, dtype=dtype).requires_grad_()
    mixed = made.apply(made.factors(coefficients), v)
    mixed.square().sum().backward()
    assert mixed.isfinite().all()
    assert coefficients.grad is not None
    assert coefficients.grad.isfinite().all()
    assert v.grad is not None
    assert v.grad.isfinite().all()


@mixers
def test_gradients_match_finite_differences(mixer: str) -> None:
    """With a power iteration that has converged the gradient is that of the largest eigenvalue itself."""
    made = MIXERS[mixer](6, 2.0)
    coefficients = random(2, made.coefficient_size).requires_grad_()
    v = random(2, 6, seed=1).requires_grad_()
    if isinstance(made, Kronecker):
        made.power_iterations = 500
    torch.autograd.gradcheck(lambda p, w: made.apply(made.factors(p), w), (coefficients, v))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rank=0", r"model\.channel_mixer\.rank=0 is out of range: it must be at least 1"),
        ("a_max=0", r"model\.channel_mixer\.a_max=0 is out of range"),
        ("a_max=2.5", r"model\.channel_mixer\.a_max=2\.5 is out of range"),
        ("normalise=rows", r"unknown key 'model\.channel_mixer\.normalise'"),
    ],
)
def test_senseless_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        compose(["task=a4", "model=fp_mamba_h", f"model.channel_mixer.{setting}"])
