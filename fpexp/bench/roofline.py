"""What a launch of a kernel moves and computes, how long an H200 takes for that at least, and what is predicted.

Bytes are those of the launch's tensors, each read or written once and those of `IN_PLACE` twice; what a cache saves or
a second reading costs is not in them. Operations are counted by `COUNTS`, beside which a new kernel gets its line; each
kernel's own docstring says where they come from and how the predictions do. The floor is the time of whichever resource
takes longest, as if all others worked meanwhile.

Predicted is launch + floor * max(1, full / programs) * (low to high): what a launch costs by itself, and a factor that
stands in `PREDICTIONS` with the number of programs below which multiprocessors idle. A sweep's tokens go one after
another, so that their number counts and not the floor. None of it has been measured: `scripts/gpu_check.sh` holds it
against the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

_CLOCKS = 132 * 1.7e9
"""Multiprocessors of an H200, times their clock a second."""

RATES = {
    "memory": 4.3e12,  # bytes, read and written; a copy as measured
    "tensor cores": 790e12,  # operations in bfloat16, as measured; an addition and a multiplication are two
    "arithmetic": 128 * _CLOCKS,  # float32 instructions
    "exp2": 16 * _CLOCKS,
    "shuffles": 32 * _CLOCKS,
}
"""A second, of each resource."""

PASSES = {"bf16": 1, "tf32": 2, "tf32x3": 6}
"""What a product costs in products of bfloat16, by the precision of its factors."""

LAUNCH = 5e-6
"""Seconds that a launch takes where it has next to nothing to do."""

IN_PLACE = {("carry", "sums"), ("carry, back", "sums"), ("states, back", "residuals"), ("sweep", "H")}
"""(launch, tensor): what is read and then written over."""

L2 = 5.5e12
"""Bytes a second that all multiprocessors read from the L2 cache; of one: 64 a clock. Both assumed."""

EVALUATIONS = 5
"""Of a token in a sweep, as trained models take on A5 (README.md)."""


class Work(NamedTuple):
    """Amounts of each resource that a launch takes: bytes, tensor-core operations, float32 instructions, ..."""

    bytes: int
    products: float = 0
    arithmetic: float = 0
    exponentials: float = 0
    shuffles: float = 0

    @property
    def operations(self) -> float:
        """Operations of all kinds; a product's in the precision that it is asked in."""
        return self.products + self.arithmetic + self.exponentials

    def floor(self, precision: str = "bf16") -> tuple[float, str]:
        """Return the seconds that an H200 takes at least, and the resource that takes them."""
        amounts = (self.bytes, self.products * PASSES.get(precision, 1), *self[2:])
        return max((amount / rate, name) for amount, (name, rate) in zip(amounts, RATES.items(), strict=True))


class Expected(NamedTuple):
    """Times of the floor, at the least and at the most, that a launch of at least `full` programs takes.

    `narrow` are those for 16-bit inputs, where they differ.
    """

    low: float
    high: float
    full: int
    narrow: tuple[float, float] | None = None


Arguments = Mapping[str, Any]
Counts = Callable[[Arguments], dict[str, float]]


def work_of(kernels: str, name: str, launch: Any) -> Work:
    """Return the work of a launch (`fpexp.ops.launch.triton.Launch`); without a line in `COUNTS`, its bytes alone."""
    moved = sum(
        value.nbytes * (2 if (name, key) in IN_PLACE else 1)
        for key, value in launch.arguments.items()
        if isinstance(value, Tensor)
    )
    count = COUNTS.get(kernels, {}).get(name)
    return Work(moved, **count(launch.arguments)) if count else Work(moved)


def floor_of(kernels: str, name: str, launch: Any) -> tuple[float, str]:
    """Return the floor of a launch in seconds, and the resource that sets it."""
    precision, weight = launch.arguments.get("PRECISION", "bf16"), launch.arguments.get("weight")
    if weight is not None:  # of the fixed points, whose products are made in its type
        precision = "bf16" if weight.itemsize == 2 else "tf32x3"
    return work_of(kernels, name, launch).floor(precision)


