"""The sequential sweep of FP-RNN as one call: every token of every sequence solved in turn (see `Sequential`).

Its truth is the solver's own loop over `token_problem`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fpexp.ops.backend import choose, say_once
from fpexp.ops.mixers import Columns, MixerForm
from fpexp.ops.sweep import SweepResult, SweepSettings


@dataclass(frozen=True)
class VectorTerms:
    """What the token equations h_t = lambda_t * h_{t-1} + (1 - lambda_t) * (Q_t (v_t - h_t) + h_t) are made of.

    `v` (B, T, d); `from_x` (B, T, sum of columns.sizes), mixer coefficients and lambda before its sigmoid, in the
    places of `columns` for coefficients and delta; `weight` (columns.from_s[0], d), what multiplies s_t = h_{t-1} to
    be added to the coefficients. The state before the first token is `y`, which the mixer sees, and `h`, which decays,
    (B, 1, d) each. `mask` (B, T) is true at real tokens; None: all are. `keep`: the result has `known`, for the
    evaluation that follows.
    """

    v: Tensor
    from_x: Tensor
    columns: Columns
    weight: Tensor
    y: Tensor
    h: Tensor
    mask: Tensor | None
    keep: bool = False


def sweep(
    terms: VectorTerms, form: MixerForm | None, settings: SweepSettings, backend: str = "auto"
) -> SweepResult | None:
    """Solve all tokens in order, without gradient; None where no kernel knows the mixer or the device.

    `SweepResult.H` is the last token's image, (B, 1, d). ValueError where shapes do not fit `columns`, UserError where
    a backend is asked for that is not there; see `fpexp.ops.backend.choose`.
    """
    if choose("vector_sweep", terms.v.device, backend) != "cpu":
        return None
    if form is None:
        say_once("this channel mixer has no fused sweep: it is solved token by token in plain torch")
        return None
    terms.columns.check(terms.from_x, terms.weight, terms.v, 0)
    if any(terms.columns.from_s[1:]) or terms.columns.sizes[4]:
        raise ValueError(f"only mixer coefficients depend on s, and there is no gate: not {terms.columns}")
    from fpexp.ops.vector_sweep import cpu

    return cpu.sweep(terms, form, settings)
