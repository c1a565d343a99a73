"""CASES.md 13: offsets above 2^31 elements. Sparse files stand for the memory, of which one sequence is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import EVERYTHING, make_layer, random
from torch import Tensor

from fpexp.channel_mixers import Householder
from fpexp.fixed_point import OneStep, Sequential
from fpexp.machine import is_out_of_memory
from fpexp.models.fp_mamba_problem import State
from fpexp.models.fp_rnn import FPRNNLayer
from fpexp.models.fp_rnn_problem import State as VectorState
from fpexp.ops.diagonal_scan import cpu as diagonal_cpu
from fpexp.ops.diagonal_scan import diagonal_scan
from fpexp.ops.fixed_point_sweep import cpu as sweep_cpu
from fpexp.ops.selective_scan import cpu as scan_cpu
from fpexp.ops.token_mixing import cpu as mixing_cpu
from fpexp.ops.token_mixing import mix_tokens
from fpexp.ops.token_residual import cpu as residual_cpu
from fpexp.ops.token_residual import distances
from fpexp.ops.vector_sweep import cpu as vector_cpu

LIMIT = 2**31
Sparse = Callable[..., Tensor]


@pytest.fixture
def sparse(tmp_path: Path) -> Sparse:
    """Make tensors of zeros that take no memory before they are written."""

    def make(*shape: int) -> Tensor:
        path = tmp_path / "sparse"
        try:
            tensor = torch.from_file(str(path), shared=True, size=torch.Size(shape).numel()).view(shape)
        except RuntimeError as error:
            pytest.skip(f"no sparse file of this size here: {error}")
        path.unlink()
        return tensor

    return make


@contextmanager
def skipped_without_room() -> Iterator[None]:
    """Skip where this machine has no room for results, which are hardly touched; any other error is one."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        pytest.skip(f"no room for its results: {error}")


def test_the_selective_scan(sparse: Sparse) -> None:
    """The last of 2^25 + 1 sequences of 4 tokens and 16 channels."""
    length, width, N = 4, 16, 1
    batch = LIMIT // (length * width) + 1
    x, b, y, H = (sparse(batch, *shape) for shape in ((length, width), (length, N), (length, width), (width, N)))
    x[-1], b[-1] = random(length, width).abs(), random(length, N)
    A, D = -random(width, N).abs().float(), random(width).float()
    problem = scan_cpu._Problem.of(x, x, A, b, b, D, None)
    assert problem.tasks == batch
    assert x[-1].storage_offset() >= LIMIT
    scan_cpu._forward(batch - 1, batch, *problem.arguments(), *map(scan_cpu.flat, (y, H, x.new_empty(0))))
    expected_y, expected_H = scan_cpu.selective_scan(x[-1:], x[-1:], A, b[-1:], b[-1:], D)
    assert expected_y.any()
    assert torch.equal(y[-1:], expected_y)
    assert torch.equal(H[-1:], expected_H)


def test_the_diagonal_scan(sparse: Sparse) -> None:
    """The last of 2^25 + 1 sequences of 4 tokens and 16 channels, forward and backward."""
    length, width = 4, 16
    batch = LIMIT // (length * width) + 1
    a, x, h, grad_h, da, dx = (sparse(batch, length, width) for _ in range(6))
    state, dstate = (sparse(batch, width) for _ in range(2))
    for seed, tensor in enumerate((a, x, grad_h, state)):
        tensor[-1] = random(*tensor.shape[1:], seed=seed).tanh()
    assert x[-1].storage_offset() >= LIMIT
    given = [tensor[-1:].clone().requires_grad_() for tensor in (a, x, state)]
    last = (batch - 1, batch, length, width)
    diagonal_cpu._forward(*last, *map(diagonal_cpu.flat, (a, x, state, h)))
    diagonal_cpu._backward(*last, *map(diagonal_cpu.flat, (a, state, h, grad_h, da, dx, dstate)))
    expected = diagonal_scan(*given, backend="cpu")
    gradients = torch.autograd.grad(expected, given, grad_h[-1:])
    assert all(gradient.any() for gradient in gradients)
    for found, right in zip((h, da, dx, dstate), (expected, *gradients), strict=True):
        assert torch.equal(found[-1:], right)


