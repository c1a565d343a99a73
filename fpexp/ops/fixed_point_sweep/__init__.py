"""The sequential sweep of FP-Mamba as one call: every token of every sequence solved in turn (see `Sequential`).

Its truth is the solver's own loop over `token_problem`; `cpu` is the same arithmetic without a temporary of size
B * T * d * N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fpexp.ops.backend import choose, say_once


@dataclass(frozen=True)
class MixerForm:
    """A channel mixer as the kernels know it: how its coefficients define Q.

    `sizes` is (rank, 0) for householder and dplr and (d1, d2) for kronecker; `rows` and `power_iterations` say how a
    Kronecker factor is normalised.
    """

    kind: Literal["householder", "dplr", "kronecker"]
    sizes: tuple[int, int]
    a_max: float
    rows: bool = False
    power_iterations: int = 0


@dataclass(frozen=True)
class SweepSettings:
    """When a token is solved, and how its iteration is damped; the settings of `Sequential`."""

    tolerance: float
    relative: bool
    inner_max_iterations: int
    damping: float
    damping_decay: float
    patience: int
    divergence_limit: float


@dataclass(frozen=True)
class SweepTerms:
    """What x contributes to the token equations, and the weights on s_t = y_{t-1}.

    `x` (B, T, d); `coefficients` (B, T, C); `b`, `c` (B, T, N); `delta` (B, T, d) before the softplus; `z` (B, T, d)
    where the gate stands inside the loop, else None. `weight` stacks the matrices on s (rows, d) for coefficients, b,
    c, delta and z, `weight_sizes` rows each, 0 where that dependence is off. `A` (d, N), `D` (d). `norm` is the weight,
    bias (d) and epsilon of a LayerNorm, or None. The state before the first token is `y` (B, 1, d) and `H` (B, d, N).
    """

    x: Tensor
    coefficients: Tensor
    b: Tensor
    c: Tensor
    delta: Tensor
    z: Tensor | None
    A: Tensor
    D: Tensor
    weight: Tensor
    weight_sizes: tuple[int, ...]
    norm: tuple[Tensor, Tensor, float] | None
    y: Tensor
    H: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class SweepResult:
    """y* (B, T, d); of each token (B, T) its iterations, residual and status code; the last H (B, d, N)."""

    value: Tensor
    iterations: Tensor
    residual: Tensor
    status: Tensor
    H: Tensor


def sweep(terms: SweepTerms, form: MixerForm | None, settings: SweepSettings) -> SweepResult | None:
    """Solve all tokens in order, without gradient; None where no kernel knows the mixer or the device."""
    if choose("fixed_point_sweep", terms.x.device) != "cpu":
        return None
    if form is None:
        say_once("this channel mixer has no fused sweep: it is solved token by token in plain torch")
        return None
    from fpexp.ops.fixed_point_sweep import cpu

    return cpu.sweep(terms, form, settings)
