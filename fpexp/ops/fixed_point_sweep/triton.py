"""The sequential sweep in Triton: a program takes a few sequences through all their tokens, with one launch for all.

Of a token, what s = y_{t-1} contributes is a product of the program's sequences with all weights, block after block;
then factors, b, c, Delta and the decayed states; then the token's equation is iterated, as often as the slowest
sequence of the program needs, each stopping by itself; then y is written into the states. Sums run along one sequence,
and how many sequences a program has depends on the layer alone: a result depends on no other sequence.

Where what lies: vectors over channels are in registers, coefficients and factors in memory of the program's own (tens
of KB, which the first cache keeps). The states are in registers up to `_STATE` numbers for all sequences of a program
(d N = 2048 for four, or for two with Kronecker factors); above that they go by in blocks, read twice and written once a
token, from the first cache or L2. The weights are not pinned: where they have less than some 150 KB (d 128) they stay
in an SM's first cache (256 KB with shared memory), above that every program streams them from L2 (50 MB) for each
token. So it pays to have several sequences in a program, and more than to hold their states, which are smaller: at d
1024, N 16, K, a token reads 4.7 MB of float32 weights, and 0.8 MB for four states.

Roofline for an H200, float32 (bfloat16 projections in brackets). From memory, 4.3 TB/s: from_x, x and y once and H
twice; on tensor cores 2 B T R d operations for R rows of weights (790 TFLOP/s bfloat16, a tenth of that in three tf32):

                                        memory   tensor cores   weights   programs   weights through L2
    cpu    B 256 T 16   d 128  N 16 K   3.3 us   3 us           117 KB    128        first cache
    gpu    B 64  T 1024 d 512  N 16 K   140 us   0.6 ms         1.5 MB    16         14 us a token
    paper  B 512 T 16   d 1024 N 16 K   48 us    0.2 ms         4.7 MB    128        110 us a token
           B 512 T 16   d 1024 N 16 H2  68 us    0.4 ms         8.5 MB    128        200 us a token
    copy   B 128 T 256  d 2048 N 32 K   0.3 ms   4.7 ms         23 MB     128        530 us a token

with 5.5 TB/s of L2 for all SMs and 64 bytes a clock for one (both assumed). The tokens' order is what costs: a token
waits for some 20 barriers and loads (3 us; spectral K 8 us more for its power iteration), an iteration for 10 (0.5 to
1 us; K 1 to 4 us, d (d1 + d2) products a sequence without tensor cores). With 5 iterations a token, predicted: cpu 0.25
ms (0.25), gpu 35 ms (28), paper K 2.4 ms (1.5), H2 3.4 ms (1.8), copy 150 ms (85). Not measured yet. At paper widths
the weights dominate, and a launch for each token, with one product for the whole batch, would read them once: some 15
us a token. That is not built.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.backend import say_once
from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.fixed_point_sweep.kernels import triton as kernels
from fpexp.ops.launch.triton import COMPUTE, Launch
from fpexp.ops.mixers import MixerForm
from fpexp.ops.mixers.triton import Mixer, precision
from fpexp.ops.sweep import SweepResult, SweepSettings

_ROWS = 4
"""Sequences of a program at most; a result must not depend on the batch, so nor does this.

Beside Kronecker factors of 32 channels 24 bytes a thread spill on sm_80 at d 512, and 216 at d 1024. With two sequences
none do at d 512; but then every weight is read for two and not for four, and the batch of word problems at paper scale
is two programs for each multiprocessor, with room for one.
"""

_VECTOR = 4096
"""Numbers that the program's vectors over channels have at most, of which ten are in registers at a time."""

_LARGEST = 16384
"""Numbers of a vector or a Kronecker factor at most; above `_VECTOR` registers spill."""

_STATE = 8192
"""Numbers of the program's states that stay in registers at most; half of it beside Kronecker factors."""

