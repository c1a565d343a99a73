"""Picard's iteration in Triton against the solver's own loop: the same iterates, counts, residuals and statuses.

On a GPU or in the interpreter, which takes milliseconds a token and iteration, hence the tiny sizes and tight caps.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, LENGTHS, MIXERS, make_layer, random, tiny
from torch import Tensor
from torch.testing import assert_close

from fpexp.channel_mixers import DPLR, ChannelMixer, Householder, Kronecker
from fpexp.errors import UserError
from fpexp.fixed_point import Cap, Picard, SolveResult, Status
from fpexp.models.fp_mamba import FPMambaLayer
from fpexp.models.fp_mamba_layer import Dependence
from fpexp.models.fp_mamba_problem import FPMambaProblem, State
from fpexp.ops.backend import only_reference

pytest.importorskip("triton")
iteration = importlib.import_module("fpexp.ops.fixed_point_iteration.triton")  # ours is no reason to pass over

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SOLVER = Picard(tolerance=0.1)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Room for results is full of NaN, so that a number that is read before it is written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def solve(problem: FPMambaProblem, backend: str, cap: int | Cap, training: bool, **settings: Any) -> SolveResult:
    solver = Picard(**{"tolerance": 1e-4, "backend": backend, **settings})
    with only_reference():
        return solver.solve(problem, Cap(cap) if isinstance(cap, int) else cap, training=training)


def assert_same(
    problem: FPMambaProblem, cap: int | Cap = 30, training: bool = False, rtol: float = 1e-9, **settings: Any
) -> SolveResult:
    """A map that does not contract amplifies rounding: few iterations there."""
    expected, found = (solve(problem, backend, cap, training, **settings) for backend in ("reference", "triton"))
    assert torch.equal(found.iterations, expected.iterations)
    assert torch.equal(found.status, expected.status)
    assert found.iterations.dtype == expected.iterations.dtype == torch.long
    assert_close(found.value, expected.value, rtol=rtol, atol=rtol, equal_nan=True)
    assert_close(found.residual, expected.residual, rtol=max(rtol, 1e-6), atol=rtol, equal_nan=True)
    return found


def problem_of(layer: FPMambaLayer, batch: int = 3, length: int = 3, **arguments: Any) -> FPMambaProblem:
    layer = layer.to(DEVICE)
    parameter = next(layer.parameters())
    with torch.no_grad():
        return layer.problem(random(batch, length, 4).to(parameter), **arguments)


def layer_of(mixer: str | ChannelMixer, **settings: Any) -> FPMambaLayer:
    return make_layer(mixer, SOLVER, **{"dependence": EVERYTHING, "norm": "layer_norm", **settings})


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("gate", ["outside", "inside"])
def test_every_mixer_and_gate(mixer: str, gate: str) -> None:
    found = assert_same(problem_of(layer_of(mixer, gate=gate)))
    assert (found.status == Status.CONVERGED).all()


@pytest.mark.parametrize("dependence", ["lambda_", "Q", "b", "c", "gate", None])
def test_one_dependence_and_none(dependence: str | None) -> None:
    """The columns of what s contributes to stand elsewhere each time."""
    names = [field.name for field in dataclasses.fields(Dependence)]
    switches = Dependence(**{name: name == dependence for name in names})
    assert_same(problem_of(layer_of("DPLR2", dependence=switches, gate="inside", norm="none")), cap=3)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    """Sequences begin and end inside tiles of tokens, and go on from one to the next."""
    layer = layer_of(Kronecker(4, a_max=0.5, normalise="spectral"), state_size=2)
    assert_same(problem_of(layer, batch=2 if length < 63 else 1, length=length), cap=Cap(2, stop_early=False))


@pytest.mark.parametrize(
    "mixer",
    [
        Householder(1, rank=1, a_max=0.5),
        DPLR(33, rank=3, a_max=0.5),
        Kronecker(30, a_max=0.5, normalise="rows"),
        Kronecker(102, a_max=0.5, normalise="spectral"),
        Householder(300, rank=2, a_max=0.5),
    ],
    ids=lambda mixer: f"{type(mixer).__name__}-{mixer.width}",
)
def test_widths(mixer: ChannelMixer) -> None:
    """Of one channel, of factors that are no powers of 2, and of more than one block of channels."""
    problem = problem_of(layer_of(mixer, state_size=17, gate="inside"), batch=2)
    assert_same(problem, cap=Cap(3, stop_early=False), damping=0.7)


def test_blocks_of_channels_wait_for_those_of_the_tile_before() -> None:
    problem = problem_of(layer_of(Householder(300, rank=1, a_max=0.5), state_size=17), batch=1, length=34)
    assert_same(problem, cap=Cap(2, stop_early=False))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("mixer", ["H2", "DPLR2", "K-spectral"])
def test_precision(mixer: str, dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 as under autocast: that of projections and of the weights on s, all else is float32."""
    problem = problem_of(layer_of(mixer, gate="inside").float())
    problem = dataclasses.replace(
        problem, from_x=problem.from_x.to(dtype), loop_weight=problem.loop_weight.to(dtype), A=problem.A.detach()
    )
    exact = dataclasses.replace(
        problem,
        **{name: getattr(problem, name).double() for name in ("x", "from_x", "loop_weight", "A", "D")},
        state=State(problem.state.y.double(), problem.state.H.double()),
        norm=layer_of(mixer, gate="inside").norm.to(DEVICE),  # type: ignore[union-attr]
    )
    cap = Cap(4, stop_early=False)
    found, expected = solve(problem, "triton", cap, True), solve(exact, "reference", cap, True)
    assert found.value.dtype == torch.float32
    assert (found.value - expected.value).abs().max() <= tolerance * expected.value.abs().max()


