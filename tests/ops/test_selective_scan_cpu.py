"""The fused scan against the plain one and the float64 oracle (CASES.md 7, 9, 11-14, 17; SPEC.md 1.4)."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import oracle
import pytest
import torch
from helpers import EVERYTHING, LENGTHS, make_layer, random, tiny, to_numpy
from torch import Tensor

import fpexp
from fpexp.fixed_point import Cap, Picard, Sequential
from fpexp.ops.selective_scan import selective_scan

pytest.importorskip("numba")

NAMES = ("x", "delta", "A", "b", "c", "D", "state")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def inputs(length: int, dtype: torch.dtype = torch.float64, batch: int = 2, d: int = 24, N: int = 5) -> list[Tensor]:
    """Arguments that ask for gradients, general A, Delta from below 1e-3 to above 1, a carried state."""
    tensors = [
        random(batch, length, d, seed=1),
        torch.nn.functional.softplus(2 * random(batch, length, d, seed=2) - 2),
        -random(d, N, seed=3).exp(),
        random(batch, length, N, seed=4),
        random(batch, length, N, seed=5),
        random(d, seed=6),
        random(batch, d, N, seed=7),
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def incoming(arguments: list[Tensor]) -> list[Tensor]:
    """Gradients for y and the last state."""
    x, _, _, _, _, _, state = arguments
    return [random(*x.shape, seed=8, dtype=x.dtype), random(*state.shape, seed=9, dtype=state.dtype)]


def results(arguments: list[Tensor], grads: list[Tensor | None], backend: str = "cpu") -> list[Tensor]:
    """y, the last state, and the gradients of all arguments."""
    outputs = selective_scan(*arguments, backend=backend)
    used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    reached, given = zip(*used, strict=True)
    return [*outputs, *torch.autograd.grad(reached, arguments, given, allow_unused=True)]


def expect_close(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Within `tolerance` of the largest entry of each."""
    for name, a, b in zip(("y", "H", *NAMES), found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        scale = max(b.abs().max().item(), 1e-30)
        assert (a - b).abs().max().item() <= tolerance * scale, name


def expect_as_reference(arguments: list[Tensor], tolerance: float | None = None) -> list[Tensor]:
    grads = incoming(arguments)
    found = results(arguments, grads)
    expect_close(found, results(arguments, grads, "reference"), tolerance or TOLERANCE[arguments[0].dtype])
    return found


def expect_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """To the bit."""
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def threads() -> Iterator[None]:
    """Give torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    expect_as_reference(inputs(length, dtype))


@DTYPES
@pytest.mark.parametrize(("d", "N"), list(itertools.product([1, 3, 8, 24, 72, 100], [1, 5, 16, 128])))
def test_widths_and_state_sizes(d: int, N: int, dtype: torch.dtype) -> None:
    """One length over a chunk border: 16 tokens, or N / 4."""
    expect_as_reference(inputs(37, dtype, d=d, N=N))


@pytest.mark.parametrize("batch", [1, 3, 40])
def test_batches_are_cut_into_tasks_of_their_own(batch: int) -> None:
    """One sequence in many groups of channels, and more sequences than tasks."""
    expect_as_reference(inputs(18, batch=batch, d=100, N=2))


@pytest.mark.parametrize("length", [1, 17, 65])
def test_against_the_oracle(length: int) -> None:
    arguments = inputs(length)
    exact = dict(zip((*NAMES[:-1], "h0"), map(to_numpy, arguments), strict=True))
    grad_y = incoming(arguments)[0]
    y, H, *gradients = results(arguments, [grad_y, None])
    expected_y, expected_H = oracle.selective_scan(**exact)
    expected = oracle.selective_scan_gradients(**exact, grad_y=to_numpy(grad_y))
    expect_close([y, H, *gradients], [torch.from_numpy(a) for a in (expected_y, expected_H, *expected.values())], 1e-12)
    assert list(expected) == list(exact)


def test_finite_differences() -> None:
    assert torch.autograd.gradcheck(
        functools.partial(selective_scan, backend="cpu"), inputs(3, d=2, N=2), nondet_tol=0.0
    )


@pytest.mark.parametrize("used", [0, 1], ids=["y alone", "last state alone"])
def test_one_output_used(used: int) -> None:
    arguments = inputs(20)
    grads: list[Tensor | None] = [None, None]
    grads[used] = incoming(arguments)[used]
    expected = results(arguments, grads, "reference")
    expected = [torch.zeros(()) if tensor is None else tensor for tensor in expected]
    found = [a if b.dim() else b for a, b in zip(results(arguments, grads), expected, strict=True)]
    expect_close(found, expected, 1e-10)


def test_no_state_and_inputs_without_gradient() -> None:
    arguments = inputs(20)
    zeros = torch.zeros_like(arguments[6])
    x, delta, A, b, c, D, _ = (tensor.detach() for tensor in arguments)
    A.requires_grad_()
    y, H = selective_scan(x, delta, A, b, c, D, backend="cpu")
    expected_y, expected_H = selective_scan(x, delta, A, b, c, D, zeros, backend="reference")
    torch.testing.assert_close((y, H), (expected_y, expected_H))
    torch.testing.assert_close(torch.autograd.grad(y.sum(), A), torch.autograd.grad(expected_y.sum(), A))
    with torch.no_grad():
        without, _ = selective_scan(x, delta, A, b, c, D, backend="cpu")
    assert not without.requires_grad
    assert torch.equal(without, y)


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0)])
def test_nothing_to_do(batch: int, length: int) -> None:
    """No sequences, or no tokens: the state passes through."""
    arguments = inputs(length, batch=batch)
    y, H, *gradients = results(arguments, incoming(arguments))
    assert y.shape == (batch, length, 24)
    assert torch.equal(H, arguments[6])
    assert not any(gradient.any() for gradient in gradients[:6])
    assert torch.equal(gradients[6], incoming(arguments)[1])


@DTYPES
@pytest.mark.parametrize("parts", [[64, 66], [1, 129], [129, 1], [1] * 130], ids=["64+66", "1+129", "129+1", "1 each"])
def test_carrying_the_state(parts: list[int], dtype: torch.dtype) -> None:
    """CASES.md 17, with the gradient through the carried state."""
    arguments = inputs(130, dtype)
    x, delta, A, b, c, D, state = arguments
    outputs, H = [], state
    for x_, delta_, b_, c_ in zip(*(tensor.split(parts, dim=1) for tensor in (x, delta, b, c)), strict=True):
        y, H = selective_scan(x_, delta_, A, b_, c_, D, H, backend="cpu")
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    gradients = torch.autograd.grad([y, H], arguments, incoming(arguments))
    expect_close([y, H, *gradients], results(arguments, incoming(arguments)), TOLERANCE[dtype])


@DTYPES
def test_extreme_log_decays(dtype: torch.dtype) -> None:
    """CASES.md 9: Delta A from {0, -1e-6, -50, -1e4} side by side; nothing is nearly equal by chance of scale."""
    arguments = inputs(65, dtype)
    choices = torch.tensor([0.0, 1e-6, 50.0, 1e4], dtype=dtype)
    picked = torch.randint(4, arguments[1].shape, generator=torch.Generator().manual_seed(0))
    arguments[1] = choices[picked].requires_grad_()
    arguments[2] = (-torch.ones_like(arguments[2])).requires_grad_()
    assert all(tensor.isfinite().all() for tensor in expect_as_reference(arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponential(dtype: torch.dtype) -> None:
    """The decay alone: H = exp(Delta A) * 1. Exact at 0 and far below; not a number stays so; growth reaches inf."""
    lowest, highest = (-87.3, 88.3) if dtype == torch.float32 else (-708.0, 709.0)
    special = [0.0, -0.0, -1e4, -1e30, -torch.inf, torch.nan, torch.inf, 1e4]
    exponents = torch.cat([torch.linspace(lowest, highest, 20000), torch.linspace(-1, 1, 20000), torch.tensor(special)])
    exponents = exponents.to(dtype)
    d = len(exponents)
    one, zero = torch.ones(1, 1, d, dtype=dtype), torch.zeros(1, 1, 1, dtype=dtype)
    _, H = selective_scan(
        one, one, exponents[:, None], zero, zero, one[0, 0], torch.ones(1, d, 1, dtype=dtype), backend="cpu"
    )
    found, H = H.flatten()[: -len(special)].numpy(), H.flatten()[-len(special) :]
    exact = np.exp(exponents[: -len(special)].numpy().astype(np.longdouble))
    errors = np.abs(found.astype(np.longdouble) - exact) / np.spacing(exact.astype(found.dtype))
    assert errors.max() < 1.0
    assert H[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert H[5].isnan()
    assert H[6:].tolist() == [torch.inf, torch.inf]


def test_bfloat16_and_float16_are_computed_in_float32() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        arguments = [tensor.detach().to(dtype) for tensor in inputs(33)]
        arguments[6] = arguments[6].float()
        y, H = selective_scan(*arguments, backend="cpu")
        exact_y, exact_H = selective_scan(*(tensor.float() for tensor in arguments), backend="cpu")
        assert (y.dtype, H.dtype) == (dtype, torch.float32)
        assert torch.equal(y, exact_y.to(dtype))
        assert torch.equal(H, exact_H)


def test_strided_and_expanded() -> None:
    """CASES.md 12: slices of a fused projection, transposed views, gradients and arguments without strides."""
    plain = [tensor.detach() for tensor in inputs(17, d=32)]
    fused = torch.cat([plain[3], plain[0], plain[1], plain[4]], dim=-1)
    b, x, delta, c = fused.split([5, 32, 32, 5], dim=-1)
    views = [x, delta, plain[2].T.contiguous().T, b, c, torch.stack([plain[5], plain[5]], dim=-1)[:, 0]]
    views.append(plain[6].transpose(0, 2).contiguous().transpose(0, 2))
    assert not any(view.is_contiguous() for view in views)
    grads = [random(1, 17, 1).expand(2, 17, 32), random(2, 1, 5).expand(2, 32, 5)]
    copies = results([tensor.requires_grad_() for tensor in plain], [grad.contiguous() for grad in grads])
    expect_equal(results([view.requires_grad_() for view in views], grads), copies)
    one_c = plain[4].detach()[:, :1].requires_grad_()
    y, _ = selective_scan(*plain[:4], one_c.expand(-1, 17, -1), *plain[5:], backend="cpu")
    expected, _ = selective_scan(*plain[:4], one_c.expand(-1, 17, -1), *plain[5:], backend="reference")
    torch.testing.assert_close(torch.autograd.grad(y.sum(), one_c), torch.autograd.grad(expected.sum(), one_c))


@DTYPES
@pytest.mark.parametrize("index", [0, 1, 3, 4, 6], ids=["x", "delta", "b", "c", "state"])
def test_nan_stays_in_its_sequence_and_is_not_swallowed(index: int, dtype: torch.dtype) -> None:
    arguments = inputs(40, dtype, batch=3)
    clean = results(arguments, incoming(arguments))
    with torch.no_grad():
        arguments[index][1, 3] = torch.nan
    dirty = results(arguments, incoming(arguments))
    for i in (0, 1, 2, 3, 5, 6, 8):  # what has a batch: y, H and the gradients of x, delta, b, c, state
        assert torch.equal(dirty[i][[0, 2]], clean[i][[0, 2]])
    assert dirty[0][1].isnan().any()
    expected = results(arguments, incoming(arguments), "reference")
    for a, b in zip(dirty, expected, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())


def test_same_to_the_bit_for_repeats_and_any_number_of_threads(threads: None) -> None:
    """Large enough for two threads; two groups of channels a sequence."""
    arguments = inputs(130, torch.float32, batch=16, d=64, N=16)
    torch.set_num_threads(1)
    alone = results(arguments, incoming(arguments))
    for number in (1, 2, 3, 2):
        torch.set_num_threads(number)
        expect_equal(results(arguments, incoming(arguments)), alone)


def test_threads_do_run(threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above compares what it says: above a size, work is handed to the pool."""
    from fpexp.ops import kernel

    asked = []
    pool = kernel._pool()
    monkeypatch.setattr(kernel, "_pool", lambda: asked.append(1) or pool)
    torch.set_num_threads(2)
    arguments = [tensor.detach() for tensor in inputs(130, torch.float32, batch=16, d=64, N=16)]
    selective_scan(*arguments, backend="cpu")
    assert asked


def test_nothing_uninitialised_is_read() -> None:
    """With deterministic algorithms, torch fills what it allocates with NaN."""
    arguments = inputs(37, torch.float32, d=100)
    expected = results(arguments, incoming(arguments))
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1000).isnan().all()
        expect_equal(results(arguments, incoming(arguments)), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("d", "N"), [(256, 16), (64, 128)])
