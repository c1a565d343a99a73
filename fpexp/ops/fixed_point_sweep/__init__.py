"""The sequential sweep of FP-Mamba as one call: every token of every sequence solved in turn (see `Sequential`).

Its truth is the solver's own loop over `token_problem`; `cpu` and `triton` are the same arithmetic without a temporary
of size B * T * d * N.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fpexp.ops.backend import choose, load, say_once
from fpexp.ops.mixers import Columns, MixerForm
from fpexp.ops.shapes import check_shapes
from fpexp.ops.sweep import SweepResult, SweepSettings


@dataclass(frozen=True)
class SweepTerms:
    """What x contributes to the token equations, and the weights on s_t = y_{t-1}.

    `x` (B, T, d); `from_x` (B, T, sum of columns.sizes), delta in it before the softplus. `weight` (sum of
    columns.from_s, d) stacks the matrices on s. `A` (d, N), or (d, 1) where it is the same for all N; `D` (d). `norm`
    is the weight, bias (d) and epsilon of a LayerNorm, of an RMSNorm where the bias is None, or None. The state before
    the first token is `y` (B, 1, d) and `H` (B, d, N). `mask` (B, T) is true at real tokens; None: all are. `keep`: the
    result has `known`, for the evaluation that follows; `cpu` alone heeds it.
    """

    x: Tensor
    from_x: Tensor
    columns: Columns
    A: Tensor
    D: Tensor
    weight: Tensor
    norm: tuple[Tensor, Tensor | None, float] | None
    y: Tensor
    H: Tensor
    mask: Tensor | None
    keep: bool = False

    def check(self) -> None:
        """Raise a ValueError where tensors do not fit: kernels do not look where they read."""
        (batch, length, width), N = self.x.shape, self.H.shape[-1]
        self.columns.check(self.from_x, self.weight, self.x, N)
        scale, shift, _ = self.norm or (None, None, 0.0)
        shapes = {
            "A": (self.A, (width, 1 if self.A.shape[-1] == 1 else N)),
            "D": (self.D, (width,)),
            "the norm's weight": (scale, (width,)),
            "the norm's bias": (shift, (width,)),
            "y": (self.y, (batch, 1, width)),
            "H": (self.H, (batch, width, N)),
            "mask": (self.mask, (batch, length)),
        }
        check_shapes("FP-Mamba", shapes)

    def read_by_kernels(self) -> dict[str, Tensor | None]:
        """Return all tensors but H by the names that kernels of a GPU have for them, contiguous."""
        norm_weight, norm_bias, _ = self.norm or (None, None, 0.0)
        tensors = {
            "from_x": self.from_x,
            "weight": self.weight,
            "x": self.x,
            "A": self.A,
            "D": self.D,
            "norm_weight": norm_weight,
            "norm_bias": norm_bias,
            "carried": self.y,
            "mask": self.mask,
        }
        return {name: None if tensor is None else tensor.contiguous() for name, tensor in tensors.items()}


def sweep(
    terms: SweepTerms, form: MixerForm | None, settings: SweepSettings, backend: str = "auto"
) -> SweepResult | None:
    """Solve all tokens in order, without gradient; None where no kernel knows the mixer or the device.

    UserError where a backend is asked for that is not there; see `fpexp.ops.backend.choose`.
    """
    if choose("fixed_point_sweep", terms.x.device, backend) == "reference":
        return None
    if form is None:
        if backend == "auto":
            say_once("this layer has no fused sweep: it is solved token by token in plain torch")
        return None
    terms.check()
    found: SweepResult | None = load("fixed_point_sweep", terms.x.device, backend).sweep(terms, form, settings)
    return found
