"""What the sequential sweeps share in numba: the product with what s contributes, and a token's iteration."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from torch import Tensor
from torch.nn import functional

from fpexp.ops.mixers.cpu import apply
from fpexp.ops.simd.cpu import LANES, absolute, at_least, broadcast, lane_max, lane_sum, load, spread, store, zeros
from fpexp.ops.sweep import SweepSettings
from fpexp.status import Status

ROWS = 4  # sequences of a task: with PANEL columns, the sums of a product fill the registers
PANEL = 2 * LANES

_CONVERGED, _CAP_REACHED = int(Status.CONVERGED), int(Status.CAP_REACHED)
_DIVERGED, _NON_FINITE = int(Status.DIVERGED), int(Status.NON_FINITE)
_EPSILON = 1e-6


class Rules(NamedTuple):
    """Norm, stopping and damping of a token's iteration."""

    normed: bool
    centred: bool  # a LayerNorm, which takes out the mean; else an RMSNorm
    norm_epsilon: float
    tolerance: float
    relative: bool
    cap: int
    limit: float
    damping: float
    damping_decay: float
    patience: int

    @classmethod
    def of(cls, settings: SweepSettings, norm_epsilon: float | None, centred: bool = True) -> Rules:
        """Return `settings` as the kernels take them; without a norm where `norm_epsilon` is None."""
        return cls(
            normed=norm_epsilon is not None,
            centred=centred,
            norm_epsilon=norm_epsilon or 0.0,
            tolerance=settings.tolerance,
            relative=settings.relative,
            cap=settings.inner_max_iterations,
            limit=settings.divergence_limit,
            damping=settings.damping,
            damping_decay=settings.damping_decay,
            patience=settings.patience,
        )


def panels(weight: Tensor) -> Tensor:
    """Return the weights on s (rows, d) as (panels, d, PANEL), padded with zeros."""
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % PANEL))
    return padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2)


@njit(error_model="numpy")
def times_panels(s: Any, rows: int, width: int, weight: Any, out: Any, stride: int) -> None:
    """out (ROWS, stride) = s (rows, width) times the panels of `weight`; unused rows of s count for nothing."""
    for panel in range(stride // PANEL):
        start, column = panel * width * PANEL, panel * PANEL
        if rows == 1:
            low = high = zeros(load(weight, 0))
            for k in range(width):
                low = low + spread(s, k) * load(weight, start + k * PANEL)
                high = high + spread(s, k) * load(weight, start + k * PANEL + LANES)
            store(out, column, low)
            store(out, column + LANES, high)
            continue
        a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = zeros(load(weight, 0))
        for k in range(width):
            w0, w1 = load(weight, start + k * PANEL), load(weight, start + k * PANEL + LANES)
            s0, s1 = spread(s, k), spread(s, width + k)
            s2, s3 = spread(s, 2 * width + k), spread(s, 3 * width + k)
            a0, a1 = a0 + s0 * w0, a1 + s0 * w1
            b0, b1 = b0 + s1 * w0, b1 + s1 * w1
            c0, c1 = c0 + s2 * w0, c1 + s2 * w1
            d0, d1 = d0 + s3 * w0, d1 + s3 * w1
        store(out, column, a0)
        store(out, column + LANES, a1)
        store(out, stride + column, b0)
        store(out, stride + column + LANES, b1)
        store(out, 2 * stride + column, c0)
        store(out, 2 * stride + column + LANES, c1)
        store(out, 3 * stride + column, d0)
        store(out, 3 * stride + column + LANES, d1)


@njit(error_model="numpy", inline="always")
def iterate_token(
    mixer: Any, rules: Any, F: Any, x: Any, base: Any, g: Any, gated: bool, gate: Any, lanes: Any, norm_weight: Any,
    norm_bias: Any, f: Any, scratch: Any, mixed: Any, y: Any,
) -> tuple[int, float, int]:  # fmt: skip
    """Solve y = norm(gate (base + g mixed)), mixed = Q (x - y) + y, from 0; iterations, residual and status."""
    real = x.dtype.type
    width, columns = mixer.rows * mixer.columns, mixer.rows * mixer.padded
    step, best, stalled = real(rules.damping), real(np.inf), 0
    for j in range(0, columns, LANES):
        store(y, j, zeros(load(x, j)))
    iteration = 0
    while True:
        iteration += 1
        for j in range(0, columns, LANES):
            store(mixed, j, load(x, j) - load(y, j))
        apply(mixer, F, mixed, scratch)
        total = zeros(load(x, 0))
        for j in range(0, columns, LANES):
            m = load(mixed, j) + load(y, j)
            store(mixed, j, m)
            value = load(base, j) + load(g, j) * m
            if gated:
                value = value * load(gate, j)
            store(f, j, value)
            total = total + value
        if rules.normed:
            mean = broadcast(lane_sum(total) / real(width)) if rules.centred else zeros(total)
            total = zeros(mean)
            for j in range(0, columns, LANES):
                value = (load(f, j) - mean) * load(lanes, j)
                store(f, j, value)
                total = total + value * value
            scale = broadcast(real(1) / np.sqrt(lane_sum(total) / real(width) + real(rules.norm_epsilon)))
            for j in range(0, columns, LANES):
                store(f, j, load(f, j) * scale * load(norm_weight, j) + load(norm_bias, j))
        difference = size = total = zeros(load(x, 0))
        for j in range(0, columns, LANES):
            value = load(f, j)
            difference = at_least(absolute(value - load(y, j)), difference)
            size = at_least(absolute(value), size)
            total = total + (value - value)  # 0, or NaN where the value is not finite
        largest, residual = lane_max(size), lane_max(difference)
        if rules.relative:
            residual = residual / max(largest, real(_EPSILON))
        if not (lane_sum(total) == 0 and math.isfinite(residual)):
            return iteration, real(np.nan), _NON_FINITE
        if largest > real(rules.limit):
            return iteration, residual, _DIVERGED
        if residual <= real(rules.tolerance):
            return iteration, residual, _CONVERGED
        if iteration == rules.cap:
            return iteration, residual, _CAP_REACHED
        if residual < best:
            best, stalled = residual, 0
        else:
            stalled += 1
            if stalled >= rules.patience:
                step, stalled = step * real(rules.damping_decay), 0
        for j in range(0, columns, LANES):
            store(y, j, load(y, j) + broadcast(step) * (load(f, j) - load(y, j)))
