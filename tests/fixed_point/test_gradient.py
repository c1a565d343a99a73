"""Gradients through fixed points of toy maps, against formulas and dense solves (CASES.md 4 and 5)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from helpers import Recurrence, Toy, random, to_numpy
from torch import Tensor

from fpexp.fixed_point import (
    BackwardRecord,
    Cap,
    Gradient,
    Implicit,
    OneStep,
    Picard,
    Sequential,
    SolveResult,
    Status,
    TokenwiseProblem,
    Unrolled,
)

N = 8
GRADIENTS: list[Gradient] = [
    OneStep(),
    Unrolled(steps=3),
    Implicit(tolerance=1e-8, max_iterations=50, restart=20),
]


def implicit(tolerance: float = 1e-12, max_iterations: int = 100, restart: int = 100) -> Implicit:
    return Implicit(tolerance=tolerance, max_iterations=max_iterations, restart=restart)


def found(value: Tensor) -> SolveResult:
    """The result of a solver that was right."""
    zeros = torch.zeros(len(value), dtype=value.dtype)
    return SolveResult(value, zeros.long(), zeros, zeros.long())


def linear(radius: float, batch: int = 3) -> tuple[Toy, SolveResult]:
    """z = W z + x, each sequence with its own W of the given spectral radius; and its solution."""
    w = random(batch, N, N)
    w = w / torch.linalg.eigvals(w).abs().amax(-1)[:, None, None] * radius
    x = random(batch, 1, N, seed=1)
    y = torch.linalg.solve(torch.eye(N, dtype=torch.float64) - w, x.mT).mT
    problem = Toy(lambda y, w, x: y @ w.mT + x, w.requires_grad_(), x.requires_grad_(), width=N)
    return problem, found(y.detach())


def backward(gradient: Gradient, problem: Toy, result: SolveResult) -> tuple[list[Tensor], SolveResult, Tensor]:
    """The gradients of sum(g * output) in the problem's parameters, the result, and g."""
    output, result = gradient.attach(problem, result)
    g = random(*output.shape, seed=2)
    return list(torch.autograd.grad(output, problem.parameters, g)), result, g


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_implicit_is_the_dense_solve(radius: float) -> None:
    """(I - W^T)^-1 g, also where the map does not contract: the series of `unrolled` would diverge there."""
    problem, result = linear(radius)
    (in_w, in_x), _, g = backward(implicit(), problem, result)
    for i in range(3):
        v = oracle.implicit_gradient(to_numpy(problem.parameters[0][i]), to_numpy(g[i]))
        np.testing.assert_allclose(to_numpy(in_x[i]), v, rtol=0, atol=1e-8)
        np.testing.assert_allclose(to_numpy(in_w[i]), np.outer(v, to_numpy(result.value[i])), rtol=0, atol=1e-8)


def test_one_step_is_its_formula() -> None:
    problem, result = linear(0.5)
    (in_w, in_x), same, g = backward(OneStep(), problem, result)
    assert same is result
    torch.testing.assert_close(in_x, g)
    torch.testing.assert_close(in_w, g.mT @ result.value)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_unrolled_is_the_first_terms_of_the_series(steps: int) -> None:
    problem, result = linear(0.5)
    (_, in_x), _, g = backward(Unrolled(steps=steps), problem, result)
    expected, term = torch.zeros_like(g), g
    for _ in range(steps):
        expected, term = expected + term, term @ problem.parameters[0]
    torch.testing.assert_close(in_x, expected)


