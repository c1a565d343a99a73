"""Every op that `fpexp bench ops` times is its reference, and one that is not is refused before anything is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fpexp.bench import ops
from fpexp.bench.context import Context
from fpexp.bench.measure import CheckFailed, Contender, Rounds, measure
from fpexp.bench.memory import peak_extra
from fpexp.errors import UserError
from fpexp.ops.backend import choose
from fpexp.ops.selective_scan import reference

CONTEXT = Context("results", 1, Path())
ARGUMENTS = {
    "selective_scan": ["x", "delta", "A", "b", "c", "D"],
    "ssd": ["x", "delta", "A", "b", "c", "D"],
    "delta_rule": ["q", "k", "v", "beta", "log_decay"],
    "delta_product": ["q", "k", "v", "beta"],
    "diagonal_scan": ["a", "x"],
}


def of(name: str, length: int = 12) -> list[Contender]:
    return list(ops.contenders(ops.Sizes(ops=[name], batch_size=2, length=length, width=6), CONTEXT))


@pytest.mark.parametrize("name", ops.OPS)
def test_an_op_and_every_gradient_are_the_reference(name: str) -> None:
    *fused, loop = of(name)
    if reason := fused[0].missing:
        pytest.skip(reason)
    for contender in fused:
        checks = contender.check()
        assert [check.what.rpartition(" of ")[2] for check in checks] == ["y", *ARGUMENTS[name]]
        assert all(check.passed for check in checks), checks
        assert contender.seconds() > 0
    assert not loop.missing
    assert loop.seconds() > 0


@pytest.mark.parametrize("name", ops.OPS)
@pytest.mark.parametrize("width", [4, 100, 128])
def test_inputs_have_the_width_and_are_the_same_every_time(name: str, width: int) -> None:
    case, again = ops.make_case(name, 2, 3, width), ops.make_case(name, 2, 3, width)
    assert ops.OPS[name].call("reference", **case.inputs).shape == case.grad_y.shape == (2, 3, width)
    assert all(tensor.is_leaf and tensor.requires_grad for tensor in case.inputs.values())
    pairs = zip(case.inputs.values(), again.inputs.values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(("length", "shorter"), [(12, [3, 6]), (6, [3]), (5, [])])
def test_lengths_double_and_the_loop_is_held_against_the_same_length(length: int, shorter: list[int]) -> None:
    *fused, loop = of("selective_scan", length)
    names = [f"cpu, length {count}" for count in (*shorter, length, 2 * length)]
    assert [contender.name for contender in fused] == names
    assert [contender.baseline for contender in fused] == [None, *names[:-1]]
    assert [contender.target for contender in fused] == [None, *[ops.DOUBLED] * (len(names) - 1)]
    assert (loop.name, loop.baseline) == (f"reference, length {length}", f"cpu, length {length}")
    assert len({contender.group for contender in (*fused, loop)}) == 1


@pytest.mark.parametrize(
    ("factor", "gradient", "what"), [(1.001, 1.0, "relative error of y"), (1.0, 1.001, "the gradient of x")]
)
def test_a_wrong_op_is_refused_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, factor: float, gradient: float, what: str
) -> None:
    pytest.importorskip("numba")
    from fpexp.ops.selective_scan import cpu

    timed: list[str] = []

    def wrong(*arguments: Any) -> tuple[Tensor, Tensor]:
        y, H = reference.selective_scan(*arguments)
        return y.detach() * (factor - gradient) + y * gradient, H

    def stopwatch(work: object) -> Any:
        return lambda: timed.append("timed")

    monkeypatch.setattr(cpu, "selective_scan", wrong)
    monkeypatch.setattr(ops, "stopwatch", stopwatch)
    with pytest.raises(CheckFailed, match=rf"^cpu, length 3 \(selective_scan, .*is not right.*{what}"):
        measure(of("selective_scan"), Rounds(1, 0, 1.0))
    assert not timed


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("fpexp.ops.backend._missing", lambda op, backend: "needs numba; pip install numba")
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_without_kernels_the_loop_alone_is_there() -> None:
    *fused, loop = of("selective_scan")
    assert all("pip install numba" in contender.missing for contender in fused)
    assert not loop.missing


def test_an_op_that_is_named_twice_is_timed_once() -> None:
    twice = ops.Sizes(ops=["selective_scan", "selective_scan"], batch_size=2, length=12, width=6)
    assert [c.name for c in ops.contenders(twice, CONTEXT)] == [c.name for c in of("selective_scan")]


def test_an_op_that_does_not_exist() -> None:
    with pytest.raises(UserError, match=r"^unknown op 'diagonal_scn'; did you mean 'diagonal_scan'\? \(selective_scan"):
        of("diagonal_scn")


@pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")
def test_the_loop_needs_at_least_its_results() -> None:
    sizes = {"name": "selective_scan", "batch_size": 2, "length": 256, "width": 256}
    extra = peak_extra(ops.prepare_memory, backend="reference", threads=1, **sizes)
    assert extra is not None
    assert extra > ops.make_case(**sizes).nbytes  # type: ignore[arg-type]
