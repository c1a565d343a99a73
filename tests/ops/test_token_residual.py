"""Residual norms of an iterate in one pass, against plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers import random

from fpexp.ops.token_residual import distances


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 15, 16, 17, 40, 128])
def test_as_plain_torch(width: int, dtype: torch.dtype) -> None:
    f_y, y = random(3, 5, width, dtype=dtype), random(3, 5, width, seed=1, dtype=dtype)
    f_y[0, 0] = y[0, 0]
    f_y[1, 1, -1], f_y[1, 2, 0], y[2, 0, width // 2] = float("nan"), float("inf"), float("nan")
    found, expected = (distances(f_y, y, backend=backend) for backend in ("cpu", "reference"))
    nan = expected[0].isnan()
    assert nan.sum() == 2
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a[~nan], b[~nan])
        assert a[nan].isnan().all()


def test_views_and_half_precision() -> None:
    f_y, y = random(5, 3, 8).transpose(0, 1).bfloat16(), random(3, 5, 16, seed=1)[..., ::2].bfloat16()
    for found, expected in zip(distances(f_y, y), distances(f_y, y, backend="reference"), strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=0)


def test_a_difference_below_the_smaller_type_is_seen() -> None:
    y = random(1, 2, 16)
    difference, _ = distances(y, y.float())
    assert (difference > 0).all()


def test_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="same shape"):
        distances(random(2, 3, 16), random(1, 3, 16))
