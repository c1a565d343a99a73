"""What a benchmark prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fpexp.bench import record
from fpexp.bench.measure import Check, Contender, Row, Target
from fpexp.errors import UserError

ROWS = [
    Row(
        Contender("ours", "length 4", lambda: 0.0, target=Target("ratio", at_most=3.0), baseline="torch"),
        (0.002, 0.001, 0.003),
        2.0,
        (Check("error", 1e-6, 1e-4),),
        {"iterations_max": 7, "share": 0.25},
    ),
    Row(Contender("peer", "length 4", lambda: 0.0, baseline="torch", missing="not installed: pip install it")),
    Row(Contender("alone", "length 8", lambda: 0.0), (2.5,)),
]

KEYS = {
    "group", "contender", "missing", "repeats", "median_s", "quartiles_s", "seconds", "baseline", "ratio", "target",
    "met", "checks", "numbers",
}  # fmt: skip


def test_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000" if form == "%Y%m%d-%H%M%S" else "now")
    folder = record.make_folder(str(tmp_path / "results"))
    paths = [record.write(folder, "ops/scan", ROWS, {"repeats": 3}, {"commit": None}) for _ in range(2)]
    assert [path.name for path in paths] == ["ops-scan-20260101-000000.json", "ops-scan-20260101-000000-2.json"]
    assert paths[0].parent == tmp_path / "results" / "bench"
    written = json.loads(paths[0].read_text())
    assert list(written) == ["benchmark", "time", "settings", "environment", "contenders"]
    assert (written["benchmark"], written["settings"], written["environment"]) == (
        "ops/scan", {"repeats": 3}, {"commit": None}
    )  # fmt: skip
    ours, peer, alone = written["contenders"]
    assert set(ours) == set(peer) == set(alone) == KEYS
    assert ours == {
        "group": "length 4",
        "contender": "ours",
        "missing": None,
        "repeats": 3,
        "median_s": 0.002,
        "quartiles_s": [0.0015, 0.0025],
        "seconds": [0.002, 0.001, 0.003],
        "baseline": "torch",
        "ratio": 2.0,
        "target": {"number": "ratio", "at_most": 3.0, "at_least": None},
        "met": True,
        "checks": [{"what": "error", "value": 1e-6, "limit": 1e-4}],
        "numbers": {"iterations_max": 7, "share": 0.25},
    }
    assert (peer["missing"], peer["repeats"], peer["median_s"]) == ("not installed: pip install it", 0, None)


def test_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    record.show("scan", ROWS)
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells == [
        ["scan: length 4"],
        ["contender", "median", "quartiles", "rounds", "ratio", "target", "met", "iterations max", "share"],
        ["ours", "2 ms", "1.5 ms to 2.5 ms", "3", "2.00x torch", "<= 3x", "yes", "7", "0.25"],
        ["peer", *"------", "-", "-", "not installed: pip install it"],
        ["scan: length 8"],
        ["contender", "median", "quartiles", "rounds"],
        ["alone", "2.50 s", "2.50 s to 2.50 s", "1"],
    ]


def test_a_time_that_is_taken_once_has_no_quartiles(capsys: pytest.CaptureFixture[str]) -> None:
    record.show("", [Row(Contender("start", "", lambda: 0.0, once=True), (0.5,), numbers={"files": 96})])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["contender", "median", "files"], ["start", "500", "ms", "96"]
    ]  # fmt: skip


def test_what_is_not_timed_has_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    record.show("", [Row(Contender("kernel", ""), numbers={"registers": 96, "compile_seconds": 0.5})])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["contender", "registers", "compile", "seconds"], ["kernel", "96", "0.5"]
    ]  # fmt: skip


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to results_dir="):
        record.make_folder(str(tmp_path / "file"))
