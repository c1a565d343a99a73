"""Triton's kernels compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fpexp.bench import kernels
from fpexp.bench.context import Context, child_environment
from fpexp.errors import UserError

NO_REGISTER_FREE = ("diagonal_scan backward, bfloat16", "selective_scan backward, bfloat16")
"""Ten registers spill on one GPU or another."""


def test_kernels_fit_a_gpu(tmp_path: Path) -> None:
    """Without a spill, at scales that differ in their kernels. In a child: the interpreter has no kernels."""
    pytest.importorskip("triton")
    environment = child_environment()
    environment.pop("TRITON_INTERPRET", None)
    words = ["bench", "kernels", "scales=[cpu,long]", f"results_dir={tmp_path}"]
    child = subprocess.run(
        [sys.executable, "-m", "fpexp", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-3000:]
    (file,) = Path(tmp_path, "bench").iterdir()
    rows = json.loads(file.read_text())["contenders"]
    assert {row["contender"].split()[0] for row in rows} == set(kernels.OPS)
    assert len(rows) == 3 * 2 * ((2 + 2 + 8) + (6 + 6 + 8))
    for row in rows:
        numbers = row["numbers"]
        most = 40 if row["contender"] in NO_REGISTER_FREE else 0
        assert numbers["spilled_bytes"] <= most, row
        assert 0 < numbers["registers"] <= 255


def test_an_interpreter_has_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = list(kernels.contenders(kernels.Sizes(), Context("", 1, tmp_path)))
    assert len(found) == 5 * 3 * 2 * 3
    assert all("TRITON_INTERPRET is set" in contender.missing for contender in found)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (kernels.Sizes(compile_only=False), "not timed yet"),
        (kernels.Sizes(scales=["papr"]), "unknown 'papr'; did you mean 'paper'"),
        (kernels.Sizes(dtypes=["int8"]), "float32, bfloat16"),
        (kernels.Sizes(architectures=[70]), r"architectures: unknown '70'.*\(80, 86, 89, 90, 100, 120\)"),
    ],
)
def test_mistakes(sizes: kernels.Sizes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        list(kernels.contenders(sizes, Context("", 1, tmp_path)))