def predict(kernels: str, name: str, launch: Any) -> tuple[float, float] | None:
    """Return the seconds that a launch is predicted to take on an H200, at the least and at the most; None: unknown."""
    expected = PREDICTIONS.get(kernels, {}).get(name)
    if name == "sweep":
        return _predict_sweep(launch)
    if expected is None:
        return None
    floor, _ = floor_of(kernels, name, launch)
    idle = max(1.0, expected.full / max(launch.programs, 1))
    is_narrow = any(isinstance(value, Tensor) and value.itemsize == 2 for value in launch.arguments.values())
    low, high = expected.narrow if expected.narrow and is_narrow else expected[:2]
    return LAUNCH + floor * idle * low, LAUNCH + floor * idle * high


def _predict_sweep(launch: Any) -> tuple[float, float]:
    """Tokens one after another: their weights through L2, barriers, and each evaluation (see its module)."""
    arguments, kronecker = launch.arguments, launch.arguments["mixer"].rows > 1
    weights = arguments["weight"].nbytes
    token = max(weights * launch.programs / L2, weights / (64 * 1.7e9)) + (11e-6 if kronecker else 3e-6)
    low, high = (1e-6, 4e-6) if kronecker else (0.5e-6, 1e-6)
    length = arguments["x"].shape[1]
    return LAUNCH + length * (token + EVALUATIONS * low), LAUNCH + length * (token + EVALUATIONS * high)


def _each(tensor: str, **amounts: float) -> Counts:
    """Amounts for each number of a tensor."""
    return lambda arguments: {key: amount * arguments[tensor].numel() for key, amount in amounts.items()}


def _scan(**amounts: float) -> Counts:
    """Amounts for each of the B T d N elements of a selective scan."""
    return lambda arguments: {
        key: amount * arguments["delta"].numel() * arguments["A"].shape[1] for key, amount in amounts.items()
    }


def _ssd(states: int = 0, N: int = 0, P: int = 0, Q: int = 0) -> Counts:
    """Products of a chunk of Q tokens: `states` with a state, and N, P and Q times one of Q Q numbers each."""

    def count(arguments: Arguments) -> dict[str, float]:
        n, p, q = arguments["N"], arguments["P"], arguments["TOKENS"]
        tokens = arguments["delta"].numel()  # of all heads
        return {"products": 2.0 * tokens * (states * n * p + q * (N * n + P * p + Q * q))}

    return count


def _delta(KV: int = 0, LV: int = 0, LK: int = 0, LL: int = 0, inverse: bool = False) -> Counts:
    """Products of a Householder step, a row of a chunk of L: so many of the numbers of each of these matrices.

    With `inverse` those that join the blocks of one: two of L L numbers for each doubling of their size.
    """

    def count(arguments: Arguments) -> dict[str, float]:
        K, V, L = arguments["k"].shape[-1], arguments.get("V", 0), arguments["STEPS"]
        numbers = KV * K * V + LV * L * V + LK * L * K + LL * L * L
        if inverse:
            numbers += 2 * L * L * (math.log2(L) - 1)
        return {"products": 2.0 * arguments["beta"].numel() * numbers}

    return count


def _fixed_point(evaluations: int) -> Counts:
    """Of FP-Mamba: a token's coefficients of s and its scan once, its mixer and norm at each evaluation."""

    def count(arguments: Arguments) -> dict[str, float]:
        x, mixer, N = arguments["x"], arguments["mixer"], arguments["N"]
        d = x.shape[2]
        tokens = x.numel() / d
        kronecker = mixer.rows > 1
        mixing = 2 * d * (mixer.rows + mixer.columns) if kronecker else 4 * d * mixer.size
        eigenvalues = 2 * mixer.power_iterations * (mixer.rows**2 + mixer.columns**2) if kronecker else 0
        return {
            "products": 2 * tokens * arguments["weight"].numel(),
            "arithmetic": tokens * (6 * d * N + eigenvalues + evaluations * (mixing + 10 * d)),
            "exponentials": tokens * d * N,
        }

    return count


