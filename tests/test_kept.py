"""What the repository keeps is found wherever one works, and whatever results_dir is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from recorded import SMALL, record, small
from runs import CommandLine

from fpexp.kept import kept, places

ROOT = Path(__file__).resolve().parent.parent


def test_it_is_the_repository_s_where_a_results_folder_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("paper", "reference"):
        assert kept(name, "results") == ROOT / "results" / name
        assert kept(name, "results").is_dir()
        (tmp_path / "own" / name).mkdir(parents=True)
        assert kept(name, "own") == Path("own") / name


@pytest.fixture
def repository(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that keeps one run and what the paper says of it."""
    folder = cli.folder / "repository" / "results"
    record(folder, "kept-run", small("experiment=demo_a4", "model=lstm"), place="reference/runs")
    (folder / "paper").mkdir()
    (folder / "paper/demo_a4.yaml").write_text("rows: [{label: LSTM, when: {model: lstm}, value: 0.125}]")
    monkeypatch.setattr("fpexp.kept.repository_results", lambda: folder)
    return folder


@pytest.mark.parametrize("results_dir", ["results", "elsewhere"])
def test_report_and_sweep_find_it(cli: CommandLine, repository: Path, results_dir: str) -> None:
    words = ["experiment=demo_a4", *SMALL, f"results_dir={results_dir}"]
    assert cli("report", *words).code == 0
    (row,) = [x for x in Path(results_dir, "report/report.md").read_text().splitlines() if x.startswith("| LSTM |")]
    assert "0.900" in row
    assert "0.125" in row
    assert "2 jobs: 1 missing, 1 recorded" in cli("sweep", "status", *words).out
    assert "2 jobs: 2 missing" in cli("sweep", "status", *words, "sweep.recorded=null").out
    shutil.move(repository / "reference", "moved")
    assert "2 jobs: 2 missing" in cli("sweep", "status", *words).out
    assert "2 jobs: 1 missing, 1 recorded" in cli("sweep", "status", *words, "sweep.recorded=moved").out


def test_what_is_kept_counts_once_where_it_is_the_results_folder_itself(cli: CommandLine, repository: Path) -> None:
    assert list(places("runs", repository)) == ["runs", "reference/runs"]
    assert list(places("bench", repository / "reference")) == ["bench"]
    words = ["experiment=demo_a4", *SMALL, f"results_dir={repository / 'reference'}", "out=report"]
    assert cli("report", *words).code == 0
    text = Path("report/report.md").read_text()
    assert "kept-run" in text
    assert "Recorded more than once" not in text
