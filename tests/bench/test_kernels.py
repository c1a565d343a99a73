"""Triton's kernels compile for GPUs that are not here, and fit them."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fpexp
from fpexp.bench import kernels, roofline
from fpexp.bench.compiling import Code, Compiled, compile_all
from fpexp.bench.context import Context, child_environment
from fpexp.bench.launches import KERNELS, SCALES, Shape
from fpexp.errors import UserError


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """`fpexp bench kernels` for one scale, type and architecture, which compiles every kernel once.

    In a process of its own: the interpreter has no kernels. `make bench` does all of them.
    """
    pytest.importorskip("triton")
    environment = child_environment()
    environment.pop("TRITON_INTERPRET", None)
    results = tmp_path_factory.mktemp("results")
    words = ["scales=[gpu]", "dtypes=[bfloat16]", "architectures=[90]", f"results_dir={results}"]
    command = [sys.executable, "-m", "fpexp", "bench", "kernels", "--compile-only", *words]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-3000:]
    (file,) = (results / "bench").iterdir()
    found: list[dict[str, Any]] = json.loads(file.read_text())["contenders"]
    return found


def named(row: dict[str, Any]) -> str:
    return f"{row['contender']}, {row['group']}"


def test_every_kernel_compiles_and_fits(rows: list[dict[str, Any]]) -> None:
    assert {row["contender"].split()[0] for row in rows} == set(KERNELS)
    assert not {named(row): row["missing"] for row in rows if row["missing"]}
    assert all(0 < row["numbers"]["registers"] <= 255 for row in rows)


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    assert not {named(row): row["numbers"].get("spilled_bytes") for row in rows if not row["met"]}


def test_rows_for_hopper_have_floors(rows: list[dict[str, Any]]) -> None:
    told = {"megabytes", "gigaoperations", "floor_us", "bound_by"}
    assert all(told <= row["numbers"].keys() for row in rows)
    (numbers,) = [row["numbers"] for row in rows if row["contender"] == "diagonal_scan forward, bfloat16"]
    assert numbers["megabytes"] == pytest.approx(512 * 64 * (2 * 3 * 1024 + 4) / 1e6)
    assert numbers["floor_us"] == pytest.approx(numbers["megabytes"] / 4.3)
    assert numbers["floor_us"] < numbers["predicted_us_low"] < numbers["predicted_us_high"]


@pytest.mark.parametrize("name", KERNELS)
def test_every_launch_is_counted(name: str) -> None:
    """In the interpreter too: launches are not run."""
    launches = {
        launch: made
        for shape in SCALES.values()
        for launch, made in KERNELS[name].launches(shape, torch.bfloat16).items()
    }
    assert set(launches) <= set(roofline.COUNTS[name])
    for launch, made in launches.items():
        work = roofline.work_of(name, launch, made)
        assert work.bytes > 0
        assert work.operations > 0
        floor, _ = roofline.floor_of(name, launch, made)
        predicted = roofline.predict(name, launch, made)
        assert predicted is not None
        assert floor < predicted[0] < predicted[1]


@pytest.mark.parametrize("name", KERNELS)
def test_products_of_float32_keep_its_digits(name: str) -> None:
    """CASES.md 14: one pass of TF32, which is Triton's own choice for float32, has three digits."""
    for launch in KERNELS[name].launches(SCALES["cpu"], torch.float32).values():
        given = {launch.arguments.get(word, "ieee") for word in ("PRECISION", "SQUARE", "INVERSE")}
        assert given <= {"ieee", "tf32x3"}, launch.kernel


def test_no_product_is_left_to_triton() -> None:
    """CASES.md 14: each says its precision."""
    found = [
        call
        for file in (Path(fpexp.__file__).parent / "ops").rglob("triton.py")
        for call in ast.walk(ast.parse(file.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "tl.dot"
    ]
    assert found
    assert all("input_precision" in {keyword.arg for keyword in call.keywords} for call in found)


def test_predictions_are_of_what_is_counted() -> None:
    for name, expected in roofline.PREDICTIONS.items():
        assert set(expected) <= set(roofline.COUNTS[name])


def test_floors_by_hand() -> None:
    """B 8, T 2048, d 1536, N 16: what the docstrings of the modules say."""
    shape = Shape(8, 2048, 1536, 16)
    scan = KERNELS["diagonal_scan"].launches(shape, torch.float32)["forward"]
    seconds, resource = roofline.floor_of("diagonal_scan", "forward", scan)
    assert (seconds, resource) == (pytest.approx(70e-6, rel=0.01), "memory")
    scan = KERNELS["selective_scan"].launches(shape, torch.float32)["backward"]
    seconds, resource = roofline.floor_of("selective_scan", "backward", scan)
    assert (seconds, resource) == (pytest.approx(560e-6, rel=0.01), "shuffles")


def test_a_precision_costs_passes() -> None:
    work = roofline.Work(bytes=0, products=790e12)
    assert work.floor("bf16") == (1.0, "tensor cores")
    assert work.floor("tf32x3") == (6.0, "tensor cores")


def test_the_same_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Code] = []

    def compiled(codes: list[Code], processes: int) -> dict[Code, Compiled]:
        asked.extend(codes)
        return {code: Compiled(float(code.architecture), None) for code in codes}

    monkeypatch.setattr("fpexp.bench.compiling._in_processes", compiled)
    codes = [Code("ssd", "pass", SCALES[scale], "float32", sm) for scale in ("gpu", "paper") for sm in (80, 90)]
    found = compile_all(dict.fromkeys(codes, "the same"), processes=1)
    assert asked == codes[:2]
    assert [found[code].seconds for code in codes] == [80.0, 90.0, 80.0, 90.0]


def test_a_kernel_that_does_not_fit_or_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage:
        registers, shared, spilled = 32, 170_000, 0

    found = iter([Compiled(1.0, Usage()), Compiled(1.0, None, "does not compile: no")])
    monkeypatch.setattr(kernels, "why_not_compiled", lambda: "")
    monkeypatch.setattr(kernels, "KERNELS", {"diagonal_scan": KERNELS["diagonal_scan"]})
    monkeypatch.setattr(kernels, "compile_all", lambda codes, processes: {code: next(found) for code in codes})
    monkeypatch.setattr("fpexp.ops.launch.triton.Launch.key", "")
    sizes = kernels.Sizes(scales=["cpu"], dtypes=["float32"], architectures=[80])
    forward, backward = kernels.contenders(sizes, Context("", 1, tmp_path))
    assert forward.missing == "does not fit: 170000 bytes of shared memory, of 166912"
    assert set(forward.numbers()) == {"registers", "shared_bytes", "spilled_bytes", "compile_seconds"}
    assert backward.missing == "does not compile: no"


def test_an_interpreter_has_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = list(kernels.contenders(kernels.Sizes(), Context("", 1, tmp_path)))
    assert len(found) == len(SCALES) * 3 * 2 * len(KERNELS)
    assert all("TRITON_INTERPRET is set" in contender.missing for contender in found)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (kernels.Sizes(compile_only=False), r"timed by scripts/gpu_check.sh; use --compile-only"),
        (kernels.Sizes(scales=["papr"]), "unknown 'papr'; did you mean 'paper'"),
        (kernels.Sizes(dtypes=["int8"]), "float32, bfloat16"),
        (kernels.Sizes(architectures=[70]), r"architectures: unknown '70'.*\(80, 86, 89, 90, 100, 120\)"),
    ],
)
def test_mistakes(sizes: kernels.Sizes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        list(kernels.contenders(sizes, Context("", 1, tmp_path)))
