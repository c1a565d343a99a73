"""How likely a fresh example is one that training has drawn."""

from __future__ import annotations

import math


def expected_overlap(log_count: float, drawn: int) -> float:
    """1 - (1 - 1/N)^drawn for N = exp(log_count) examples, all as likely: the chance that a fresh one was drawn."""
    if drawn == 0 or log_count > 700:
        return 0.0
    if log_count <= 0:
        return 1.0
    return -math.expm1(drawn * math.log1p(-math.exp(-log_count)))
