"""The delta rule in chunks against the token loop, and both against a loop of its own (CASES.md 7, 9, 11, 12, 17)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers import LENGTHS, random, to_numpy
from torch import Tensor
from torch.nn import functional

from fpexp.ops import backends
from fpexp.ops.delta_rule import delta_rule

Arguments = dict[str, Tensor]

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}
STEPS_AND_DECAY = pytest.mark.parametrize(
    ("steps", "decay"), [(1, True), (1, False), (2, True), (2, False), (3, True), (3, False)]
)


def inputs(
    length: int,
    steps: int = 1,
    dtype: torch.dtype = torch.float64,
    *,
    decay: bool = True,
    state: bool = True,
    batch: int = 2,
    heads: int = 2,
    K: int = 5,
    V: int = 4,
) -> Arguments:
    """Random arguments: k of length 1, beta uniform in (0, 2), decays from near 1 to below 0.1."""
    rates = torch.float32 if dtype == torch.bfloat16 else dtype
    arguments = {
        "q": random(batch, length, heads, K, seed=1, dtype=dtype) / K**0.5,
        "k": functional.normalize(random(batch, length, steps, heads, K, seed=2), dim=-1).to(dtype),
        "v": random(batch, length, steps, heads, V, seed=3, dtype=dtype),
        "beta": 2 * torch.special.ndtr(random(batch, length, steps, heads, seed=4)).to(rates),
    }
    if decay:
        arguments["log_decay"] = -functional.softplus(2 * random(batch, length, heads, seed=5) - 2).to(rates)
    if state:
        arguments["state"] = random(batch, heads, K, V, seed=6, dtype=rates)
    return arguments


def exact(arguments: Arguments) -> Arguments:
    return {name: tensor.detach().double() for name, tensor in arguments.items()}


def oracle(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    beta: np.ndarray,
    log_decay: np.ndarray | None = None,
    state: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """In the papers' convention, S (V, K): S <- a S (I - beta k k^T) + beta v k^T;  o = S q."""
    batch, length, steps, heads, K = k.shape
    V = v.shape[-1]
    o, last = np.zeros((batch, length, heads, V)), np.zeros((batch, heads, K, V))
    for b, h in np.ndindex(batch, heads):
        S = np.zeros((V, K)) if state is None else state[b, h].T
        for t in range(length):
            for i in range(steps):
                a = np.exp(log_decay[b, t, h]) if log_decay is not None and i == 0 else 1.0
                k_i, beta_i = k[b, t, i, h], beta[b, t, i, h]
                S = a * S @ (np.eye(K) - beta_i * np.outer(k_i, k_i)) + beta_i * np.outer(v[b, t, i, h], k_i)
            o[b, t, h] = S @ q[b, t, h]
        last[b, h] = S.T
    return o, last


def expect_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest entry."""
    assert found.isfinite().all()
    atol = tolerance * max(float(expected.abs().max()), 1e-30)
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)


def value_and_gradients(arguments: Arguments, backend: str, grad_o: Tensor, grad_S: Tensor) -> dict[str, Tensor]:
    """o, the last S, and the gradient of every argument."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
    o, S = delta_rule(**leaves, backend=backend)
    gradients = torch.autograd.grad([o, S], list(leaves.values()), [grad_o.to(o.dtype), grad_S.to(S.dtype)])
    return {"o": o.detach(), "S": S.detach()} | dict(zip(leaves, gradients, strict=True))


def incoming(arguments: Arguments) -> tuple[Tensor, Tensor]:
    batch, length, _, heads, V = arguments["v"].shape
    return random(batch, length, heads, V, seed=7), random(batch, heads, arguments["k"].shape[-1], V, seed=8)


def check_against_reference(arguments: Arguments, grad_o: Tensor | None = None, tolerance: float | None = None) -> None:
    """Forward and every gradient, also that through the last state, against the token loop in float64."""
    dtype = arguments["v"].dtype
    random_o, grad_S = incoming(arguments)
    grad_o = random_o if grad_o is None else grad_o
    found = value_and_gradients(arguments, "cpu", grad_o, grad_S)
    expected = value_and_gradients(exact(arguments), "reference", grad_o.to(dtype).double(), grad_S)
    assert found["o"].dtype == dtype
    for name, tensor in expected.items():
        expect_close(found[name], tensor, tolerance or TOLERANCE[dtype])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@STEPS_AND_DECAY
@pytest.mark.parametrize("state", [True, False])
def test_the_recurrence_of_the_papers(steps: int, decay: bool, state: bool, backend: str) -> None:
    arguments = inputs(37, steps, decay=decay, state=state)
    expected = oracle(**{name: to_numpy(tensor) for name, tensor in arguments.items()})
    for found, value in zip(delta_rule(**arguments, backend=backend), expected, strict=True):
        expect_close(found, torch.from_numpy(value), 1e-12)


