"""Triton's channel mixers against the plain ones: coefficients, factors, product, norms and the functions under them.

Without a GPU Triton's interpreter runs them, on the CPU.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from helpers import random
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.ops.mixers import Columns, MixerForm

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
mixers = importlib.import_module("fpexp.ops.mixers.triton")  # ours is no reason to pass over
Mixer, precision = mixers.Mixer, mixers.precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, PADDED = 3, 4

WIDTHS: list[ChannelMixer] = [
    Householder(1, rank=1, a_max=0.5),
    Householder(6, rank=2, a_max=2.0),
    Householder(40, rank=17, a_max=1.0),
    DPLR(128, rank=3, a_max=2.0),
    Kronecker(6, a_max=2.0, normalise="rows"),
    Kronecker(272, a_max=1.0, normalise="rows"),
    Kronecker(10, a_max=2.0, normalise="spectral"),
    Kronecker(128, a_max=2.0, normalise="spectral"),
]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@triton.jit
def _mix(  # type: ignore[no-untyped-def]
    from_x, s, weight, p, factors, x, out, count, width, room,
    mixer: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, PADDED)[:, None]
    x_part, s_row = from_x + row * count, s + row * width
    p += row * count
    factors += row * room
    mixers.add_from_s(x_part, s_row, weight, p, row < ROWS, count, width, mixer, 32, 16, PRECISION)
    tl.debug_barrier()
    mixers.make_factors(p, factors, mixer)
    tl.debug_barrier()
    channel, there = mixers.channels_of(mixer)
    present = (row < ROWS) & there[None, :]
    v = tl.load(x + row * width + channel[None, :], present, other=0)
    tl.store(out + row * width + channel[None, :], mixers.apply(factors, v, mixer), present)


def mix(
    mixer: ChannelMixer, columns: Columns, from_x: Tensor, s: Tensor, weight: Tensor, x: Tensor
) -> tuple[Tensor, Tensor]:
    """The coefficients and Q x of a few tokens."""
    assert mixer.form is not None
    known = Mixer.of(mixer.form, columns, mixer.width)
    p = torch.full((PADDED, from_x.shape[1]), 0.5, dtype=x.dtype, device=DEVICE)
    factors = torch.full((PADDED, known.factor_room), float("nan"), dtype=x.dtype, device=DEVICE)
    out = torch.empty_like(x)
    given = from_x, s, weight, p, factors, x, out, from_x.shape[1], mixer.width, known.factor_room
    _mix[(1,)](*given, mixer=known, ROWS=len(x), PADDED=PADDED, PRECISION=precision(x.dtype))
    return p[: len(x)], out


def inputs(mixer: ChannelMixer, columns: Columns, dtype: torch.dtype, weights: torch.dtype) -> tuple[Tensor, ...]:
    width = mixer.width
    shapes = (ROWS, sum(columns.sizes)), (ROWS, width), (sum(columns.from_s), width), (ROWS, width)
    from_x, s, weight, x = (random(*shape, seed=seed, dtype=dtype).to(DEVICE) for seed, shape in enumerate(shapes))
    return from_x, s, (weight / width**0.5).to(weights), x


def expected(mixer: ChannelMixer, columns: Columns, *given: Tensor) -> tuple[Tensor, Tensor]:
    from_x, s, weight, x = given
    products = (s.to(weight.dtype).double() @ weight.double().T).split(columns.from_s, dim=-1)
    parts = zip(from_x.double().split(columns.sizes, dim=-1), products, strict=True)
    p = torch.cat([part + product if product.shape[-1] else part for part, product in parts], dim=-1)
    return p, mixer.apply(mixer.factors(p[:, : mixer.coefficient_size]), x.double())


def all_columns(mixer: ChannelMixer, N: int = 5) -> Columns:
    sizes = (mixer.coefficient_size, N, N, mixer.width, 0)
    return Columns(sizes, sizes)


@DTYPES
@pytest.mark.parametrize("mixer", WIDTHS, ids=lambda mixer: f"{type(mixer).__name__}-{mixer.width}")
def test_coefficients_and_product(mixer: ChannelMixer, dtype: torch.dtype) -> None:
    columns = all_columns(mixer)
    given = inputs(mixer, columns, dtype, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for found, right in zip(mix(mixer, columns, *given), expected(mixer, columns, *given), strict=True):
        assert_close(found.double(), right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("on", [(0, 1, 2, 3, 4), (0, 2, 4), (1, 3), (3,), ()], ids=str)
def test_a_dependence_that_is_off_has_no_weights(on: tuple[int, ...]) -> None:
    """Runs of columns that begin and end anywhere, and a last one that x's part lacks too."""
    mixer = Householder(11, rank=2, a_max=1.0)
    sizes = (mixer.coefficient_size, 5, 5, 11, 11)
    columns = Columns(sizes, tuple(size if i in on else 0 for i, size in enumerate(sizes)))  # type: ignore[arg-type]
    given = inputs(mixer, columns, torch.float64, torch.float64)
    assert_close(mix(mixer, columns, *given), expected(mixer, columns, *given), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_weights(weights: torch.dtype) -> None:
    """s is rounded to their type; the interpreter rounds otherwise than torch."""
    mixer = Kronecker(12, a_max=1.0, normalise="rows")
    columns = all_columns(mixer)
    given = inputs(mixer, columns, torch.float32, weights)
    for found, right in zip(mix(mixer, columns, *given), expected(mixer, columns, *given), strict=True):
        assert_close(found.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mixer", [WIDTHS[1], WIDTHS[4], WIDTHS[6]], ids=lambda mixer: type(mixer).__name__)
def test_coefficients_of_nothing(mixer: ChannelMixer) -> None:
    """silu(0) = 0: the epsilons keep NaN out."""
    columns = all_columns(mixer)
    from_x, s, weight, x = inputs(mixer, columns, torch.float32, torch.float32)
    given = (torch.zeros_like(from_x), torch.zeros_like(s), weight, x)
    found, right = mix(mixer, columns, *given)[1], expected(mixer, columns, *given)[1]
    assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_a_width_that_is_not_the_factors() -> None:
    form = MixerForm("kronecker", (2, 3), 1.0)
    with pytest.raises(ValueError, match="is of width 6, not 7"):
        Mixer.of(form, Columns((14, 4, 4, 7, 0), (0, 0, 0, 0, 0)), 7)


def test_more_weights_than_offsets_reach() -> None:
    """CASES.md 13: rank 8 at 16384 channels has 2^31 weights and some more for its 8 a_i."""
    form = MixerForm("householder", (8, 0), 1.0)
    coefficients = 8 * 16385
    Mixer.of(form, Columns((coefficients, 16, 16, 16384, 0), (0, 16, 16, 16384, 0)), 16384)
    with pytest.raises(ValueError, match="kernels take up to 2\\^31 weights on s"):
        Mixer.of(form, Columns((coefficients, 16, 16, 16384, 0), (coefficients, 0, 0, 0, 0)), 16384)


@triton.jit
def _functions(x, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SIZE)
    v = tl.load(x + i)
    tl.store(out + i, mixers.softplus(v))
    tl.store(out + SIZE + i, mixers.sigmoid(v))
    tl.store(out + 2 * SIZE + i, mixers.silu(v))


@DTYPES
def test_functions_at_extremes(dtype: torch.dtype) -> None:
    """CASES.md 10; a small softplus keeps its digits."""
    values = [0.0, 1e-3, -1e-3, 10, -10, 16, -16, 20, -20, 88, -88, 1e3, -1e3, 3e4, -3e4, 1]
    x = torch.tensor(values, dtype=dtype, device=DEVICE)
    out = torch.full((3, len(values)), float("nan"), dtype=dtype, device=DEVICE)
    _functions[(1,)](x, out, SIZE=len(values))
    exact = x.double()
    right = torch.stack([torch.logaddexp(exact, torch.zeros_like(exact)), exact.sigmoid(), functional.silu(exact)])
    assert_close(out.double(), right, rtol=1e-12 if dtype == torch.float64 else 2e-6, atol=1e-30)


@triton.jit
def _normalised(f, weight, bias, out, width, epsilon, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    row, lane = tl.arange(0, 2)[:, None], tl.arange(0, LANES)
    there = lane < width
    tile = tl.load(f + row * width + lane[None, :], there[None, :], other=0)
    scale, shift = tl.load(weight + lane, there, other=0), bias
    if bias is not None:
        shift = tl.load(bias + lane, there, other=0)
    found = mixers.normalise(tile, there, scale, shift, width, epsilon)
    tl.store(out + row * LANES + lane[None, :], found)


@DTYPES
@pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])
def test_norms(centred: bool, dtype: torch.dtype) -> None:
    """With columns that are not there, which stay 0."""
    f, weight, bias = (
        random(*shape, seed=i, dtype=dtype).to(DEVICE) for i, shape in enumerate([(2, 11), (11,), (11,)])
    )
    out = torch.empty(2, 16, dtype=dtype, device=DEVICE)
    _normalised[(1,)](f + 3, weight, bias if centred else None, out, 11, 1e-6, LANES=16)
    exact = (f + 3).double()
    right = (
        functional.layer_norm(exact, (11,), weight.double(), bias.double(), 1e-6)
        if centred
        else functional.rms_norm(exact, (11,), weight.double(), 1e-6)
    )
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(out[:, :11].double(), right, rtol=tolerance, atol=tolerance)
    assert (out[:, 11:] == 0).all()
