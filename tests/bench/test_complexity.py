"""Table 2 at sizes that say nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from fpexp.bench import complexity
from fpexp.bench.context import Context
from fpexp.bench.measure import Rounds, measure
from fpexp.errors import UserError
from fpexp.ops.backend import only_reference


def test_every_model_at_every_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def peak(prepare: object, **arguments: object) -> int:
        asked.append(arguments["length"])
        return 2_000_000

    monkeypatch.setattr(complexity, "peak_extra", peak)
    sizes = complexity.Sizes(lengths=[2, 4, 8], batch_size=2)
    with only_reference():  # kernels would be compiled for a minute
        rows = measure(list(complexity.contenders(sizes, Context(str(tmp_path), 1, tmp_path))), Rounds(1, 0, 60.0))
    models = ["mamba", *(f"{name}, l_max {cap}" for name in ("fp_mamba_h", "fp_mamba_k") for cap in (2, 8))]
    groups = [f"{model}, {which}, batch 2" for model in models for which in ("forward", "backward")]
    assert list(dict.fromkeys(row.contender.group for row in rows)) == groups
    assert [row.contender.name for row in rows] == 10 * ["length 2", "length 4", "length 8"]
    assert [bool(row.checks) for row in rows] == 10 * [True, False, False]
    assert [row.ratio is None for row in rows] == 10 * [True, False, False]
    assert [dict(row.numbers) for row in rows] == 5 * [*3 * [{}], {"peak_MB": 2.0}, {}, {"peak_MB": 2.0}]
    assert asked == 5 * [2, 8]


def test_lengths_double(tmp_path: Path) -> None:
    sizes = complexity.Sizes(lengths=[2, 4, 6])
    with pytest.raises(UserError, match=r"lengths=\[2, 4, 6\] must double: 6 is not twice 4"):
        list(complexity.contenders(sizes, Context(str(tmp_path), 1, tmp_path)))
