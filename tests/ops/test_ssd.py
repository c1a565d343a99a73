"""SSD in chunks against the token loop, and both against the explicit T x T matrix (CASES.md 7, 9, 12, 17)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import LENGTHS, random
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from fpexp.errors import UserError
from fpexp.ops import backends
from fpexp.ops.ssd import cpu, ssd

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 2e-2}

both = pytest.mark.parametrize("backend", ["cpu", "reference"])


def inputs(
    length: int,
    dtype: torch.dtype = torch.float64,
    batch: int = 2,
    heads: int = 4,
    P: int = 3,
    groups: int = 2,
    N: int = 5,
) -> dict[str, Tensor]:
    """Random arguments; Delta from below 1e-3 to above 1. A, D and the state are float32 beside bfloat16."""
    weights = torch.float32 if dtype == torch.bfloat16 else dtype
    return {
        "x": random(batch, length, heads, P, seed=1, dtype=dtype),
        "delta": functional.softplus(2 * random(batch, length, heads, seed=2) - 2).to(dtype),
        "A": -random(heads, seed=3).exp().to(weights),
        "b": random(batch, length, groups, N, seed=4, dtype=dtype),
        "c": random(batch, length, groups, N, seed=5, dtype=dtype),
        "D": random(heads, seed=6, dtype=weights),
        "state": random(batch, heads, P, N, seed=7, dtype=weights),
    }


def matrix_form(x: Tensor, delta: Tensor, A: Tensor, b: Tensor, c: Tensor, D: Tensor, state: Tensor) -> Any:
    """y = (L * C B^T) (delta x) + exp(delta A from the start) C state + D x, with L whole; float64."""
    length, heads = x.shape[1:3]
    b, c = (tensor.repeat_interleave(heads // b.shape[2], dim=2) for tensor in (b, c))
    log_decay = (delta * A).mT  # (B, heads, T)
    later = torch.ones(length, length, dtype=torch.bool).tril(-1)
    terms = torch.where(later, log_decay.unsqueeze(-1), 0.0)
    L = torch.where(later.T, 0.0, terms.cumsum(-2).exp())
    start = log_decay.cumsum(-1).exp()
    u = delta.unsqueeze(-1) * x
    y = torch.einsum("bhts,bthn,bshn,bshp->bthp", L, c, b, u)
    y = y + torch.einsum("bht,bthn,bhpn->bthp", start, c, state) + D[:, None] * x
    H = torch.einsum("bhs,bshp,bshn->bhpn", L[:, :, -1], u, b) + start[..., -1, None, None] * state
    return y, H


def everything(function: Any, arguments: dict[str, Tensor], grad_y: Tensor, grad_H: Tensor, **options: Any) -> Any:
    """y, H and the gradient of each argument, by name."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in arguments.items()}
    y, H = function(**leaves, **options)
    gradients = torch.autograd.grad([y, H], list(leaves.values()), [grad_y, grad_H])
    return {"y": y.detach(), "H": H.detach(), **dict(zip(leaves, gradients, strict=True))}


def expect_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each within `tolerance` of its largest entry."""
    for name, tensor in expected.items():
        assert found[name].isfinite().all(), name
        error = (found[name].double() - tensor.double()).abs().max()
        assert error <= tolerance * tensor.abs().max(), f"{name}: {float(error)}"


def check(arguments: dict[str, Tensor], oracle: Any = None, backend: str = "cpu", grad_y: Tensor | None = None) -> None:
    """Forward and gradients against `oracle` (the float64 loop where None) of the same numbers."""
    x, state = arguments["x"], arguments["state"]
    grad_y = random(*x.shape, seed=8, dtype=x.dtype) if grad_y is None else grad_y
    grad_H = random(*state.shape, seed=9, dtype=state.dtype)
    found = everything(ssd, arguments, grad_y, grad_H, backend=backend)
    exact = {name: tensor.double() for name, tensor in arguments.items()}
    options = {"backend": "reference"} if oracle is None else {}
    expected = everything(oracle or ssd, exact, grad_y.double(), grad_H.double(), **options)
    expect_close(found, expected, TOLERANCE[x.dtype])
    for name, tensor in arguments.items():
        assert found[name].dtype == tensor.dtype


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_forward_and_gradients(length: int, dtype: torch.dtype) -> None:
    check(inputs(length, dtype))


@both
@pytest.mark.parametrize("length", [1, 2, 17, 65, 129])
def test_the_matrix_form(length: int, backend: str) -> None:
    """An oracle that has neither a loop nor chunks."""
    check(inputs(length), matrix_form, backend)


@pytest.mark.parametrize(
    ("batch", "heads", "P", "groups", "N"),
    [(1, 1, 1, 1, 1), (1, 6, 2, 3, 4), (3, 2, 5, 2, 7), (2, 4, 3, 1, 2), (1, 2, 3, 1, 128)],
)
def test_other_shapes(batch: int, heads: int, P: int, groups: int, N: int) -> None:
    check(inputs(67, batch=batch, heads=heads, P=P, groups=groups, N=N))


@pytest.mark.parametrize("size", [8, 24, 48, 72, 100])
def test_head_sizes(size: int) -> None:
    """CASES.md 11: as P and as N, correct and the same twice."""
    check(inputs(65, torch.float32, batch=1, heads=2, P=size, groups=1, N=3))
    arguments = inputs(65, torch.float32, batch=1, heads=2, P=3, groups=1, N=size)
    check(arguments)
    first, second = (ssd(**arguments, backend="cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three chunks, the last padded."""
    monkeypatch.setattr(cpu, "_CHUNK", 2)
    arguments = inputs(5, batch=1, heads=2, P=2, groups=1, N=2)
    leaves = [tensor.requires_grad_() for tensor in arguments.values()]
    assert torch.autograd.gradcheck(lambda *a: ssd(*a, backend="cpu"), leaves)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("length", [16, 64, 129])
