"""Triton's delta rule against the float64 loop, on a GPU or in the interpreter (CASES.md 7, 9, 11-14, 16, 17)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import LENGTHS, random
from torch import Tensor, nn
from torch.nn import functional

from fpexp.models import delta_net
from fpexp.ops.delta_rule import delta_rule

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
Arguments = dict[str, Any]


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Room for results is full of NaN, so that a number that no kernel writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def inputs(
    length: int,
    dtype: torch.dtype = torch.float32,
    *,
    steps: int = 1,
    decay: bool = True,
    state: bool = True,
    batch: int = 1,
    heads: int = 1,
    K: int = 5,
    V: int = 3,
) -> Arguments:
    """k of length 1, beta uniform in (0, 2), decays from near 1 to below 0.1; rates and state float32 or wider."""
    wide = dtype if dtype == torch.float64 else torch.float32
    log_decay = -functional.softplus(2 * random(batch, length, heads, seed=5) - 2).to(DEVICE, wide)
    return {
        "q": (random(batch, length, heads, K, seed=1) / K**0.5).to(DEVICE, dtype),
        "k": functional.normalize(random(batch, length, steps, heads, K, seed=2), dim=-1).to(DEVICE, dtype),
        "v": random(batch, length, steps, heads, V, seed=3).to(DEVICE, dtype),
        "beta": 2 * torch.special.ndtr(random(batch, length, steps, heads, seed=4)).to(DEVICE, wide),
        "log_decay": log_decay if decay else None,
        "state": random(batch, heads, K, V, seed=6).to(DEVICE, wide) if state else None,
    }


def run(arguments: Arguments, backend: str) -> dict[str, Tensor]:
    """o, the last S, and the gradient of every argument from gradients of both, which any type can hold."""
    leaves: Arguments = {name: None if t is None else t.detach().requires_grad_() for name, t in arguments.items()}
    outputs = delta_rule(**leaves, backend=backend)
    gradients = [random(*out.shape, seed=9).bfloat16().to(out) for out in outputs]
    given = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    results = torch.autograd.grad(outputs, list(given.values()), gradients)
    named = {f"d{name}": gradient for name, gradient in zip(given, results, strict=True)}
    return {"o": outputs[0].detach(), "S": outputs[1].detach()} | named


def check(arguments: Arguments, tolerance: float | None = None) -> dict[str, Tensor]:
    """Within `tolerance` of the largest number, of the type that the op promises; return what is found."""
    found = run(arguments, "triton")
    exact = run({name: None if t is None else t.double() for name, t in arguments.items()}, "reference")
    dtype = arguments["v"].dtype
    promised = {name: t.dtype for name, t in arguments.items() if t is not None}
    promised |= {"o": dtype, "S": torch.float64 if dtype == torch.float64 else torch.float32}
    for name, expected in exact.items():
        assert (found[name].shape, found[name].dtype) == (expected.shape, promised[name.removeprefix("d")]), name
        error = (found[name].double() - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
        assert error <= (tolerance or TOLERANCE[dtype]), f"{name}: {error}"
    return found


@DTYPES
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, dtype: torch.dtype) -> None:
    """Of a single number, which may be a difference of larger ones, bfloat16 need not have two digits."""
    check(inputs(length, dtype, batch=2 if length < 4 else 1, heads=2 if length < 20 else 1))


@DTYPES
@pytest.mark.parametrize(("length", "steps"), [(1, 2), (17, 2), (33, 3)])
def test_steps(length: int, steps: int, dtype: torch.dtype) -> None:
    """A chunk ends inside a token too."""
    check(inputs(length, dtype, steps=steps))


def test_more_steps_a_token_than_a_chunk_has() -> None:
    check(inputs(2, steps=70))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_types(dtype: torch.dtype) -> None:
    check(inputs(35, dtype, steps=2))


@pytest.mark.parametrize(("decay", "state"), [(False, False), (True, False), (False, True)])
def test_without_a_decay_or_a_state(decay: bool, state: bool) -> None:
    check(inputs(19, steps=2, decay=decay, state=state, batch=2))


@pytest.mark.parametrize("size", [8, 24, 48, 72, 100])
def test_head_sizes(size: int) -> None:
    """CASES.md 11; more than one block of K and of V from 48 on."""
    arguments = inputs(3, K=size, V=size)
    first, second = check(arguments), run(arguments, "triton")
    assert all(torch.equal(first[name], second[name]) for name in first)
    check(inputs(3, torch.bfloat16, K=3, V=size, heads=3))


@pytest.mark.parametrize(("K", "V"), [(64, 64), (100, 130), (130, 20)])
def test_blocks_of_a_state_in_bfloat16(K: int, V: int) -> None:
    check(inputs(67, torch.bfloat16, K=K, V=V))


def test_extreme_log_decays() -> None:
    """CASES.md 9, and ordinary decays among them, which a sum over the chunk would round off."""
    choices = torch.tensor([0.0, -1e-6, -50.0, -1e4, -0.3])
    picked = torch.randint(5, (1, 35, 1), generator=torch.Generator().manual_seed(0))
    check({**inputs(35, steps=2), "log_decay": choices[picked].to(DEVICE)})
    check({**inputs(35, torch.bfloat16), "log_decay": choices[picked].to(DEVICE)})


def test_a_full_forgetting_leaves_nothing() -> None:
    arguments = inputs(24)
    arguments["log_decay"][:, 20] = -float("inf")
    found = run(arguments, "triton")
    changed = run({**arguments, "state": 1e3 * arguments["state"]}, "triton")
    assert torch.equal(found["o"][:, 20:], changed["o"][:, 20:])
    assert all(tensor.isfinite().all() for tensor in found.values())


@DTYPES
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_keys_that_are_nearly_the_same(beta: float, dtype: torch.dtype) -> None:
    """Powers of M reach 1e20 with beta 2, T no more than 2."""
    arguments = inputs(65, dtype, decay=False, K=16)
    keys = functional.normalize(torch.ones(16).to(DEVICE) + 0.3 * arguments["k"].float(), dim=-1)
    check({**arguments, "k": keys.to(dtype), "beta": torch.full_like(arguments["beta"], beta)})


def strided(tensor: Tensor) -> Tensor:
    """The same numbers as every other column of a transposed view."""
    view = torch.stack([tensor, tensor], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)[..., 0]
    assert not view.is_contiguous()
    return view


def test_strided_views_are_as_contiguous_copies() -> None:
    """CASES.md 12."""
    arguments = inputs(5, batch=2, heads=2)
    plain = run(arguments, "triton")
    viewed = run({name: strided(tensor) for name, tensor in arguments.items()}, "triton")
    assert all(torch.equal(plain[name], viewed[name]) for name in plain)


def test_expanded_inputs_and_gradients() -> None:
    """CASES.md 12: `o.sum().backward()`, which says nothing of the last state; v is one number."""
    arguments = inputs(17)
    gradients = []
    for backend in ("triton", "reference"):
        v = torch.ones((), device=DEVICE, requires_grad=True)
        delta_rule(**{**arguments, "v": v.expand(arguments["v"].shape)}, backend=backend)[0].sum().backward()
        gradients.append(v.grad)
    torch.testing.assert_close(*gradients)


def test_one_argument_asks_for_a_gradient_through_one_output() -> None:
    arguments = inputs(3, steps=2)
    for wanted, tensor in arguments.items():
        gradients = []
        for backend in ("triton", "reference"):
            leaf = tensor.detach().requires_grad_()
            results = delta_rule(**{**arguments, wanted: leaf}, backend=backend)
            results[0 if wanted == "q" else 1].square().sum().backward()  # the last state knows nothing of q
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("parts", [[64, 66], [1, 129]], ids=str)
def test_carrying_the_state(parts: list[int]) -> None:
    """CASES.md 17."""
    arguments = inputs(130)
    (whole, last), state, pieces = delta_rule(**arguments, backend="triton"), arguments.pop("state"), []
    for timed in zip(*(tensor.split(parts, 1) for tensor in arguments.values()), strict=True):
        o, state = delta_rule(**dict(zip(arguments, timed, strict=True)), state=state, backend="triton")
        pieces.append(o)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-5, atol=1e-5)


def test_autocast_and_mixed_types() -> None:
    """CASES.md 14: float32 q and k beside bfloat16 v, as under autocast, which itself changes nothing."""
    arguments = inputs(17, torch.bfloat16)
    plain = run(arguments, "triton")
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(arguments, "triton")
    assert all(torch.equal(found[name], plain[name]) for name in found)
    check({**arguments, "q": arguments["q"].float(), "k": arguments["k"].float()})
    check({name: tensor.float() for name, tensor in arguments.items()}, tolerance=1e-6)


def test_differentiated_twice_is_refused() -> None:
    q = (arguments := inputs(2))["q"].requires_grad_()
    loss = delta_rule(**arguments, backend="triton")[0].square().sum()
    (gradient,) = torch.autograd.grad(loss, q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {"householder_steps": 1, "expand_v": 2.0, "negative_eigenvalues": False, "decay": True},
        {"householder_steps": 2, "expand_v": 1.0, "negative_eigenvalues": True, "decay": False},
    ],
    ids=["gdn", "deltaproduct"],
)
def test_models(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and the gradient of every weight as with the backend that `auto` chooses."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 6, "layers": 1, "heads": 2, "head_size": None, "conv_width": 4}
    model = delta_net.delta_product(7, **sizes, **options, delta_range=(1e-3, 1e-1), dropout=0.0).to(DEVICE)
    tokens = torch.randint(7, (2, 18), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    results = []
    for backend in ("cpu" if DEVICE == "cpu" else "reference", "triton"):
        used: list[str] = []

        def chosen(*arguments: Any, to: str = backend, used: list[str] = used) -> tuple[Tensor, Tensor]:
            used.append(to)
            q, k, v, beta, log_decay, state = arguments
            return delta_rule(q, k, v, beta, log_decay, state, to)

        with monkeypatch.context() as patch:
            patch.setattr(delta_net, "delta_rule", chosen)
            logits = model(tokens).logits
        assert used == [backend]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        results.append([logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no time for 2^31 numbers")
def test_offsets_above_31_bits() -> None:
    """CASES.md 13: the last of so many sequences that k passes 2^31 numbers."""
    batch = 2**19 + 1
    k = torch.zeros(batch, 16, 1, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    k[-1] = functional.normalize(random(16, 1, 2, 128), dim=-1).to(k)
    q, v = k[:, :, 0], k[..., :16].contiguous()
    beta = torch.ones(batch, 16, 1, 2, device=DEVICE)
    o = delta_rule(q, k, v, beta, backend="triton")[0][-1:]
    expected, _ = delta_rule(q[-1:].float(), k[-1:].float(), v[-1:].float(), beta[-1:], backend="reference")
    torch.testing.assert_close(o.float(), expected, rtol=2e-2, atol=2e-2)
