"""The adapters of the published packages compute what our reference does, and may be missing."""

from __future__ import annotations

import sys

import pytest
import torch

from fpexp.bench import selective_scan as bench
from fpexp.bench.context import NOT_INSTALLED, Context
from fpexp.bench.differentiated import forward_backward
from fpexp.ops.backend import choose


@pytest.mark.parametrize("peer", ["cpu", "mambapy", "transformers"])
@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_every_scan_is_the_reference(peer: str, length: int) -> None:
    pytest.importorskip({"cpu": "numba"}.get(peer, peer))
    case = bench.make_case(2, length, 6, 3)
    ours = forward_backward(bench.SCANS[peer](), case)
    expected = forward_backward(bench.reference(), case)
    assert len(ours) == 7
    for value, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)


def test_inputs_are_the_same_every_time_and_ask_for_gradients() -> None:
    first, again = bench.make_case(2, 3, 4, 5), bench.make_case(2, 3, 4, 5)
    tensors = list(first.inputs.values())
    assert all(map(torch.equal, [*tensors, first.grad_y], [*again.inputs.values(), again.grad_y]))
    assert [tuple(tensor.shape) for tensor in tensors] == [(2, 3, 4), (2, 3, 4), (4, 5), (2, 3, 5), (2, 3, 5), (4,)]
    assert all(tensor.requires_grad for tensor in tensors)
    assert not torch.equal(first.inputs["x"].detach(), first.grad_y)


@pytest.mark.parametrize(
    ("module", "name"), [("mambapy", "mambapy"), ("transformers", "transformers"), ("numba", "cpu")]
)
def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: object, module: str, name: str) -> None:
    for loaded in [key for key in sys.modules if key.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    if name == "cpu":
        monkeypatch.setattr("fpexp.ops.backend._missing", lambda op, backend: "needs numba; pip install numba")
        choose.cache_clear()
    sizes = bench.Sizes(batch_size=1, length=2, width=3, state_size=2)
    rows = {c.name: c for c in bench.contenders(sizes, Context("results", 1, tmp_path))}  # type: ignore[arg-type]
    choose.cache_clear()
    assert "pip install" in rows[name].missing
    assert (rows[name].missing == NOT_INSTALLED) == (name != "cpu")
    assert not rows["reference"].missing