class LastTask:
    """A kernel that does the last of its tasks alone."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def run(self, tasks: int, work: int, *arguments: Any) -> None:
        self.kernel(tasks - 1, tasks, *arguments)


def test_the_sweep(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 2^11 + 1 sequences of 2^15 tokens, with 35 numbers each from x: that passes 2^31."""
    batch, length, width = 2**11 + 1, 2**15, 16
    solver = Sequential(tolerance=1e-4)
    layer = make_layer(Householder(width, rank=1, a_max=0.5), solver, state_size=1, dependence=EVERYTHING).float()
    with torch.no_grad():
        small = layer.problem(random(1, length, 4, dtype=torch.float32))
    x, from_x = (sparse(batch, length, part.shape[-1]) for part in (small.x, small.from_x))
    x[-1], from_x[-1] = small.x[0], small.from_x[0]
    assert from_x[-1].storage_offset() >= LIMIT
    state = State(y=torch.zeros(batch, 1, width), H=torch.zeros(batch, width, 1))
    large = dataclasses.replace(small, x=x, from_x=from_x, state=state)
    settings = solver._sweep_settings()
    expected = small.sweep(settings)
    monkeypatch.setattr(sweep_cpu, "_sweep", LastTask(sweep_cpu._sweep))
    with skipped_without_room():
        found = large.sweep(settings)
    assert expected is not None
    assert found is not None
    for name in ("value", "iterations", "residual", "status", "H"):
        assert torch.equal(getattr(found, name)[-1:], getattr(expected, name)), name


def test_the_sweep_of_vectors(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of 2^11 + 1 sequences of 2^15 tokens, with 33 numbers each from x."""
    batch, length, width = 2**11 + 1, 2**15, 16
    solver = Sequential(tolerance=1e-4)
    mixer = Householder(width, rank=1, a_max=0.5)
    layer = FPRNNLayer(4, width, mixer, solver, OneStep(), hidden_dependence=True, weight_norm=False)
    with torch.no_grad():
        small = layer.problem(random(1, length, 4, dtype=torch.float32))
    v, from_x = (sparse(batch, length, part.shape[-1]) for part in (small.v, small.from_x))
    v[-1], from_x[-1] = small.v[0], small.from_x[0]
    assert from_x[-1].storage_offset() >= LIMIT
    state = VectorState(y=torch.zeros(batch, 1, width), h=torch.zeros(batch, 1, width))
    large = dataclasses.replace(small, v=v, from_x=from_x, state=state)
    settings = solver._sweep_settings()
    expected = small.sweep(settings)
    monkeypatch.setattr(vector_cpu, "_sweep", LastTask(vector_cpu._sweep))
    with skipped_without_room():
        found = large.sweep(settings)
    assert expected is not None
    assert found is not None
    for name in ("value", "iterations", "residual", "status", "H"):
        assert torch.equal(getattr(found, name)[-1:], getattr(expected, name)), name


def test_the_residual(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    f_y, y = (sparse(LIMIT // 16 + 1, 1, 16) for _ in range(2))
    f_y[-1], y[-1] = random(1, 16), random(1, 16, seed=1)
    monkeypatch.setattr(residual_cpu, "_norms", LastTask(residual_cpu._norms))
    for found, expected in zip(distances(f_y, y), distances(f_y[-1:], y[-1:], backend="reference"), strict=True):
        assert found[-1] == expected[0]


def test_token_mixing(sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of so many tokens that their numbers from x pass 2^31."""
    layer = make_layer(Householder(16, rank=1, a_max=0.5), Sequential(tolerance=0.1), state_size=1).float()
    with torch.no_grad():
        small = layer.problem(random(1, 1, 4, dtype=torch.float32))
    batch = LIMIT // small.from_x.shape[-1] + 1
    x, from_x = sparse(batch, 1, 16), sparse(batch, 1, small.from_x.shape[-1])
    x[-1], from_x[-1] = small.x[0], small.from_x[0]
    zeros = sparse(batch, 1, 16)
    arguments = (small.columns, layer.channel_mixer.form)
    expected = mix_tokens(small.from_x, zeros[:1], small.loop_weight, small.x, zeros[:1], *arguments)
    monkeypatch.setattr(mixing_cpu, "_forward", LastTask(mixing_cpu._forward))
    with skipped_without_room():
        found = mix_tokens(from_x, zeros, small.loop_weight, x, zeros, *arguments)
    assert expected is not None
    assert found is not None
    for a, b in zip(found[:4], expected[:4], strict=True):
        assert torch.equal(a[-1:], b)