_DELTA_RULE = {
    "solve": _delta(LK=2, inverse=True),
    "states": _delta(KV=2, LV=1),
    "outputs": _delta(KV=2, LV=2),
    "solve, back": _delta(LK=2, inverse=True),
    "write, back": _delta(KV=1, LV=2),
    "states, back": _delta(KV=3, LV=1),
    "squares, back": _delta(LV=2, LK=1, LL=1),
    "q and k, back": _delta(KV=3, LK=3),
}

_CARRY = {name: _each("sums", arithmetic=2) for name in ("carry", "carry, back")}

COUNTS: Mapping[str, Mapping[str, Counts]] = {
    "diagonal_scan": {
        **_CARRY,
        "ends": _each("x", arithmetic=3),
        "forward": _each("x", arithmetic=2),
        "ends, back": _each("grad", arithmetic=3),
        "backward": _each("h", arithmetic=3),
    },
    "selective_scan": {
        **_CARRY,
        "ends": _scan(arithmetic=4, exponentials=1),
        "forward": _scan(arithmetic=6, exponentials=1),
        "ends, back": _scan(arithmetic=4, exponentials=1),
        "backward": _scan(arithmetic=16, exponentials=1, shuffles=10),
    },
    "ssd": {
        **_CARRY,
        "across": _ssd(states=1),
        "outputs": _ssd(states=1, N=1, P=1),
        "across, back": _ssd(states=1),
        "b, back": _ssd(states=1, N=1, P=1),
        "c, back": _ssd(states=1, N=1, P=1),
        "x and delta, back": _ssd(states=2, N=1, P=2),
    },
    "delta_rule": _DELTA_RULE,
    "delta_product": _DELTA_RULE,
    **{f"sweep_{mixer}": {"sweep": _fixed_point(EVALUATIONS)} for mixer in ("h", "k", "dplr")},
    **{f"iteration_{mixer}": {"iteration": _fixed_point(1)} for mixer in ("h", "k", "dplr")},
}
"""By kernels and launch."""

_ONCE = Expected(1.1, 1.5, 132)
"""Of what only moves numbers."""

_DELTA_RULE_EXPECTED = {
    **dict.fromkeys(_DELTA_RULE, Expected(2.4, 4.5, 132)),
    "states": Expected(3.5, 5.0, 132),
    "states, back": Expected(2.2, 3.2, 132),
}

PREDICTIONS: Mapping[str, Mapping[str, Expected]] = {
    "diagonal_scan": {
        **dict.fromkeys(_CARRY, _ONCE),
        **dict.fromkeys(("ends", "forward", "ends, back", "backward"), Expected(1.1, 1.5, 190, narrow=(2.0, 3.0))),
    },
    "selective_scan": {
        **dict.fromkeys(_CARRY, _ONCE),
        "ends": Expected(2.5, 5.0, 264),
        "forward": Expected(2.5, 5.0, 264),
        "ends, back": Expected(2.5, 5.0, 264),
        "backward": Expected(2.7, 4.0, 132),
    },
    "ssd": {
        **dict.fromkeys(_CARRY, _ONCE),
        **dict.fromkeys(("across", "outputs"), Expected(1.3, 2.0, 132)),
        **dict.fromkeys(("across, back", "b, back", "c, back", "x and delta, back"), Expected(1.5, 2.2, 132)),
    },
    "delta_rule": _DELTA_RULE_EXPECTED,
    "delta_product": _DELTA_RULE_EXPECTED,
    **{f"iteration_{mixer}": {"iteration": Expected(2.9, 5.5, 264)} for mixer in ("h", "k", "dplr")},
}
"""By kernels and launch, from the docstrings of their modules."""