def test_what_is_kept_for_backward(d: int, N: int) -> None:
    """Below four times the arguments, and far below B T d N."""
    arguments = [tensor.float() for tensor in inputs(512, batch=1, d=d, N=N)]
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        selective_scan(*arguments, backend="cpu")
    given = sum(tensor.nbytes for tensor in arguments)
    assert given < sum(kept.values()) < 4 * given
    assert sum(kept.values()) < 512 * d * N * 4 / 4


def python(code: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(cwd or Path(fpexp.__file__).parent.parent), **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


ONE_CALL = """
import sys, torch, fpexp.ops
from fpexp.ops.selective_scan import selective_scan
assert "numba" not in sys.modules, "loaded before it is needed"
arguments = [torch.ones(1, 2, 4), torch.ones(1, 2, 4), -torch.ones(4, 3)]
arguments += [torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(4)]
y, _ = selective_scan(*arguments)
assert torch.allclose(y, selective_scan(*arguments, backend="reference")[0])
from fpexp.ops.selective_scan.cpu import _forward
stats = _forward._compiled.stats
print("compiled", sum(stats.cache_misses.values()), "loaded", sum(stats.cache_hits.values()))
"""


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    first, second = (python(ONE_CALL, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first.stdout, first.stderr) == ("compiled 1 loaded 0\n", "")
    assert (second.stdout, second.stderr) == ("compiled 0 loaded 1\n", "")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    """A read-only install and no folder of the user's: it works, and one line says what it costs."""
    package = tmp_path / "fpexp"
    shutil.copytree(Path(fpexp.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "conf"))
    (package / "ops" / "selective_scan" / "__pycache__").write_text("in the way, also for root")
    nowhere = str(tmp_path / "fpexp" / "errors.py" / "cache")
    ran = python(ONE_CALL, tmp_path, NUMBA_CACHE_DIR=nowhere, XDG_CACHE_HOME=nowhere, HOME=nowhere)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "compiled 1 loaded 0\n"
    assert ran.stderr.count("\n") == 1
    assert "NUMBA_CACHE_DIR" in ran.stderr


def test_no_temporary_of_every_state() -> None:
    """B T d N in float32 would be 256 MiB; the process grows by a small part of it."""
    code = """
import resource, torch
from fpexp.ops.selective_scan import selective_scan
def run(length):
    x, delta, b, c = (torch.rand(1, length, n, requires_grad=True) for n in (64, 64, 256, 256))
    A, D = (-torch.rand(64, 256)).requires_grad_(), torch.ones(64, requires_grad=True)
    y, H = selective_scan(x, delta, A, b, c, D, backend="cpu")
    torch.autograd.backward([y, H], [torch.ones_like(y), torch.ones_like(H)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = run(65)
print((run(4096) - before) // 1024)
"""
    ran = python(code)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 80


@pytest.mark.parametrize(
    ("name", "shape"),
    [("delta", (2, 5, 1)), ("A", (1, 5)), ("b", (2, 5, 4)), ("c", (5, 5)), ("D", ()), ("state", (1, 24, 5))],
)
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    arguments = dict(zip(NAMES, inputs(5), strict=True))
    arguments[name] = torch.ones(shape, dtype=torch.float64)
    with pytest.raises(ValueError, match=f"selective_scan: {name} is|A \\(d, N\\)"):
        selective_scan(**arguments)  # type: ignore[arg-type]


def test_no_second_derivative_by_mistake() -> None:
    x = inputs(3)[0]
    y, _ = selective_scan(x, *inputs(3)[1:], backend="cpu")
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    module = importlib.import_module("fpexp.models.fp_mamba_problem")
    monkeypatch.setattr(module, "selective_scan", functools.partial(selective_scan, backend=backend))


@pytest.mark.parametrize("gate", ["outside", "inside"])
@pytest.mark.parametrize("mixer", ["H2", "K-spectral", "DPLR2"])
def test_a_layer_forward_and_backward(mixer: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Picard's evaluations and the one that carries the gradient."""
    u, found = random(3, 20, 4), []
    for backend in ("reference", "cpu"):
        use_backend(monkeypatch, backend)
        layer = make_layer(mixer, Picard(tolerance=1e-8), dependence=EVERYTHING, gate=gate, norm="layer_norm")
        output, (result,) = layer(u, Cap(30), None)
        output.square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
        assert all(gradient is not None and gradient.any() for gradient in gradients.values())
        found.append((output, result.iterations, gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("solver", [Picard, Sequential])
def test_a_model_in_float32(solver: type, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, found = torch.randint(12, (4, 33), generator=torch.Generator().manual_seed(0)), []
    name = solver.__name__.lower()
    for backend in ("reference", "cpu"):
        use_backend(monkeypatch, backend)
        model = tiny("model=fp_mamba_h", f"solver={name}").model
        logits = model(tokens, Cap(10)).logits
        logits.float().logsumexp(-1).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append([logits, *gradients])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-4 * max(b.abs().max().item(), 1e-6)