_BLOCK = 4096
"""Numbers of states that do not which are read at a time."""

_WARPS = 8

_COLUMNS, _DEPTH = 64, 32
"""Of a block of weights: 8 KB in float32, four of which are on their way at a time."""


@torch.no_grad()
def sweep(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> SweepResult | None:
    """Solve all tokens in order, or return None where one token is more than a program can hold.

    `SweepResult.known` is left out. What is not contiguous is copied.
    """
    mixer = Mixer.of(form, terms.columns, terms.x.shape[2])
    if mixer.largest > _LARGEST:
        say_once(f"backend=triton has no sweep for {form} at an inner width of {terms.x.shape[2]}: torch solves it")
        return None
    result, launch = prepare(terms, form, settings)
    launch.run()
    return result


def launches(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> dict[str, Launch]:
    """What a solve launches, by name; meta tensors will do to compile it."""
    return {"sweep": prepare(terms, form, settings)[1]}


class Plan(NamedTuple):
    """How many sequences a program takes, and how many channels of their states at a time.

    `block` is None where the states stay in registers.
    """

    rows: int
    block: int | None

    @classmethod
    def of(cls, mixer: Mixer, states: int) -> Plan:
        """Return the plan for a mixer and `states` numbers of a state to a lane."""
        rows = max(1, min(_ROWS, _VECTOR // mixer.largest))
        numbers = mixer.lanes * states
        room = _STATE // 2 if mixer.rows > 1 else _STATE
        if rows * numbers > room >= 2 * numbers:
            rows = 2
        on_chip = rows * numbers <= room
        return cls(rows, None if on_chip else max(1, _BLOCK // (rows * states)))


def prepare(terms: SweepTerms, form: MixerForm, settings: SweepSettings) -> tuple[SweepResult, Launch]:
    """Return the result, not yet filled, and what fills it."""
    batch, length, width = terms.x.shape
    N, (count, steps) = terms.H.shape[2], (terms.from_x.shape[2], terms.columns.sizes[3])
    mixer = Mixer.of(form, terms.columns, width)
    plan = Plan.of(mixer, triton.next_power_of_2(N))
    dtype = torch.float64 if terms.x.dtype == torch.float64 else torch.float32
    programs = triton.cdiv(batch, plan.rows)

    def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return terms.x.new_empty(shape, dtype=dtype)

    result = SweepResult(
        value=room(batch, length, width),
        iterations=room(batch, length, dtype=torch.long),
        residual=room(batch, length),
        status=room(batch, length, dtype=torch.long),
        H=terms.H.to(dtype).clone(memory_format=torch.contiguous_format),
    )
    arguments = terms.read_by_kernels() | {
        "H": result.H,
        "value": result.value,
        "iterations": result.iterations,
        "residual": result.residual,
        "status": result.status,
        "p": room(2 * programs * plan.rows, count),
        "factors": room(programs * plan.rows, mixer.factor_room),
        "s": room(2 * programs * plan.rows, width),
        "vector": None if plan.block is None else room(programs * plan.rows, width),
    }
    sizes = {"batch": batch, "length": length, "width": width, "N": N, "count": count}
    sizes |= {"head": width // steps, "rates": terms.A.shape[1], "factor_room": mixer.factor_room}
    constants = {
        "mixer": mixer,
        "settings": settings,
        "NORM_EPSILON": 0.0 if terms.norm is None else float(terms.norm[2]),
        "ROWS": plan.rows,
        "STATES": triton.next_power_of_2(N),
        "BLOCK": plan.block,
        "GATED": terms.columns.sizes[4] > 0,
        "COLUMNS": _COLUMNS,
        "DEPTH": _DEPTH,
        "COMPUTE": COMPUTE.get(dtype, tl.float32),
        "PRECISION": precision(dtype),
    }
    return result, Launch(kernels.sweep, programs, _WARPS, {**arguments, **sizes, **constants})