@pytest.mark.parametrize("length", LENGTHS)
@STEPS_AND_DECAY
def test_forward_and_gradients(length: int, steps: int, decay: bool) -> None:
    check_against_reference(inputs(length, steps, decay=decay))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@STEPS_AND_DECAY
def test_lower_precision(length: int, dtype: torch.dtype, steps: int, decay: bool) -> None:
    check_against_reference(inputs(length, steps, dtype, decay=decay))


@pytest.mark.parametrize("size", [8, 24, 48, 72, 100])
def test_head_sizes(size: int) -> None:
    """CASES.md 11."""
    check_against_reference(inputs(65, dtype=torch.float32, K=size, V=3, batch=1))
    check_against_reference(inputs(65, dtype=torch.float32, K=3, V=size, batch=1))
    arguments = inputs(65, dtype=torch.float32, K=size, V=size, batch=1)
    first, second = (value_and_gradients(arguments, "cpu", *incoming(arguments)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("steps", [1, 40], ids=["1", "more than a chunk"])
def test_more_steps_a_token_than_a_chunk_has(steps: int) -> None:
    check_against_reference(inputs(3, steps))


@pytest.mark.parametrize(("steps", "decay"), [(1, True), (2, True), (2, False)])
def test_derivatives_by_finite_differences(steps: int, decay: bool) -> None:
    arguments = inputs(40 // steps, steps, decay=decay, batch=1, heads=1, K=2, V=1)
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]

    def f(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return delta_rule(**dict(zip(arguments, tensors, strict=True)), backend="cpu")

    assert torch.autograd.gradcheck(f, leaves, fast_mode=True)


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_log_decays(dtype: torch.dtype, steps: int) -> None:
    """CASES.md 9, and ordinary decays among them, which a sum over the chunk would round off."""
    arguments = inputs(64, steps, dtype)
    choices = torch.tensor([0.0, -1e-6, -50.0, -1e4, -0.3], dtype=dtype)
    picked = torch.randint(5, arguments["log_decay"].shape, generator=torch.Generator().manual_seed(0))
    arguments["log_decay"] = choices[picked]
    check_against_reference(arguments, tolerance=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("log_decay", [-1e4, -float("inf")])
def test_a_full_forgetting_leaves_nothing(log_decay: float) -> None:
    arguments = inputs(64, dtype=torch.float32)
    arguments["log_decay"][:, 40] = log_decay
    o, S = delta_rule(**arguments, backend="cpu")
    changed = arguments | {"state": 1e3 * arguments["state"], "v": arguments["v"].clone()}
    changed["v"][:, :40] *= 1e3
    o2, S2 = delta_rule(**changed, backend="cpu")
    torch.testing.assert_close(o2[:, 40:], o[:, 40:], rtol=0, atol=1e-5)
    torch.testing.assert_close(S2, S, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", [[64, 66], [1, 129], [129, 1], [1] * 130], ids=["64+66", "1+129", "129+1", "1 each"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("steps", [1, 2])
def test_carrying_the_state(parts: list[int], dtype: torch.dtype, steps: int) -> None:
    """CASES.md 17."""
    arguments = inputs(130, steps, dtype, state=False)
    whole, whole_last = delta_rule(**arguments)
    outputs, state = [], None
    for timed in zip(*(tensor.split(parts, dim=1) for tensor in arguments.values()), strict=True):
        o, state = delta_rule(**dict(zip(arguments, timed, strict=True)), state=state)
        outputs.append(o)
    assert state is not None
    expect_close(torch.cat(outputs, dim=1), whole, TOLERANCE[dtype])
    expect_close(state, whole_last, TOLERANCE[dtype])


def test_the_gradient_reaches_through_a_carried_state() -> None:
    arguments = inputs(50, 2, state=False)
    v = arguments["v"].requires_grad_()
    (expected,) = torch.autograd.grad(delta_rule(**arguments, backend="reference")[0].square().sum(), v)
    o1, state = delta_rule(**{name: tensor[:, :20] for name, tensor in arguments.items()})
    o2, _ = delta_rule(**{name: tensor[:, 20:] for name, tensor in arguments.items()}, state=state)
    (found,) = torch.autograd.grad(torch.cat([o1, o2], dim=1).square().sum(), v)
    expect_close(found, expected, 1e-11)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_two_steps_a_token_are_two_tokens(backend: str) -> None:
    """DeltaProduct's steps are the delta rule's, of which each second state is read."""
    arguments = inputs(20, 2, decay=False)
    o, S = delta_rule(**arguments, backend=backend)
    one = {name: arguments[name].flatten(1, 2).unsqueeze(2) for name in ("k", "v", "beta")}
    q = arguments["q"].repeat_interleave(2, dim=1)
    each, last = delta_rule(q, **one, state=arguments["state"], backend=backend)
    expect_close(o, each[:, 1::2], 1e-12)
    expect_close(S, last, 1e-12)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_beta_2_reflects_and_beta_1_replaces(backend: str) -> None:
    """S^T k is what is stored at k: with beta 1 it becomes v, with beta 2 and v 0 it changes its sign."""
    arguments = inputs(1, decay=False)
    k, S = arguments["k"][:, 0, 0], arguments["state"]
    arguments["q"] = k.unsqueeze(1)
    replaced, _ = delta_rule(**arguments | {"beta": torch.ones(2, 1, 1, 2).double()}, backend=backend)
    expect_close(replaced, arguments["v"][:, :, 0], 1e-12)
    reflected, _ = delta_rule(
        **arguments | {"beta": 2 * torch.ones(2, 1, 1, 2).double(), "v": torch.zeros_like(arguments["v"])}
    )
    expect_close(reflected[:, 0], -(k.unsqueeze(-2) @ S).squeeze(-2), 1e-12)


def test_half_precision_keeps_a_float32_state() -> None:
    """CASES.md 14."""
    arguments = inputs(64, 2, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        o, S = delta_rule(**arguments)
    assert (o.dtype, S.dtype) == (torch.bfloat16, torch.float32)
    expected, expected_last = delta_rule(**exact(arguments))
    expect_close(S, expected_last, 1e-5)
    expect_close(o, expected, 2**-8)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_autocast_changes_no_float32_result(backend: str) -> None:
    arguments = inputs(17, dtype=torch.float32)
    plain = value_and_gradients(arguments, backend, *incoming(arguments))
    with torch.autocast("cpu", torch.bfloat16):
        cast = value_and_gradients(arguments, backend, *incoming(arguments))
    assert torch.equal(cast["o"], plain["o"])
    if backend == "cpu":  # autograd's own backward of the loop is not in a block of ours
        assert all(torch.equal(cast[name], plain[name]) for name in plain)


def test_strided_views_are_as_contiguous_copies() -> None:
    """CASES.md 12: slices of a fused projection, transposed copies, an expanded beta."""
    plain = inputs(40, K=4, V=4)
    fused = torch.cat([plain["k"][:, :, 0], plain["q"], plain["v"][:, :, 0]], dim=-1)
    k, q, v = fused.split(4, dim=-1)
    views = {
        "q": q,
        "k": k.unsqueeze(2),
        "v": v.unsqueeze(2),
        "beta": plain["beta"][..., :1].expand(-1, -1, -1, 2),
        "log_decay": plain["log_decay"].mT.contiguous().mT,
        "state": plain["state"].mT.contiguous().mT,
    }
    assert not any(view.is_contiguous() for view in views.values())
    check_against_reference(views)
    copies = {name: view.contiguous() for name, view in views.items()}
    assert torch.equal(delta_rule(**views)[0], delta_rule(**copies)[0])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 2, 1), (1, 40, 1, 4)])
def test_expanded_incoming_gradients_are_as_full_ones(shape: tuple[int, ...]) -> None:
    """CASES.md 12: `o.sum().backward()` hands back a gradient without strides."""
    check_against_reference(inputs(40), random(*shape, seed=9).expand(2, 40, 2, 4))


def test_the_backward_keeps_one_state_a_chunk() -> None:
    """What autograd saves, beside the arguments, is far from a state for each token."""
    arguments = inputs(256, K=16, V=16)
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes() // 8
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        delta_rule(**leaves, backend="cpu")
    of_the_arguments = sum(tensor.numel() for tensor in leaves.values())
    every_state = 256 * leaves["state"].numel()
    assert of_the_arguments < sum(saved.values()) < 3 * of_the_arguments + every_state / 16


def drop(name: str, dim: int) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {name: arguments[name].narrow(dim, 0, 1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("q", 1), r"q is \(2, 1, 2, 5\), not \(2, 3, 2, 5\)"),
        (drop("v", 2), r"v is \(2, 3, 1, 2, 4\), not \(2, 3, 2, 2, 4\)"),
        (drop("beta", 2), r"beta is \(2, 3, 1, 2\), not \(2, 3, 2, 2\)"),
        (drop("log_decay", 2), r"log_decay is \(2, 3, 1\), not \(2, 3, 2\)"),
        (drop("state", 2), r"state is \(2, 2, 1, 4\), not \(2, 2, 5, 4\)"),
        (lambda arguments: arguments | {"k": arguments["k"][:, :, 0]}, r"k \(B, T, n, heads, K\)"),
        (lambda arguments: arguments | {"k": arguments["k"][:, :0]}, "at least one token"),
        (lambda arguments: arguments | {"k": arguments["k"][:, :, :0]}, "at least one token and one step"),
    ],
)
def test_shapes_that_do_not_fit(change: Callable[[Arguments], Arguments], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        delta_rule(**change(inputs(3, 2)))


def test_it_names_its_backend() -> None:
    assert backends()["delta_rule"] == "cpu" or torch.cuda.is_available()