def test_extreme_log_decays(length: int, dtype: torch.dtype, backend: str) -> None:
    """CASES.md 9: Delta A from {0, -1e-6, -50, -1e4} side by side."""
    arguments = inputs(length, dtype)
    choices = torch.tensor([0.0, 1e-6, 50.0, 1e4], dtype=dtype)
    arguments["delta"] = choices[torch.randint(4, (2, length, 4), generator=torch.Generator().manual_seed(0))]
    arguments["A"] = -torch.ones_like(arguments["A"])
    check(arguments, matrix_form, backend)


def test_a_reset_costs_its_neighbours_no_digits() -> None:
    """After exp(-1e4) sums of log decays have no room in float32 for the small ones that follow."""
    arguments = inputs(64, torch.float32)
    arguments["A"] = -torch.ones(4)
    arguments["delta"] = torch.full((2, 64, 4), 3e-3)
    arguments["delta"][:, ::8] = 1e4
    arguments["x"][:, ::8] *= 1e-4  # so that what a reset writes does not drown the rest
    check(arguments)


@pytest.mark.parametrize("parts", [[64, 66], [1, 129], [129, 1], [1] * 130], ids=["64+66", "1+129", "129+1", "1 each"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_carrying_the_state(parts: list[int], dtype: torch.dtype) -> None:
    """CASES.md 17."""
    arguments = inputs(130, dtype)
    whole, whole_last = ssd(**arguments)
    outputs, state = [], arguments["state"]
    for x, delta, b, c in zip(*(arguments[name].split(parts, dim=1) for name in ("x", "delta", "b", "c")), strict=True):
        y, state = ssd(x, delta, arguments["A"], b, c, arguments["D"], state)
        outputs.append(y)
    expect_close({"y": torch.cat(outputs, dim=1), "H": state}, {"y": whole, "H": whole_last}, TOLERANCE[dtype])


@both
@pytest.mark.parametrize("length", [1, 9])
def test_no_state_is_one_of_zeros(length: int, backend: str) -> None:
    arguments = inputs(length)
    arguments["state"] = torch.zeros_like(arguments["state"])
    expected = ssd(**arguments, backend=backend)
    del arguments["state"]
    found = ssd(**arguments, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_arguments_stay_as_they_are() -> None:
    arguments = inputs(9)
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    check(arguments)
    assert all(torch.equal(before[name], tensor) for name, tensor in arguments.items())


@both
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("length", [1, 64])
def test_bfloat16_input_keeps_a_float32_state(length: int, autocast: bool, backend: str) -> None:
    arguments = inputs(length, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, H = ssd(**arguments, backend=backend)
    assert (y.dtype, H.dtype) == (torch.bfloat16, torch.float32)
    exact_y, exact_H = ssd(**{name: tensor.double() for name, tensor in arguments.items()}, backend="reference")
    expect_close({"H": H}, {"H": exact_H}, 1e-5)
    expect_close({"y": y}, {"y": exact_y}, 2**-8)


@both
def test_autocast_changes_no_float32_result(backend: str) -> None:
    """Neither forward nor backward, which runs inside it too."""
    arguments = inputs(17, torch.float32)
    grads = (random(2, 17, 4, 3, seed=8, dtype=torch.float32), arguments["state"])
    plain = everything(ssd, arguments, *grads, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = everything(ssd, arguments, *grads, backend=backend)
    expect_close(found, plain, 1e-6)


def test_strided_views_are_as_contiguous_copies() -> None:
    """CASES.md 12: transposed views and slices of a fused projection."""
    plain = inputs(67)
    fused = torch.cat([plain[name].flatten(2) for name in ("b", "x", "delta", "c")], dim=-1)
    b, x, _, c = fused.split([10, 12, 4, 10], dim=-1)
    views = {
        "x": x.unflatten(-1, (4, 3)),
        "delta": plain["delta"].transpose(1, 2).contiguous().transpose(1, 2),
        "A": torch.stack([plain["A"], plain["A"]], dim=-1)[:, 0],
        "b": b.unflatten(-1, (2, 5)),
        "c": c.unflatten(-1, (2, 5)),
        "D": torch.stack([plain["D"], plain["D"]], dim=-1)[:, 0],
        "state": plain["state"].mT.contiguous().mT,
    }
    assert not any(view.is_contiguous() for view in views.values())
    check(views)
    assert torch.equal(ssd(**views)[0], ssd(**plain)[0])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 4, 1), (1, 67, 1, 3)])
def test_expanded_incoming_gradients_are_as_full_ones(shape: tuple[int, ...]) -> None:
    """CASES.md 12: `y.sum().backward()` hands back a gradient without strides."""
    check(inputs(67), grad_y=random(*shape, seed=8).expand(2, 67, 4, 3))


@pytest.mark.parametrize("output", [0, 1])
def test_one_output_alone_has_a_gradient(output: int) -> None:
    arguments = {name: tensor.requires_grad_() for name, tensor in inputs(67).items() if name != "D"}
    D = random(4, seed=6)
    found, expected = (
        torch.autograd.grad(ssd(**arguments, D=D, backend=backend)[output].sum(), list(arguments.values()),
                            allow_unused=True, materialize_grads=True)
        for backend in ("cpu", "reference")
    )  # fmt: skip
    names = list(arguments)
    expect_close(dict(zip(names, found, strict=True)), dict(zip(names, expected, strict=True)), 1e-12)


class Largest(TorchDispatchMode):
    """The size of the largest tensor that anything returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def test_no_state_of_every_token_exists() -> None:
    """Neither B T heads P N numbers at any time, nor between the passes more than arguments and 4 chunks' states."""
    length = 4 * cpu._CHUNK
    arguments = inputs(length, batch=1, heads=2, P=16, groups=1, N=128)
    leaves = {name: tensor.requires_grad_() for name, tensor in arguments.items()}
    kept = []
    with saved_tensors_hooks(lambda tensor: (kept.append(tensor.numel()), tensor)[1], lambda tensor: tensor):
        with Largest() as forward:
            y, _ = ssd(**leaves, backend="cpu")
        with Largest() as backward:
            y.backward(torch.ones_like(y))
    state = 2 * 16 * 128
    assert 0 < sum(kept) <= sum(tensor.numel() for tensor in leaves.values()) + 5 * state
    for mode in (forward, backward):
        assert 0 < mode.elements < length * state / 16


def test_the_last_state_holds_no_others() -> None:
    _, H = ssd(**inputs(257))
    assert H.untyped_storage().nbytes() == H.numel() * H.element_size()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("delta", (2, 7, 1)), ("A", (1,)), ("b", (2, 7, 2, 4)), ("b", (1, 7, 2, 5)), ("c", (2, 7, 1, 5)), ("D", (3,)),
        ("state", (2, 4, 5, 3)), ("state", (1, 4, 3, 5)),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...]) -> None:
    """All of these would broadcast or read what is not there."""
    arguments = inputs(7)
    arguments[name] = arguments[name].new_ones(shape)
    with pytest.raises(ValueError, match=r"ssd: .* not "):
        ssd(**arguments)


def test_other_mistakes() -> None:
    arguments = inputs(7)
    with pytest.raises(ValueError, match="4 heads are not a multiple of 3 groups"):
        ssd(**{**arguments, "b": torch.ones(2, 7, 3, 5), "c": torch.ones(2, 7, 3, 5)})
    with pytest.raises(ValueError, match="T >= 1"):
        ssd(**{**arguments, "x": torch.ones(2, 0, 4, 3)})
    with pytest.raises(ValueError, match=r"x \(B, T, heads, P\)"):
        ssd(**{**arguments, "x": torch.ones(2, 7, 12)})
    with pytest.raises(UserError, match="no such backend"):
        ssd(**arguments, backend="mine")


def test_only_the_reference_is_differentiated_twice() -> None:
    x, rest = inputs(3)["x"].requires_grad_(), {name: t for name, t in inputs(3).items() if name != "x"}
    (first,) = torch.autograd.grad(ssd(x, **rest, backend="cpu")[0].square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_every_op_names_its_backend() -> None:
    assert "ssd" in backends()
