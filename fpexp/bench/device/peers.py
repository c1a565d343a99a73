"""Our ops, forward and backward through autograd, beside what public packages have for the same equation.

A package that is not installed is left out and said; one that computes something else than we do is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpexp.bench.device.part import Finding, Item, Setup, describe
from fpexp.bench.launches import KERNELS, SCALES, Shape
from fpexp.models.short_convolution import ShortConvolution
from fpexp.ops.delta_rule import delta_rule
from fpexp.ops.selective_scan import selective_scan
from fpexp.ops.ssd import ssd

Inputs = Mapping[str, Tensor]
Function = Callable[..., Tensor]

LIMIT = 5e-2
"""Largest difference of y, relative to its largest entry, in bfloat16."""


class Peer(NamedTuple):
    """A package and the function that imports it and returns what computes our op's y; ImportError without it."""

    package: str
    load: Callable[[], Function]


class Op(NamedTuple):
    """Our op, its inputs at a shape in bfloat16, and the peers of it."""

    ours: Function
    inputs: Callable[[Shape], Inputs]
    peers: tuple[Peer, ...]


def _mamba_scan() -> Function:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def scan(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
        return selective_scan_fn(x.mT, delta.mT, A, b.mT, c.mT, D).mT

    return scan


def _mamba_ssd() -> Function:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def scan(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor) -> Tensor:
        return mamba_chunk_scan_combined(x, delta, A, b, c, chunk_size=256, D=D)

    return scan


def _fla_delta_rule() -> Function:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        return chunk_gated_delta_rule(q, k[:, :, 0], v[:, :, 0], log_decay, beta[:, :, 0], scale=1.0)[0]

    return rule


def _causal_convolution() -> Function:
    from causal_conv1d import causal_conv1d_fn

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return causal_conv1d_fn(x.mT, weight, bias, activation="silu").mT

    return convolve


def _our_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    with torch.device("meta"):
        layer = ShortConvolution(*weight.shape)
    return torch.func.functional_call(layer, {"weight": weight[:, None], "bias": bias}, x)


def _convolution_inputs(shape: Shape) -> Inputs:
    batch, length, width, _ = shape
    x = torch.randn(batch, length, width)
    return {name: t.bfloat16() for name, t in {"x": x, "weight": torch.randn(width, 4) / 2, "bias": x[0, 0]}.items()}


def _without_state(name: str) -> Callable[[Shape], Inputs]:
    def inputs(shape: Shape) -> Inputs:
        return {key: t for key, t in KERNELS[name].arguments(shape, torch.bfloat16).items() if key != "state"}

    return inputs


def _first(op: Callable[..., tuple[Tensor, Tensor]]) -> Function:
    return lambda **inputs: op(**inputs)[0]


OPS = {
    "selective_scan": Op(_first(selective_scan), _without_state("selective_scan"), (Peer("mamba_ssm", _mamba_scan),)),
    "ssd": Op(_first(ssd), _without_state("ssd"), (Peer("mamba_ssm", _mamba_ssd),)),
    "delta_rule": Op(_first(delta_rule), _without_state("delta_rule"), (Peer("fla", _fla_delta_rule),)),
    "short convolution": Op(_our_convolution, _convolution_inputs, (Peer("causal_conv1d", _causal_convolution),)),
}


def items(setup: Setup) -> dict[str, Item]:
    """One for each op."""
    return {f"{name} beside packages": partial(_compare, name, setup) for name in OPS if name in KERNELS or " " in name}


def _compare(name: str, setup: Setup) -> list[Finding]:
    op = OPS[name]
    shape = Shape(1, 3, 4, 2) if setup.rehearse else SCALES["gpu"]
    with torch.device(setup.device):
        inputs = {key: t.contiguous().requires_grad_() for key, t in op.inputs(shape).items()}
    y = op.ours(**inputs).detach()
    ours = setup.milliseconds(partial(_forward_backward, op.ours, inputs))
    rows = [Finding(f"{name}, forward and backward, gpu, bfloat16", f"{ours:.3g} ms", numbers={"ms": ours})]
    for package, load in op.peers:
        rows.append(_of_peer(f"{package}'s {name}", load, inputs, y, ours, setup))
    return rows


def _of_peer(what: str, load: Callable[[], Function], inputs: Inputs, y: Tensor, ours: float, setup: Setup) -> Finding:
    try:
        peer = load()
    except ImportError as error:
        return Finding(what, f"not installed ({error.name or error})")
    try:
        difference = float((peer(**inputs).detach() - y).abs().max() / y.abs().max())
        if not difference <= LIMIT:
            return Finding(what, f"differs from ours by {difference:.2g}, so not timed", f"at most {LIMIT}")
        theirs = setup.milliseconds(partial(_forward_backward, peer, inputs))
    except Exception as error:  # whatever is wrong with a package of others, our rows stand
        return Finding(what, f"failed: {describe(error)}")
    return Finding(what, f"{theirs:.3g} ms", f"ours takes {ours / theirs:.2f} times as long", numbers={"ms": theirs})


def _forward_backward(function: Function, inputs: Inputs) -> Any:
    return torch.autograd.grad(function(**inputs).sum(), tuple(inputs.values()))
