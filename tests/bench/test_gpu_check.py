"""`scripts/gpu_check.sh`: every part at tiny sizes on the CPU, what a faulty one leaves, and what it needs."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_part
import pytest
import torch

import fpexp
from fpexp.bench.device import correctness, peers, solves, subjects
from fpexp.bench.device.__main__ import PARTS, main, show, verdict
from fpexp.bench.device.part import Finding, Setup
from fpexp.bench.device.runner import Part, run_parts
from fpexp.bench.launches import KERNELS
from fpexp.errors import FpexpError, UserError
from fpexp.ops.backend import only_reference

ROOT = Path(fpexp.__file__).parent.parent
TINY = Setup("cpu", rehearse=True)


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child finds what lies beside the tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))


@pytest.fixture(scope="module")
def found() -> dict[str, list[Finding]]:
    """What every part finds at tiny sizes, in this process."""
    with only_reference():
        rooms = {part.name: importlib.import_module(part.module).items(TINY) for part in PARTS}
        return {name: [finding for item in items.values() for finding in item()] for name, items in rooms.items()}


def test_every_part_does_its_work(found: dict[str, list[Finding]]) -> None:
    assert {finding.what for finding in found["versions"]} >= {"device", "torch", "triton", "numba"}
    for name in ("correctness", "offsets"):
        assert all(finding.good for finding in found[name]), found[name]
    for name, kernels in KERNELS.items():
        parts = ["compile", "kernels", *(["correctness"] if kernels.op in name or name == "delta_product" else [])]
        for part in parts:
            assert any(finding.what.startswith(name) for finding in found[part]), f"{part}: {name}"
    for name in subjects.FIXED_POINTS:
        for way in solves.FUSED:
            assert f"{name}, {way}" in {finding.what for finding in found["correctness"]}
    assert {finding.what.partition(",")[0] for finding in found["training"]} == {
        *subjects.FIXED_POINTS, *subjects.BASELINES
    }  # fmt: skip
    assert all(finding.numbers["steps_per_second"] > 0 for finding in found["training"])
    for name in subjects.FIXED_POINTS:
        ways = {finding.what.rpartition(", ")[2] for finding in found["solves"] if finding.what.startswith(name)}
        assert ways >= set(solves.WAYS)
    assert found["learning"][0].numbers["steps"] == 2


def test_the_script(tmp_path: Path) -> None:
    """From another folder, without an environment."""
    file = tmp_path / "new" / "check.json"
    command = [str(ROOT / "scripts" / "gpu_check.sh"), str(file), "parts=versions,offsets", "--rehearse"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    written = json.loads(file.read_text())
    assert written["rehearsal"]
    assert {row["part"] for row in written["rows"]} == {"versions", "offsets"}
    assert not [row for row in written["rows"] if row["error"]]
    table = done.stdout[done.stdout.index("part  ") :]
    checks = sum(row["good"] is not None for row in written["rows"])
    assert table.splitlines()[-2:] == [f"rows: {file}", f"all {checks} checks passed"]
    assert "Warning" not in done.stderr
    assert all(row["what"] in table for row in written["rows"])


def test_a_faulty_part_leaves_the_others(importable: None, capsys: pytest.CaptureFixture[str]) -> None:
    """What raises, crashes or hangs is named, and what comes after it is done."""
    parts = [
        Part("faulty", faulty_part.__name__, limit=100, item_limit=2),
        Part("absent", "no.such.part", limit=60),
    ]
    told: list[str] = []
    rows = run_parts(parts, 200, rehearse=True, after=lambda part, rows: told.append(part.name))
    assert told == ["faulty", "absent"]
    said = {(row["part"], row["item"]): row["error"] for row in rows}
    assert said == {
        ("faulty", "good"): "",
        ("faulty", "raises"): "ValueError: a wrong number",
        ("faulty", "crashes"): "ended by SIGSEGV",
        ("faulty", "hangs"): "stopped after 2 s",
        ("faulty", "after"): "",
        ("faulty", "last"): "stopped after 2 s",
        ("absent", ""): "ModuleNotFoundError: No module named 'no'",
    }
    assert verdict(rows) == (
        "5 of 5 checks failed: faulty: raises; faulty: crashes; faulty: hangs; faulty: last; absent"
    )
    good = {"part": "offsets", "what": "x", "good": True}
    assert verdict([good, good, {**good, "good": None}]) == "all 2 checks passed"
    assert verdict([{**good, "good": None}]) == "nothing to check in these parts"
    show(rows)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "hangs" in line]
    assert line.split() == ["faulty", "hangs", "stopped", "after", "2", "s", "BAD"]


def test_time_that_is_over_is_told_of_what_is_left(importable: None) -> None:
    part = Part("faulty", f"{faulty_part.__name__}", limit=6, item_limit=60)
    rows = run_parts([part], 4, rehearse=True, after=lambda part, rows: None)
    said = {row["item"]: row["error"] for row in rows}
    assert said.get("last", "not tried: the part's time was over") == "not tried: the part's time was over"
    assert "stopped: the part's time was over" in said.values()


@pytest.mark.parametrize("name", correctness.cases(TINY))
def test_a_wrong_gradient_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = correctness.cases(TINY)[name]
    right = correctness.results

    def wrong(op: Any, inputs: Any, backend: str, letters: Any) -> dict[str, torch.Tensor]:
        found = right(op, inputs, "reference", letters)
        last = list(found)[-1]
        return found if backend == "reference" else found | {last: found[last] * (1 + 1e-3)}

    monkeypatch.setattr(correctness, "results", wrong)
    (finding,) = correctness._check(name, case, torch.float32, TINY)
    assert finding.good is False
    monkeypatch.setattr(correctness, "results", lambda *words: {"y": torch.tensor([float("nan")])})
    (finding,) = correctness._check(name, case, torch.float32, TINY)
    assert finding.good is False


def test_gradients_of_the_delta_rule_are_looked_at_by_their_names() -> None:
    """CASES.md 16, at the sizes of a GPU."""
    names = [name for name in correctness.cases(Setup("cuda", rehearse=False)) if name.startswith("delta_rule")]
    assert names == [f"delta_rule, heads of {size}" for size in (64, 100, 128)]
    (finding,) = correctness.items(TINY)["delta_rule, heads of 4, float32"]()
    assert set(finding.numbers) >= {"dq", "dk", "dv", "dbeta", "dg"}


def test_subjects_are_what_conf_composes_to() -> None:
    assert json.loads(subjects.FILE.read_text()) == subjects.resolve()
    assert subjects.read("fp_mamba_h").choices.scale == "gpu"


def test_a_broken_file_of_subjects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "FILE", tmp_path / "subjects.json")
    for text in ("", "{}", '{"lstm": {"task": 1}}'):
        subjects.FILE.write_text(text)
        with pytest.raises(FpexpError, match=r"subjects.json: .*python -m fpexp.bench.device.subjects"):
            subjects.read("lstm")


def test_a_package_that_is_wrong_or_fails_is_not_timed() -> None:
    inputs = {"x": torch.ones(1, 2, 3, requires_grad=True)}
    y = inputs["x"].detach()
    ours = 2.0
    same, other = (peers._of_peer("peer", lambda f=f: f, inputs, y, ours, TINY) for f in (lambda x: x, lambda x: 2 * x))
    assert same.numbers["ms"] > 0
    assert other.found == "differs from ours by 1, so not timed"
    failed = peers._of_peer("peer", lambda: lambda x: x.no, inputs, y, ours, TINY)
    assert failed.found.startswith("failed: AttributeError")


def test_the_fastest_way_at_each_length() -> None:
    times = {("sequential", 16): 1.6, ("parallel", 16): 2.0, ("sequential", 64): 6.4, ("parallel", 64): 3.0}
    fastest, tokens = solves.crossover("H", times, {16: 10, 64: 20})
    assert fastest.found == "sequential at 16, parallel at 64"
    assert tokens.found == "2 at 16, 1.5 at 64"
    (fastest,) = solves.crossover("H", {("picard", 16): 1.0}, {})
    assert fastest.found == "picard at 16"


def test_parts_fit_in_eight_minutes() -> None:
    assert sum(part.limit for part in PARTS) <= 480
    assert all(part.item_limit <= part.limit for part in PARTS)


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"unknown part 'solve'; did you mean 'solves'\? \(versions, correctness,"):
        main(["parts=solve"])
    for words in (["--rehearsal"], ["a.json", "b.json"], ["part=solves"]):
        with pytest.raises(UserError, match=r"cannot read .*usage: scripts/gpu_check.sh"):
            main(words)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"there is no GPU here; --rehearse"):
        main([])
    assert not list(tmp_path.iterdir())


def test_it_needs_torch_alone() -> None:
    """No part imports what a machine with a GPU may lack, nor does building what is timed."""
    modules = [part.module for part in PARTS]
    code = f"""
import importlib, sys
absent = "hydra omegaconf rich wandb datasets matplotlib yaml pyarrow tokenizers safetensors"
for name in absent.split():
    sys.modules[name] = None
import fpexp.bench.device.__main__, fpexp.bench.device.child
from fpexp.bench.device import subjects
from fpexp.bench.device.part import Finding, Setup
for name in {modules!r}:
    assert importlib.import_module(name).items(Setup("cpu", True))
for name in subjects.SUBJECTS:
    subjects.make(name, "cpu", rehearse=True)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