def test_unrolled_once_is_one_step_and_often_is_implicit() -> None:
    problem, result = linear(0.5)
    once = backward(Unrolled(steps=1), problem, result)[0]
    assert all(map(torch.equal, once, backward(OneStep(), problem, result)[0]))
    often = backward(Unrolled(steps=200), problem, result)[0]
    for a, b in zip(often, backward(implicit(), problem, result)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("gradient", GRADIENTS, ids=lambda gradient: type(gradient).__name__)
def test_the_value_does_not_depend_on_whether_it_is_differentiated(gradient: Gradient) -> None:
    for problem in (linear(0.5)[0], recurrence()):
        result = Picard(tolerance=1e-2).solve(problem, Cap(100), training=False)
        attached, with_record = gradient.attach(problem, result)
        with torch.no_grad():
            plain, same = gradient.attach(problem, result)
        assert attached.requires_grad
        torch.testing.assert_close(attached, plain, rtol=0, atol=1e-14)
        assert same is result
        assert (with_record.backward is not None) == isinstance(gradient, Implicit)


@pytest.mark.parametrize("gradient", [OneStep(), implicit()], ids=["one_step", "implicit"])
def test_without_gradient_one_evaluation_is_made(gradient: Gradient) -> None:
    problem, result = linear(0.5)
    with torch.no_grad():
        output, _ = gradient.attach(problem, result)
        assert torch.equal(output, problem.evaluate(result.value))
    assert problem.batches == [3, 3]


def recurrence(mask: Tensor | None = None, batch: int = 3, length: int = 6, padding: float = 0.0) -> Recurrence:
    slope = random(batch, length, 1).clamp(-2, 2) * 0.45
    if mask is not None:
        slope[~mask] = padding
    return Recurrence(slope.requires_grad_(), mask=mask)


class Whole:
    """A tokenwise problem that hides its tokens."""

    def __init__(self, problem: Recurrence) -> None:
        self.mask, self.evaluate = problem.mask, problem.evaluate


def solved(problem: Recurrence) -> SolveResult:
    return Sequential(tolerance=1e-12, inner_max_iterations=1000).solve(problem, Cap(1), training=True)


def in_slope(gradient: Gradient, problem: Recurrence, *, whole: bool = False) -> tuple[Tensor, BackwardRecord]:
    output, result = gradient.attach(Whole(problem) if whole else problem, solved(problem))
    assert result.backward is not None
    assert result.backward.iterations == []
    (slope,) = torch.autograd.grad((output * random(*output.shape, seed=2)).sum(), problem.slope)
    return slope, result.backward


def test_the_sweep_is_the_whole_solve() -> None:
    assert isinstance(recurrence(), TokenwiseProblem)
    assert not isinstance(Whole(recurrence()), TokenwiseProblem)
    swept, record = in_slope(implicit(), recurrence())
    whole, whole_record = in_slope(implicit(), recurrence(), whole=True)
    torch.testing.assert_close(swept, whole, rtol=1e-9, atol=1e-9)
    assert [part.shape for part in record.iterations] == [(3,)] * 6
    assert torch.cat(record.iterations).eq(1).all()
    assert [part.shape for part in whole_record.iterations] == [(3,)]


def test_the_work_is_that_of_t_tokens() -> None:
    """Each token is evaluated twice, and a product with its Jacobian sees no more of the graph at the end of time."""
    problem = recurrence(length=40)
    calls: list[int] = []
    evaluate = Recurrence.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recurrence, "evaluate", lambda self, y: (calls.append(self.length), evaluate(self, y))[1])
        output, _ = implicit().attach(problem, found(torch.ones(3, 40, 1, dtype=torch.float64)))
    assert calls == [1] * 80
    equations = [node.equation for node in graph(output.grad_fn) if hasattr(node, "equation")]
    assert len(equations) == 40
    assert len({len(list(graph(equation.f_y.grad_fn))) for equation in equations}) == 1


def graph(root: Any) -> Iterator[Any]:
    """All nodes behind a node, itself included."""
    seen, waiting = {root}, [root]
    while waiting:
        node = waiting.pop()
        yield node
        new = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= new
        waiting += new