def test_a_carried_state_and_strided_views() -> None:
    """CASES.md 12 and 17."""
    problem = problem_of(layer_of("DPLR2"), batch=2, length=6)
    with torch.no_grad():
        whole = solve(problem, "triton", 30, False, tolerance=1e-10)
        state = problem.initial_state()
        for t in range(2):
            state = problem.advance(problem.token_problem(t, state), whole.value[:, t : t + 1])
    rest = problem._map(lambda tensor: tensor[:, 2:], state)
    assert not rest.x.is_contiguous()
    found = assert_same(rest, tolerance=1e-10)
    assert_close(found.value, whole.value[:, 2:], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_padding_does_not_count(training: bool) -> None:
    """CASES.md 18; the last sequence has no real token at all."""
    mask = (torch.arange(5) < torch.tensor([[5], [3], [1], [0]])).to(DEVICE)
    found = assert_same(problem_of(layer_of("H2"), 4, 5, mask=mask), training=training, outlier_quantile=0.3)
    assert training or found.iterations[3] == 1


def mixed_batch() -> FPMambaProblem:
    """Sequences of all kinds: at once at the fixed point, quick, slow, slower, and growing without end."""
    layer = layer_of(Householder(6, rank=1, a_max=2.0), contracting=False, norm="none")
    with torch.no_grad():
        layer.D.fill_(0.8)
    problem = problem_of(layer, batch=5)
    from_x, x = problem.from_x.clone(), problem.x.clone()
    from_x[..., 6] += torch.tensor([0.0, -9, -2, -1, 9], dtype=torch.float64, device=DEVICE)[:, None]
    x[0] = 0
    return dataclasses.replace(problem, from_x=from_x, x=x)


@pytest.mark.parametrize("quantile", [0.0, 0.2, 0.8])
def test_a_batch_stops_together_in_training(quantile: float) -> None:
    found = assert_same(mixed_batch(), 8, True, tolerance=1e-3, outlier_quantile=quantile)
    assert found.iterations.unique().numel() == 1


def test_sequences_stop_by_themselves_in_evaluation() -> None:
    """CASES.md 6: an easy sequence is the same alone and beside hard ones."""
    problem = mixed_batch()
    found = assert_same(problem, 9, tolerance=1e-3)
    assert found.iterations.unique().numel() > 2
    alone = solve(problem.select(torch.tensor([3], device=DEVICE)), "triton", 9, False, tolerance=1e-3)
    assert (alone.iterations[0], alone.status[0]) == (found.iterations[3], found.status[3])
    assert torch.equal(alone.value[0], found.value[3])


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_a_fixed_count(training: bool) -> None:
    """Without `stop_early` all are iterated to the cap, converged or not."""
    found = assert_same(mixed_batch(), Cap(5, stop_early=False), training, tolerance=1e-3)
    assert found.iterations.tolist() == [5] * 5
    assert {Status.CONVERGED, Status.CAP_REACHED} == {Status(code) for code in found.status.tolist()}


@pytest.mark.parametrize("cap", [1, 2, 4, 5])
def test_a_cap(cap: int) -> None:
    """Also where the host looks, just before and just after."""
    found = assert_same(problem_of(layer_of("H1"), length=2), cap, tolerance=1e-12, damping=0.5)
    assert (found.status == Status.CAP_REACHED).all()
    assert found.iterations.tolist() == [cap] * 3


@pytest.mark.parametrize("damping", [1.0, 0.9])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_damping_with_patience(damping: float, training: bool) -> None:
    """A map that does not contract stalls: delta decays, for each sequence in its own iterations."""
    settings = {"damping": damping, "damping_decay": 0.6, "patience": 2, "tolerance": 1e-3, "outlier_quantile": 0.0}
    problem = problem_of(layer_of("H2", contracting=False))
    found = assert_same(problem, 7, training, rtol=1e-7, **settings)
    without = solve(problem, "reference", 7, training, **{**settings, "damping_decay": 1.0})
    assert not torch.equal(found.value, without.value)


def test_absolute_tolerance() -> None:
    problem = problem_of(layer_of("H1", norm="none"))
    relative = assert_same(problem)
    assert not torch.equal(relative.residual, assert_same(problem, tolerance_kind="absolute").residual)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("nan")], ids=["nan", "inf", "-nan"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_non_finite_maps(number: float, training: bool) -> None:
    """CASES.md 1: never converged; in evaluation the neighbours go on as if nothing had been."""
    problem = problem_of(layer_of("H2"))
    x = problem.x.clone()
    x[1, 2] = number
    found = assert_same(dataclasses.replace(problem, x=x), training=training)
    assert found.status[1] == Status.NON_FINITE
    if not training:
        clean = solve(problem, "triton", 30, False)
        assert torch.equal(found.value[[0, 2]], clean.value[[0, 2]])
        assert torch.equal(found.iterations[[0, 2]], clean.iterations[[0, 2]])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's
def test_extreme_steps() -> None:
    """Delta before the softplus from -3e4 to 3e4: decays of 1 and of 0 beside each other (CASES.md 9, 10)."""
    problem = problem_of(layer_of("H2"), batch=1, length=6)
    extremes = torch.tensor([0.0, 20, -88, 1e3, -3e4, 3e4], dtype=torch.float64, device=DEVICE)
    before = problem.columns.sizes[0] + 2 * problem.columns.sizes[1]
    delta = extremes[None, :, None] * torch.tensor([1.0, 0, 1, 1, 0, 1], device=DEVICE)
    from_x = torch.cat([problem.from_x[..., :before], delta.double()], dim=-1)
    weight = problem.loop_weight.clone()
    weight[-6:] = 0
    extreme = dataclasses.replace(problem, from_x=from_x, loop_weight=weight)
    assert assert_same(extreme, Cap(4, stop_early=False)).value.isfinite().all()


@pytest.mark.parametrize("cap", [Cap(6), Cap(6, stop_early=False)], ids=["early", "fixed"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_divergence(training: bool, cap: Cap) -> None:
    found = assert_same(mixed_batch(), cap, training, divergence_limit=2.0, tolerance=1e-12)
    assert (found.status == Status.DIVERGED).any()


def test_the_host_looks_once_in_several_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not at all where the number of iterations is fixed."""
    problem = problem_of(layer_of("H1"), length=2)
    looks: list[str] = []
    inside = False

    def watch(name: str) -> None:
        plain = getattr(Tensor, name)

        def watched(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            if not inside:
                looks.append(name)
            return plain(tensor, *arguments, **named)

        monkeypatch.setattr(Tensor, name, watched)

    run = iteration.Launch.run
    launched = []

    def unwatched(launch: Any) -> None:  # the interpreter reads what a kernel is given
        nonlocal inside
        inside = True
        run(launch)
        inside = False
        launched.append(launch)

    monkeypatch.setattr(iteration.Launch, "run", unwatched)
    monkeypatch.setattr(iteration, "_allowed", lambda batch, quantile: 0)  # compares numbers of the host
    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "numpy"):
        watch(name)
    found = solve(problem, "triton", 9, False, tolerance=1e-12, damping=0.5)
    assert (len(launched), looks) == (9, ["item", "item"])
    launched.clear()
    looks.clear()
    solve(problem, "triton", Cap(6, stop_early=False), True)
    assert (len(launched), looks) == (6, [])
    assert found.iterations.max() == 9
    launched.clear()
    found = solve(problem, "triton", 100, False, tolerance=1e-2)
    assert 0 <= len(launched) - found.iterations.max() < iteration.AHEAD


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_many_sequences_settle(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are settled at a time; tiles hold several, and some are frozen as a whole."""
    batch = 1100
    if DEVICE == "cpu":
        monkeypatch.setattr(iteration.kernels, "_SETTLED", type(iteration.kernels._SETTLED)(16))
        batch = 70
    layer = layer_of(Householder(2, rank=1, a_max=0.5), state_size=1, norm="none")
    problem = problem_of(layer, batch=batch, length=1)
    x = problem.x.clone()
    x[:40], x[batch // 2 :: 2] = 0, 0
    found = assert_same(dataclasses.replace(problem, x=x), 3, training, tolerance=1e-2, outlier_quantile=0.2)
    assert training or found.iterations.unique().numel() > 1


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
def test_any_batch_runs_the_same_code(batch: int) -> None:
    """Where a tensor does not begin at a multiple of 16 bytes, Triton compiles another kernel."""
    problem = problem_of(layer_of(Householder(3, rank=1, a_max=0.5)), batch=batch, length=1)
    settings = SOLVER._settings(Cap(1), training=True)
    assert problem.form is not None
    launch, *_ = iteration.prepare(problem._fused_terms(), problem.form, settings)
    tensors = {name: value for name, value in launch.arguments.items() if isinstance(value, Tensor)}
    assert [name for name, tensor in tensors.items() if tensor.data_ptr() % 16] == []


COMPILE = """
import torch
from fpexp.bench.launches import KERNELS, Shape

torch.set_default_dtype(torch.float64)
KERNELS["iteration_h"].launches(Shape(2, 5, 6, 4), torch.float64)["iteration"].compile(90)
"""


def test_float64_compiles_for_a_gpu_that_is_not_there() -> None:
    """What the interpreter runs need not compile; in a process of its own, for it compiles nothing."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    told = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


def test_what_is_not_to_be_had_is_refused() -> None:
    class Half(Householder):
        def apply(self, factors: tuple[Tensor, ...], v: Tensor) -> Tensor:
            return 0.5 * super().apply(factors, v)

    problem = problem_of(layer_of(Half(6, rank=1, a_max=0.5)))
    with pytest.raises(UserError, match=r"solver\.backend=triton: no fused iteration.*use solver\.backend=auto"):
        solve(problem, "triton", 3, False)
    assert_close(solve(problem, "auto", 3, False).value, solve(problem, "reference", 3, False).value)


def test_a_factor_that_no_program_holds_is_left_to_torch() -> None:
    problem = problem_of(layer_of(Kronecker(2 * 131, a_max=0.5, normalise="rows"), state_size=1), batch=1, length=1)
    with pytest.raises(UserError, match="no fused iteration"):
        solve(problem, "triton", 1, False)


def test_without_a_gpu_triton_is_refused_and_auto_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(layer_of("H1")).select(torch.tensor([0], device=DEVICE))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if DEVICE == "cpu":
        with pytest.raises(UserError, match="backend=triton is for cuda tensors, not cpu"):
            solve(problem, "triton", 3, False)
        monkeypatch.setattr(iteration, "iterate", None)
        assert solve(problem, "auto", 30, False).iterations.max() > 1


@pytest.mark.parametrize("model", ["fp_mamba_h", "fp_mamba_dplr", "fp_mamba_k", "fp_mamba2_h"])
def test_a_whole_model_is_the_same(model: str) -> None:
    """The output, and the gradient of one step from the fixed point."""
    found: list[list[Tensor]] = []
    for backend in ("reference", "triton"):
        words = [f"model={model}", "solver=picard", f"solver.backend={backend}", "solver.tolerance=1e-3"]
        experiment = tiny(*words, "precision=float32", "seed=1")
        whole = experiment.model.double().to(DEVICE).train()
        tokens = torch.randint(12, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        with only_reference():
            output = whole(tokens, Cap(8)).logits
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in whole.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 5
    for expected, given in zip(*found, strict=True):
        assert_close(given, expected, rtol=1e-6, atol=1e-8 * float(expected.abs().max()))
