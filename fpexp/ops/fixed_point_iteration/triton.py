"""Picard's iteration in Triton: a launch evaluates f on all tokens of all sequences and settles what follows from it.

Tokens of all sequences stand in one row after the other, in tiles of some rows, whatever sequences these are of.
Programs, one or two on each multiprocessor, take tiles in order by a ticket. Of a tile a program

    1. makes the iterate, y = delta f + (1 - delta) y of the launch before, and s of it, which reaches one row back;
    2. makes the coefficients from_x + s W^T, the weight coming from the L2 cache once for all rows;
    3. mixes, a few rows at a time, with the functions of `fpexp.ops.mixers`;
    4. scans, a block of channels after the other: a token after the other with the state in registers, from the carried
       state where a sequence begins, and else from what the tile before has left of the block;
    5. norms, and adds the residuals of its rows to those of their sequences by a maximum in memory.

The last program to finish settles the iteration: statuses, damping, whether all is over or a sequence is frozen. A
launch after the end returns at once, so that the host may launch some ahead and look seldom; counts and values are as
if it had looked after each. The damped iterate waits for the next launch since the damping hears of the residual first.

What the tile before leaves is waited for on a flag, block by block: its program holds an earlier ticket, so that it
runs already and waits for nobody later; and block i of a tile is scanned beside block i + 1 of the tile before. So a
sequence lasts as long as T / rows + d / channels blocks, where one program for each would take their product, and at
the batches of language would leave all but a few multiprocessors idle.

Roofline for an H200 (4.3 TB/s, 790 TFLOP/s in bfloat16, L2 some 5.5 TB/s; 132 SMs at 1.7 GHz, 16 exp2 and 128 float32
operations a clock each), for M = B T tokens, C columns of from_x, S of them with a part from s, weights of w bytes:

    memory      (16 d + w C) M bytes: the old f, x and from_x come, y and f go; 4 d M more where delta < 1
    L2          w S d M / 32 bytes of weights; coefficients and mixed tokens, 4 (4 C + 2 d) M, where they fit in it
    operations  2 S d M on tensor cores, d N M exp2, 6 d N M in float32 (Kronecker: and 2 (d1 + d2) d + d1^3 + d2^3)

In microseconds an iteration of Householder r = 1 in bfloat16, predicted, not measured:

    size                              memory  tensor cores  exp2  weights from L2  the tiles' chain  predicted
    cpu    B 256, T 16, d 128             3         0          2          1               -           25 to 40
    gpu    B 64, T 1024, d 512          157        46        149        208             160         700 to 1000
    words  B 512, T 16, d 1024           39        22         37        100               -          300 to 500
    paper  B 2, T 2048, d 2048 (gate)    43        88         37        390             350         800 to 1000
    copy   B 128, T 128, d 2048, N 32   156       180        298        805             100        1800 to 2500

The chain is T / 32 + d / channels blocks of 32 tokens, some 150 clocks a token and 2 us to hand over; it hides behind
other sequences where there are many. Weights from L2 cost most: their floor falls with more rows in a tile, whose
coefficients then leave the cache (at d 1024 they fill it already: 2 x 132 programs x 460 kB). Plain torch makes 75
launches an iteration (Kronecker 89 by rows, 205 spectral) and two looks of the host: some 400 us at the size `cpu`,
whatever the GPU; at the others it passes over (M, d) some 30 times, 0.5 ms at the size `words`, so that no more than a
factor of two is expected there for Householder.

Compiled for sm_80, sm_90 and sm_100: 122 to 128 registers and 48 kB of shared memory, two programs to a multiprocessor,
with weights of 16 bits; 162 to 254 registers and one program with float32 weights, and for Kronecker at d 2048. No
spills at the sizes of `fpexp.bench.launches`; at a width of 33, which no vector load divides, 88 bytes a thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpexp.ops.backend import say_once
from fpexp.ops.fixed_point_iteration import IterationResult, IterationSettings
from fpexp.ops.fixed_point_iteration.kernels import triton as kernels
from fpexp.ops.fixed_point_sweep import SweepTerms
from fpexp.ops.launch.triton import COMPUTE, Launch
from fpexp.ops.mixers import MixerForm
from fpexp.ops.mixers.triton import Mixer, precision
from fpexp.ops.pieces.triton import MULTIPROCESSORS

AHEAD = 4
"""Launches between two looks of the host at whether all is over: a look costs as much as one or two of the smallest."""

_LEAST = 16
"""Rows of a tile and channels of a weight's block at least, for tensor cores."""

