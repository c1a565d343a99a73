"""What training launches of Triton's kernels, at the sizes of each scale: to compile, to time and to count.

    cpu    word problems on two cores: B 256, T 16, d 128, N 16
    gpu    language on one GPU: B 64, T 1024, d 512, N 16
    paper  language as in the paper: B 2, T 2048, d 2048, N 16
    copy   copying as in the paper: B 128, T 128, d 2048, N 32
    long   one long sequence, where the scans cut time into pieces: B 1, T 16384, d 1024, N 16

d is a layer's inner width, N the state of the selective scan. SSD has heads of 64 and N 128. The delta rules have a
model width of d / 2 and heads as Gated DeltaNet and DeltaProduct make them: of 128, at least two. Sweeps and iterations
are FP-Mamba's, with each channel mixer as conf/ has it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpexp.bench import selective_scan
from fpexp.bench.ops import delta_inputs, diagonal_inputs, product_inputs, ssd_inputs
from fpexp.channel_mixers import DPLR, Householder, Kronecker
from fpexp.channel_mixers.base import ChannelMixer
from fpexp.fixed_point import Cap, Picard, Sequential
from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.mixers import Columns


class Shape(NamedTuple):
    """Of a layer's scan."""

    batch: int
    length: int
    width: int
    N: int

    def __str__(self) -> str:
        return ", ".join(f"{name} {size}" for name, size in zip("BTdN", self, strict=True))


SCALES = {
    "cpu": Shape(256, 16, 128, 16),
    "gpu": Shape(64, 1024, 512, 16),
    "paper": Shape(2, 2048, 2048, 16),
    "copy": Shape(128, 128, 2048, 32),
    "long": Shape(1, 16384, 1024, 16),
}


class Kernels(NamedTuple):
    """Kernels that one call of `fpexp.ops.<op>` launches, and what draws its arguments, by name, for a shape.

    States, and what is a weight, are float32; all else has the type that is given.
    """

    op: str
    arguments: Callable[[Shape, torch.dtype], Mapping[str, Any]]

    @property
    def module(self) -> str:
        """Of the op's Triton backend."""
        return f"fpexp.ops.{self.op}.triton"

    def launches(self, shape: Shape, dtype: torch.dtype, device: str = "meta") -> dict[str, Any]:
        """Return what a training step launches, by name, on tensors of this device."""
        with torch.device(device):
            arguments = self.arguments(shape, dtype)
        return dict(importlib.import_module(self.module).launches(**arguments))


def _typed(dtype: torch.dtype, **tensors: Tensor) -> dict[str, Tensor]:
    return {name: t if name in ("A", "D", "state") else t.to(dtype) for name, t in tensors.items()}


def _diagonal_scan(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    batch, length, width, _ = shape
    return _typed(dtype, **diagonal_inputs(batch, length, width), state=torch.zeros(batch, width))


def _selective_scan(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    batch, _, width, N = shape
    return _typed(dtype, **selective_scan.make_inputs(*shape), state=torch.zeros(batch, width, N))


def _ssd(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = ssd_inputs(*shape[:3])
    (batch, _, heads, P), N = inputs["x"].shape, inputs["b"].shape[3]
    return _typed(dtype, **inputs, state=torch.zeros(batch, heads, P, N))


def _delta_rule(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return _of_delta_rule(shape, dtype, delta_inputs, expand_v=2)


def _delta_product(shape: Shape, dtype: torch.dtype) -> dict[str, Tensor]:
    return _of_delta_rule(shape, dtype, product_inputs, expand_v=1)


def _of_delta_rule(
    shape: Shape, dtype: torch.dtype, draw: Callable[..., dict[str, Tensor]], expand_v: int
) -> dict[str, Tensor]:
    batch, length, d, _ = shape
    d_model = d // 2
    heads = max(2, d_model // 128)
    K = d_model // heads
    inputs = draw(batch, length, d_model, K, expand_v * K)
    return _typed(dtype, **inputs, state=torch.zeros(batch, heads, K, expand_v * K))


def _sweep(mixer: ChannelMixer, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    return {"terms": _terms(mixer, shape, dtype), "form": mixer.form, "settings": _SOLVER._sweep_settings()}


def _iteration(mixer: ChannelMixer, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    """Without an early stop, so that each launch of many has its work to do."""
    settings = Picard(tolerance=_SOLVER.tolerance)._settings(Cap(10**6, stop_early=False), training=True)
    return {"terms": _terms(mixer, shape, dtype), "form": mixer.form, "settings": settings}


def _terms(mixer: ChannelMixer, shape: Shape, dtype: torch.dtype) -> SweepTerms:
    """Of FP-Mamba at its initialisation: the mixer, b and c depend on s; x and the scan are float32 under autocast."""
    batch, length, d, N = shape
    sizes = (mixer.coefficient_size, N, N)
    columns = Columns(sizes=(*sizes, d, 0), from_s=(*sizes, 0, 0))
    from_x = torch.cat([torch.randn(batch, length, sum(sizes)) / 2, torch.randn(batch, length, d) - 5], dim=-1)
    return SweepTerms(
        x=torch.randn(batch, length, d),
        from_x=from_x.to(dtype),
        columns=columns,
        A=-torch.arange(1.0, N + 1).repeat(d, 1),
        D=torch.ones(d),
        weight=torch.empty(sum(sizes), d).uniform_(-1, 1).div_(math.sqrt(2 * d)).to(dtype),
        norm=(torch.ones(d), torch.zeros(d), 1e-6),
        y=torch.zeros(batch, 1, d),
        H=torch.zeros(batch, d, N),
        mask=None,
    )


_SOLVER = Sequential(tolerance=0.1)

_MIXERS: dict[str, Callable[[int], ChannelMixer]] = {
    "h": lambda width: Householder(width, rank=2, a_max=2.0),
    "k": lambda width: Kronecker(width, a_max=2.0, normalise="spectral"),
    "dplr": lambda width: DPLR(width, rank=2, a_max=2.0),
}


def _of_mixer(
    draw: Callable[[ChannelMixer, Shape, torch.dtype], dict[str, Any]], mixer: str
) -> Callable[[Shape, torch.dtype], dict[str, Any]]:
    return lambda shape, dtype: draw(_MIXERS[mixer](shape.width), shape, dtype)


_ALL = {
    "diagonal_scan": Kernels("diagonal_scan", _diagonal_scan),
    "selective_scan": Kernels("selective_scan", _selective_scan),
    "ssd": Kernels("ssd", _ssd),
    "delta_rule": Kernels("delta_rule", _delta_rule),
    "delta_product": Kernels("delta_rule", _delta_product),
    **{f"sweep_{mixer}": Kernels("fixed_point_sweep", _of_mixer(_sweep, mixer)) for mixer in _MIXERS},
    **{f"iteration_{mixer}": Kernels("fixed_point_iteration", _of_mixer(_iteration, mixer)) for mixer in _MIXERS},
}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the op
        return False


KERNELS = {name: kernels for name, kernels in _ALL.items() if _exists(kernels.module)}