@pytest.mark.parametrize(
    ("whole", "padding"), [(False, 0.9), (False, 3.0), (False, float("nan")), (True, 0.9), (True, 3.0)]
)
def test_padded_tokens_have_no_part(whole: bool, padding: float) -> None:
    """The second sequence alone and right-padded, where the map is slow, diverges or gives NaN at the padding."""
    mask = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    slope, record = in_slope(implicit(), recurrence(mask, 2, 6, padding), whole=whole)
    lone = Recurrence(recurrence(batch=2).slope[1:, :3].detach().requires_grad_())
    output, _ = implicit().attach(lone, solved(lone))
    weights = random(2, 6, 1, seed=2)[1:, :3]
    (alone,) = torch.autograd.grad((output * weights).sum(), lone.slope)
    torch.testing.assert_close(slope[1:, :3], alone, rtol=1e-9, atol=1e-9)
    if padding == padding:
        assert slope[1, 3:].eq(0).all()
    assert sum(map(len, record.iterations)) == (2 if whole else 9)
    assert torch.cat(record.residual).max() < 1e-9


def test_what_is_not_solved_is_told_and_finite() -> None:
    problem, result = linear(0.9)
    (in_w, _), after, _ = backward(implicit(1e-6, max_iterations=2), problem, result)
    assert after.backward is not None
    assert torch.cat(after.backward.iterations).tolist() == [2] * 3
    assert (torch.cat(after.backward.residual) > 1e-3).all()
    assert in_w.isfinite().all()


def test_a_solve_that_did_not_converge_still_has_a_finite_gradient() -> None:
    problem = recurrence()
    result = Sequential(tolerance=1e-12, inner_max_iterations=2).solve(problem, Cap(1), training=True)
    assert (result.status == Status.CAP_REACHED).any()
    output, result = implicit().attach(problem, result)
    output.sum().backward()
    assert problem.slope.grad is not None
    assert problem.slope.grad.isfinite().all()


@pytest.mark.parametrize("where", ["map", "gradient"])
def test_what_is_not_finite_is_told_and_alone(where: str) -> None:
    good = recurrence()
    slope = good.slope.detach().clone()
    if where == "map":
        slope[1, 3] = float("nan")
    bad = Recurrence(slope.requires_grad_())
    expected, _ = in_slope(implicit(), good)
    output, result = implicit().attach(bad, solved(bad))
    weights = random(*output.shape, seed=2)
    if where == "gradient":
        weights[1, 3] = float("nan")
    (gradient,) = torch.autograd.grad(output, bad.slope, weights)
    assert result.backward is not None
    residual = torch.stack(result.backward.residual)
    torch.testing.assert_close(gradient[[0, 2]], expected[[0, 2]])
    assert residual[:, [0, 2]].max() < 1e-9
    assert not residual[:, 1].isfinite().all()
    assert not gradient[1].isfinite().all()


def test_a_map_that_does_not_look_at_y() -> None:
    problem = Toy(lambda y, x: x * 2, random(3, 1, N).requires_grad_(), width=N)
    (in_x,), _, g = backward(implicit(), problem, found(problem.start()))
    torch.testing.assert_close(in_x, 2 * g)


@pytest.mark.parametrize(
    "other", [{"tolerance": 1e-2}, {"max_iterations": 3}, {"restart": 2}], ids=lambda value: next(iter(value))
)
def test_every_setting_changes_what_it_says(other: dict[str, Any]) -> None:
    problem, result = linear(0.9)
    records = [backward(implicit(**settings), problem, result)[1].backward for settings in ({}, other)]
    assert not torch.equal(*(torch.cat(record.iterations) for record in records if record is not None))


def test_one_record_has_all_backward_passes_of_its_graph() -> None:
    problem = recurrence()
    output, result = implicit().attach(problem, solved(problem))
    for _ in range(2):
        torch.autograd.grad(output.sum(), problem.slope, retain_graph=True)
    assert result.backward is not None
    assert len(result.backward.iterations) == 12


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("with_backward", [False, True])
def test_nothing_is_left_for_the_garbage_collector(whole: bool, with_backward: bool) -> None:
    """No cycle through the graph: with the output all of it is gone at once (CASES.md 5)."""
    problem = recurrence()
    result = solved(problem)

    def once() -> None:
        output, _ = implicit().attach(Whole(problem) if whole else problem, result)
        if with_backward:
            torch.autograd.grad(output.sum(), problem.slope)

    once()
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        once()
        assert tensors() == before
    finally:
        gc.enable()


def tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