_ROWS = 32
"""Of a tile: each row more saves reading the weight, and costs room for coefficients in the caches."""

_TILE = 4096
"""Numbers of a tile in registers at most: 16 a thread."""

_WARPS = 8

_REGISTERS = 128
"""Of a thread at most, so that a multiprocessor has room for two programs, one of which loads while the other computes.

Each stage is a function of its own to the compiler, which else lets all of them together have twice as many. Where
these would spill (products of float32 weights and large factors do), a program has as many as it wants, and the
multiprocessor for itself.
"""

_LARGEST = 8192
"""Numbers of a token's channels or of a Kronecker factor at most: 32 a thread, of several at a time."""

_PAIRED = 1024
"""Numbers of a Kronecker factor at most where two programs have room; more would spill."""

_ALIGNED = 4
"""Places of numbers of a sequence come in so many, 16 bytes at least: all begin where a compiler knows it."""


@dataclass(frozen=True)
class Plan:
    """What is known when a kernel is compiled: sizes of tiles, the form of f, and the rules of damping and stopping.

    `group` rows are mixed at a time, `channels` x `states` is a block of the state, `columns` x `depth` one of the
    weight. `alike`: A is the same for all N.
    """

    rows: int
    group: int
    channels: int
    states: int
    columns: int
    depth: int
    head_size: int
    alike: bool
    gated: bool
    epsilon: float
    precision: str
    tolerance: float
    relative: bool
    divergence_limit: float
    together: bool
    stop_early: bool
    damping: float
    damping_decay: float
    patience: int

    @classmethod
    def of(cls, terms: SweepTerms, mixer: Mixer, settings: IterationSettings) -> Plan:
        """Choose sizes that fit a program's registers and shared memory."""
        batch, length, width = terms.x.shape
        N = terms.H.shape[-1]
        rows = max(_LEAST, min(_ROWS, triton.next_power_of_2(batch * length)))
        states = triton.next_power_of_2(N)
        numbers = mixer.largest if mixer.lanes1 == 1 else 2 * mixer.largest
        return cls(
            rows=rows,
            group=max(1, min(rows, _TILE // numbers)),
            channels=min(max(1, _TILE // states), triton.next_power_of_2(width)),
            states=states,
            columns=64,
            depth=max(_LEAST, min(128 // terms.weight.element_size(), triton.next_power_of_2(width))),
            head_size=width // terms.columns.sizes[3],
            alike=terms.A.shape[1] == 1,
            gated=terms.columns.sizes[4] > 0,
            epsilon=0.0 if terms.norm is None else terms.norm[2],
            precision=precision(terms.x.dtype),
            tolerance=settings.tolerance,
            relative=settings.relative,
            divergence_limit=settings.divergence_limit,
            together=settings.together,
            stop_early=settings.stop_early,
            damping=settings.damping,
            damping_decay=settings.damping_decay,
            patience=settings.patience,
        )


@torch.no_grad()
def iterate(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> IterationResult | None:
    """See `fpexp.ops.fixed_point_iteration`. float32 and float64; other types are computed in float32.

    None, and said once, where a program could not hold a token's channels or a factor of its mixer.
    """
    mixer = Mixer.of(form, terms.columns, terms.x.shape[2])
    if mixer.largest > _LARGEST:
        say_once(f"backend=triton has no iteration for {form} at an inner width of {terms.x.shape[2]}: it is in torch")
        return None
    launch, result, stopped = prepare(terms, form, settings)
    for launched in range(1, settings.max_iterations + 1):
        launch.run()
        looks = settings.stop_early and launched % AHEAD == 0 and launched < settings.max_iterations
        if looks and stopped.item():
            break
    return result()


def launches(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> dict[str, Launch]:
    """What an iteration launches; terms of meta tensors will do to compile it."""
    return {"iteration": prepare(terms, form, settings)[0]}


def prepare(terms: SweepTerms, form: MixerForm, settings: IterationSettings) -> tuple[Launch, Any, Tensor]:
    """Return what makes an iteration, what returns the result of those that were made, and whether they are over."""
    batch, length, width = terms.x.shape
    total, count, N = batch * length, terms.from_x.shape[-1], terms.H.shape[-1]
    if total > 2**31 - 2**16:  # a ticket past the end still counts rows
        raise ValueError(f"{batch} sequences of {length} tokens: an iteration takes less than 2^31 tokens")
    mixer = Mixer.of(form, terms.columns, width)
    plan = Plan.of(terms, mixer, settings)
    dtype = torch.float64 if terms.x.dtype == torch.float64 else torch.float32
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    tiles, blocks = triton.cdiv(total, plan.rows), triton.cdiv(width, plan.channels)
    pairs = terms.weight.element_size() == 2 and (mixer.lanes1 == 1 or mixer.largest <= _PAIRED)
    programs = min(tiles, (2 if pairs else 1) * _multiprocessors(terms.x.device))

    def room(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return terms.x.new_empty(shape, dtype=dtype)

    places = _ALIGNED * triton.cdiv(batch, _ALIGNED)
    zeros = terms.x.new_zeros(4 + 2 * places + tiles * blocks, dtype=torch.int32)
    control, frozen, stalled, passed = zeros.split([4, places, places, tiles * blocks])
    worst, largest = terms.x.new_zeros(2, places, dtype=bits)
    y, f = room(2, batch, length, width), room(2, batch, length, width)
    residual, delta, best = room(3, places)
    iterations, status = room(2, places, dtype=torch.long)
    arguments: dict[str, Any] = {
        **terms.read_by_kernels(),
        "state": terms.H.contiguous(),
        "y": y,
        "f": f,
        "between": room(tiles if plan.rows % length else 0, width, N),
        "passed": passed,
        "s": room(programs, plan.rows, width, dtype=terms.weight.dtype),
        "p": room(programs, plan.rows, count),
        "mixed": room(programs, plan.rows, width),
        "factors": room(programs, plan.group, mixer.factor_room),
        "control": control,
        "worst": worst,
        "largest": largest,
        "residual": residual,
        "status": status,
        "iterations": iterations,
        "frozen": frozen,
        "delta": delta,
        "best": best,
        "stalled": stalled,
        "batch": batch,
        "length": length,
        "width": width,
        "count": count,
        "N": N,
        "most": settings.max_iterations,
        "allowed": _allowed(batch, settings.outlier_quantile),
        "mixer": mixer,
        "plan": plan,
        "COMPUTE": COMPUTE.get(dtype, tl.float32),
    }

    def result() -> IterationResult:
        of_sequences = (found[:batch] for found in (iterations, residual, status))
        value = torch.where((iterations[:batch] % 2 == 1)[:, None, None], y[1], y[0])
        return IterationResult(value, *of_sequences)

    return Launch(kernels.iteration, programs, _WARPS, arguments, _REGISTERS if pairs else None), result, control[1]


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _allowed(batch: int, outlier_quantile: float) -> int:
    """How many sequences may be left when a batch stops, by the comparison that `fpexp.fixed_point.iterate` makes."""
    return int((torch.arange(1, batch + 1) <= outlier_quantile * batch).sum())
