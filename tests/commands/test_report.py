"""`fpexp report`: what it makes of recorded runs, of none, and of what is broken."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from recorded import SMALL, curve_row, metrics_rows, record, small, write_rows
from runs import Answer, CommandLine, finish, wait_for

from fpexp.config.catalogue import choices
from fpexp.config.compose import compose, compose_jobs

GRID = "experiment=demo_a4"  # fp_mamba_k and lstm
RESULTS = Path("results")


@pytest.fixture
def report(cli: CommandLine) -> CommandLine:
    """`fpexp report experiment=demo_a4` at the size of SMALL, with further words."""

    class Report(CommandLine):
        def __call__(self, *words: str) -> Answer:
            answer = cli("report", GRID, *SMALL, *words)
            assert "Traceback" not in answer.out + answer.err
            return answer

    return Report(cli.capsys, cli.folder)


def text(folder: Path = RESULTS / "report") -> str:
    """report.md without what keeps Markdown from reading it."""
    return re.sub(r"\\(.)", r"\1", (folder / "report.md").read_text())


def row_of(setting: str) -> list[str]:
    """The cells of a setting in the first table that has it."""
    line = next(line for line in text().splitlines() if line.startswith(f"| {setting} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def lstm(seed: int = 0, *words: str) -> object:
    return small(GRID, "model=lstm", f"seed={seed}", *words)


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_no_runs_at_all(report: CommandLine) -> None:
    answer = report()
    assert answer.code == 0
    assert "no runs under results/runs or results/reference/runs yet" in answer.out
    assert "0 of 2" in answer.out
    assert "| setting |" not in text()  # no rows of dashes
    assert not list((RESULTS / "report/figures").iterdir())


def test_what_is_missing_is_listed_with_a_command_that_makes_it(report: CommandLine) -> None:
    record(RESULTS, "one", lstm())
    report()
    (line,) = [line for line in text().splitlines() if line.startswith("fpexp train experiment")]
    _, command, *words = shlex.split(line)
    assert command == "train"
    config = compose(words)
    assert config.choices.model == "fp_mamba_k"
    assert config.fingerprint() == compose([GRID, *SMALL, "model=fp_mamba_k"]).fingerprint()
    assert "`fpexp train -m experiment=demo_a4 " in text()


def test_mean_and_spread_over_seeds_of_the_same_config(report: CommandLine) -> None:
    for seed, accuracy in enumerate((0.5, 0.7, 0.9)):
        record(RESULTS, f"seed{seed}", lstm(seed, "threads=1"), (1.0, accuracy, 0.5, 0.1))
    record(RESULTS, "other", lstm(0, "training.lr=0.5"), (0.0, 0.0, 0.0, 0.0))
    report()
    assert row_of("LSTM")[:5] == ["LSTM", "3", "0.700 ± 0.200", "0.500 ± 0.000", "0.100 ± 0.000"]
    assert row_of("LSTM")[5:] == ["3.0 ± 0.0", "4", "6", "2 min", "1,234", "cpu", "cpu"]
    rows = list(csv.DictReader((RESULTS / "report/csv/demo_a4.csv").open()))
    (found,) = [row for row in rows if row["setting"] == "LSTM"]
    assert (found["n_seeds"], found["asked_seeds"], found["runs"]) == ("3", "1", "seed0 seed1 seed2")
    numbers = {"token_accuracy_4_mean": 0.7, "token_accuracy_4_std": 0.2, "iterations_mean": 3, "training_length": 4}
    numbers |= {"training_seconds_mean": 90, "training_seconds_std": 0, "steps_mean": 6, "parameters_mean": 1234}
    assert {name: float(found[name]) for name in numbers} == pytest.approx(numbers)
    curves = list(csv.DictReader((RESULTS / "report/csv/demo_a4_curves.csv").open()))
    (point,) = [row for row in curves if (row["metric"], row["length"]) == ("token_accuracy", "4")]
    assert (float(point["mean"]), point["n"], point["runs"]) == (pytest.approx(0.7), "3", "seed0 seed1 seed2")
    runs = list(csv.DictReader((RESULTS / "report/csv/demo_a4_runs.csv").open()))
    assert [(row["run"], row["seed"], row["token_accuracy_4"], row["training_seconds"]) for row in runs] == [
        (f"seed{seed}", str(seed), str(accuracy), "90.0") for seed, accuracy in enumerate((0.5, 0.7, 0.9))
    ]


def test_runs_of_other_seeds_than_are_asked_for_are_counted(report: CommandLine) -> None:
    for seed in (1, 2, 3):
        record(RESULTS, f"seed{seed}", lstm(seed))
    report()
    assert row_of("LSTM")[1] == "3 of 4"
    assert row_of("demo_a4")[-1] == "0 of 2"


def test_a_cell_of_a_csv_is_a_number_or_a_name(report: CommandLine) -> None:
    """Thousands are not set apart, units stand in the names of columns, and nothing is said with ± or 'of'."""
    for seed in range(2):
        record(RESULTS, f"seed{seed}", lstm(seed))
    report()
    names = {"setting", "run", "runs", "place", "scale", "device", "metric", "panel", "line", "x_is", "y_is"}
    files = sorted((RESULTS / "report/csv").iterdir())
    assert [file.stem for file in files] == ["demo_a4", "demo_a4_curves", "demo_a4_figure", "demo_a4_runs"]
    for file in files:
        for row in csv.DictReader(file.open()):
            assert all(math.isfinite(float(value)) for name, value in row.items() if value and name not in names), row


def test_solver_and_threads_mean_nothing_to_a_model_that_solves_no_fixed_point(report: CommandLine) -> None:
    record(RESULTS, "picard", lstm(0, "solver=picard"))
    record(RESULTS, "fp", small(GRID, "model=fp_mamba_k", "solver=picard"))
    report()
    assert row_of("LSTM")[1] == "1"
    assert row_of("FP-Mamba-K")[1] == "0 of 1"


def test_a_run_of_another_device_answers_the_same_job(report: CommandLine) -> None:
    config = lstm().replace(device="cuda:1", precision="bfloat16")  # type: ignore[attr-defined]
    record(RESULTS, "gpu", config)
    record(RESULTS, "strange", config.replace(precision="float32"), (0.0, 0.0, 0.0, 0.0))
    report()
    assert row_of("LSTM")[1:3] == ["1", "0.900"]
    assert row_of("LSTM")[-1] == "cuda"


def test_the_same_run_twice_counts_once_the_newest_finished_one(report: CommandLine) -> None:
    record(RESULTS, "new", lstm(), (1.0, 0.8, 0.0, 0.0), place="reference/runs", ended="2026-11-30T05:00:00+0000")
    record(RESULTS, "old", lstm(), (1.0, 0.2, 0.0, 0.0), ended="2026-11-30T06:00:00+0200")
    record(RESULTS, "newest", lstm(), state="failed", reason="no memory", ended="2026-11-30T09:00:00+0000")
    report()
    assert row_of("LSTM")[1:3] == ["1", "0.800"]
    remark = "LSTM, seed 0: reference/runs/new counts, as the newest finished run of this config; not "
    assert remark + "runs/old (finished), runs/newest (failed)" in text()


@pytest.mark.parametrize(
    ("state", "said", "command"),
    [
        ("failed", "failed: it blew up", "fpexp train experiment=demo_a4"),
        ("interrupted", "interrupted", "fpexp train resume=run"),
        ("running", "lost", "fpexp train resume=run"),
    ],
)
def test_a_run_that_did_not_end_is_listed_as_such(report: CommandLine, state: str, said: str, command: str) -> None:
    record(RESULTS, "run", lstm(), state=state, **({"reason": "it\nblew up"} if state == "failed" else {}))
    report()
    (line,) = [line for line in text().splitlines() if line.startswith("- runs/run")]
    assert line.startswith(f"- runs/run (LSTM, seed 0): {said}")
    assert command in line
    assert row_of("demo_a4")[-1] == "0 of 2"


def test_commands_name_the_results_that_they_are_of(cli: CommandLine) -> None:
    where = Path("my results")
    record(where, "stopped", lstm(), state="interrupted")
    assert cli("report", GRID, *SMALL, "results_dir=my results").code == 0
    found = text(where / "report")
    assert "`fpexp train 'results_dir=my results' resume=stopped`" in found
    (line,) = [line for line in found.splitlines() if line.startswith("fpexp train experiment")]
    assert "'results_dir=my results'" in line


@pytest.mark.parametrize("value", ["NaN", "1e999", str(10**400), '"x"'])
def test_a_value_that_is_no_number_is_left_out_and_said(report: CommandLine, value: str) -> None:
    record(RESULTS, "whole", lstm(0), (1.0, 0.8, 0.5, 0.5))
    run = record(RESULTS, "broken", lstm(1), (1.0, None, 0.5, 0.5))
    run.curve.write_text(run.curve.read_text().replace("null", value))
    answer = report()
    assert row_of("LSTM")[2] == "0.800 (n=1)"
    assert "warning: runs/broken: not a number at length 4, left out: token_accuracy" in answer.err


@pytest.mark.parametrize("place", ["runs", "reference/runs"])
def test_a_finished_run_with_a_damaged_curve_is_not_done(report: CommandLine, place: str) -> None:
    """It is listed with what mends it: measuring it anew, where it has weights, or else training."""
    run = record(RESULTS, "run", lstm(), place=place)
    (run.checkpoints / "step_6").mkdir(parents=True)
    run.curve.write_text(run.curve.read_text()[:-9])
    answer = report()
    assert f"warning: {place}/run: damaged: results/{place}/run/curve.jsonl lacks length 16" in answer.err
    assert row_of("demo_a4")[-1] == "0 of 2"
    (line,) = [line for line in text().splitlines() if line.startswith(f"- {place}/run (")]
    assert line.startswith(f"- {place}/run (LSTM, seed 0): damaged: results/{place}/run/curve.jsonl lacks length 16; ")
    command = "fpexp evaluate run=run" if place == "runs" else "fpexp train experiment=demo_a4"
    assert line.partition("; ")[2].startswith(f"`{command}")


def test_a_curve_that_was_measured_anew_takes_the_place_of_a_damaged_one(report: CommandLine) -> None:
    run = record(RESULTS, "run", lstm())
    for name, asked, accuracy in (("1", {}, 0.25), ("2", {"lengths": [2, 4, 8, 16], "samples": 8}, 0.5)):
        folder = run.path / "evaluations" / name
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(asked))
        write_rows(folder / "curve.jsonl", [curve_row(length, accuracy) for length in (2, 4, 8, 16)])
    report()
    assert row_of("LSTM")[1:3] == ["1", "0.900"]
    run.curve.unlink()
    answer = report()
    assert "damaged" not in answer.err
    assert row_of("LSTM")[1:3] == ["1", "0.250"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.yaml", "a: [1", "its config.yaml cannot be read"),
        ("config.yaml", None, "its config.yaml cannot be read"),
        ("curve.jsonl", "no\n{}\n", "damaged: line 1 of results/runs/broken/curve.jsonl is not JSON"),
        ("curve.jsonl", b"\xff\n", "damaged: cannot read results/runs/broken/curve.jsonl"),
        ("curve.jsonl", "[1]\n{}\n", "damaged: results/runs/broken/curve.jsonl has lines that are no rows"),
        ("curve.jsonl", "[" * 10**5 + "\n{}\n", "damaged: line 1 of results/runs/broken/curve.jsonl"),
        ("curve.jsonl", None, "damaged: results/runs/broken/curve.jsonl lacks lengths 2, 4, 8, 16"),
        ("metrics.jsonl", b"\xff\n", "its metrics.jsonl cannot be read"),
        ("environment.json", "[]", "its environment.json cannot be read"),
        ("status.json", "[1]", None),
        ("status.json", "{}", None),
        ("status.json", '{"state": ["finished"]}', None),
        ("status.json", None, None),
    ],
)
def test_a_broken_folder_is_one_line(
    report: CommandLine, name: str, content: str | bytes | None, said: str | None
) -> None:
    record(RESULTS, "whole", lstm(1))
    run = record(RESULTS, "broken", lstm(0))
    (run.path / name).unlink()
    if content is not None:
        (run.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    answer = report()
    assert answer.code == 0
    assert int(row_of("LSTM")[1].partition(" ")[0]) == (2 if name in ("metrics.jsonl", "environment.json") else 1)
    lines = [line for line in answer.err.splitlines() if "broken" in line]
    assert len(lines) <= 1 or "left out" in answer.err
    if said:
        assert lines[0].startswith(f"warning: runs/broken: {said}")


def test_runs_of_older_versions_are_brought_to_the_present_schema(report: CommandLine) -> None:
    import yaml

    config = small(GRID, "model=fp_mamba_k")
    run = record(RESULTS, "older", config)
    tree = yaml.safe_load((run.path / "config.yaml").read_text())
    del tree["model"]["mlp_expand"], tree["model"]["decay"], tree["gradient"], tree["choices"]["gradient"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(tree))
    report()
    assert row_of("FP-Mamba-K")[1:3] == ["1", "0.900"]


def test_a_run_of_another_version_that_cannot_be_read_is_one_line(report: CommandLine) -> None:
    run = record(RESULTS, "foreign", lstm())
    config = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(config.replace("fpexp.models.lstm", "gone_away.lstm"))
    answer = report()
    assert "warning: runs/foreign: its config is not one of this version: " in answer.err
    assert "gone_away" in answer.err
    assert row_of("demo_a4")[-1] == "0 of 2"


def test_the_same_input_gives_the_same_bytes(report: CommandLine) -> None:
    for seed in range(2):
        record(RESULTS, f"seed{seed}", lstm(seed))
    report()
    first = digest(RESULTS / "report")
    assert {"report.md", "report.html", "csv/demo_a4.csv", "figures/demo_a4.png", "figures/demo_a4.svg"} <= set(first)
    for path in RESULTS.glob("runs/*/*"):
        os.utime(path, (1e9 + len(path.name), 1e9))
    report("out=elsewhere")
    assert digest(Path("elsewhere")) == first
    report()
    assert digest(RESULTS / "report") == first
    write_rows(RESULTS / "runs/seed0/metrics.jsonl", metrics_rows(3))
    report()
    assert digest(RESULTS / "report") != first


def test_an_earlier_report_is_replaced_and_nothing_else_is(report: CommandLine) -> None:
    report()
    (RESULTS / "report/csv/stale.csv").write_text("x")
    report()
    assert not (RESULTS / "report/csv/stale.csv").exists()
    assert sorted(path.name for path in RESULTS.iterdir()) == ["report"]
    (RESULTS / "report/notes.txt").write_text("mine")
    before = digest(RESULTS / "report")
    report().refused("out=results/report holds notes.txt")
    assert digest(RESULTS / "report") == before
    Path("file").write_text("")
    for name in ("csv/mine.csv", "figures/mine.png"):
        (Path("paper") / name).parent.mkdir(parents=True)
        (Path("paper") / name).write_text("precious")
    report("out=paper").refused("out=paper holds csv/mine.csv")
    report("out=file").refused("out=file is not a folder")
    report("out=.").refused("out=. is not a folder")
    report("out=..").refused("out=.. is not a folder")
    report("out=results").refused("out=results holds report/")
    assert report("out=./new/sub/").code == 0
    assert Path("new/sub/report.md").is_file()


def test_what_the_paper_reports_has_its_own_column(report: CommandLine) -> None:
    folder = RESULTS / "paper"
    folder.mkdir(parents=True)
    (folder / "demo_a4.yaml").write_text(
        "source: Table 9\nmeasure: accuracy at 8\nclaims: [it is <b>so</b>]\nrows:\n"
        "  - {label: LSTM, when: {model: lstm}, value: 0.25, spread: 0.5}\n"
        "  - {label: K, when: {model: fp_mamba_k, training.steps: 6}, range: [0.125, 0.75]}\n"
        "  - {label: xLSTM, says: better}\n"
    )
    record(RESULTS, "run", lstm())
    report()
    header = next(line for line in text().splitlines() if line.startswith("| setting"))
    at = [cell.strip() for cell in header.strip("|").split("|")].index("paper, as reported: accuracy at 8")
    assert [row_of(name)[at] for name in ("LSTM", "FP-Mamba-K")] == ["0.25 ± 0.5", "0.125 to 0.75"]
    assert row_of("xLSTM (paper only)")[1:] == [*"---", "-", "better", *"-------"]
    assert row_of("LSTM")[2] == "0.900"
    rows = list(csv.DictReader((RESULTS / "report/csv/demo_a4.csv").open()))
    columns = ("setting", "n_seeds", "paper_value", "paper_std", "paper_low", "paper_high", "paper_says")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("FP-Mamba-K", "0", "", "", "0.125", "0.75", ""),
        ("LSTM", "1", "0.25", "0.5", "", "", ""),
        ("xLSTM", "0", "", "", "", "", "better"),
    ]
    assert "it is &lt;b&gt;so&lt;/b&gt;" in (RESULTS / "report/report.html").read_text()
    (folder / "demo_a4.yaml").write_text("rows: [{label: LSTM}]")
    report().refused("results/paper/demo_a4.yaml", "'LSTM' needs one of value, range and says")


def test_several_experiments_and_further_words(cli: CommandLine) -> None:
    answer = cli("report", "experiment=demo_a5,demo_a4", "seed=0,1", "out=both", *SMALL)
    assert answer.code == 0, answer.err
    assert re.findall(r"demo_a\d +0 of (\d)", answer.out) == ["2", "4"]
    assert answer.err.splitlines() == ["1 of 2: demo_a5", "2 of 2: demo_a4"]
    assert answer.out.splitlines()[-1] == "report: both/report.html; report.md, csv/ and figures/ beside it"
    commands = [line for line in text(Path("both")).splitlines() if line.startswith("fpexp train -m experiment")]
    assert len(commands) == 3  # one for both seeds
    assert [len(compose_jobs(shlex.split(line)[3:])) for line in commands] == [2, 2, 2]


def test_a_command_makes_the_missing_seeds_and_no_other_row_of_the_grid(cli: CommandLine) -> None:
    """Two rows of figure 6 have the words of FP-Mamba-H; one of them has a solver and a schedule besides."""
    answer = cli("report", "experiment=fig6_training_time", "seed=0,1", "training.steps=6", *SMALL)
    assert answer.code == 0, answer.err
    commands = [shlex.split(line) for line in text().splitlines() if line.startswith("fpexp train -m experiment")]
    expected = (1 + 1 + 2 * 4) * 2  # FP-Mamba-H twice, two baselines of four depths; seeds
    jobs = [compose_jobs(words[3:]) for words in commands]
    assert [len(of_command) for of_command in jobs] == [2] * (expected // 2)
    assert len({job.fingerprint() for of_command in jobs for job in of_command}) == expected


def test_a_config_without_lengths_is_no_end(report: CommandLine) -> None:
    import yaml

    run = record(RESULTS, "old", lstm())
    tree = yaml.safe_load((run.path / "config.yaml").read_text())
    del tree["evaluation"]
    (run.path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert report().code == 0


def test_the_whole_report_has_every_experiment_and_what_belongs_to_none(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {name: choices("experiment")[name] for name in ("demo_a4", "reference_a5", "fig11_cap")}
    monkeypatch.setattr("fpexp.commands.report.choices", lambda group, own: few)
    record(RESULTS, "stranger", small("task=a4", "model=mamba"))
    write_benchmark(RESULTS / "bench/old.json", "2026-11-30T04:00:00+0000", 0.001)
    write_benchmark(RESULTS / "reference/bench/new.json", "2026-11-30T05:00:00+0000", 0.002)
    (RESULTS / "bench/broken.json").write_text("[]")
    (RESULTS / "paper").mkdir()
    (RESULTS / "paper/table9.yaml").write_text("source: Table 9\nrows: [{label: xLSTM, value: 0.5}]")
    answer = cli("report")
    assert answer.code == 0, answer.err
    assert re.findall(r"^`experiment=(\w+)`", text(), re.M) == ["fig11_cap", "reference_a5"]
    numbers = "0.900 at 4, 0.800 at 8, 0.700 at 16"
    assert f"| runs/stranger | a4 | mamba | cpu | 0 | 6 | 2 min | 4 | {numbers} | finished |" in text()
    assert "| table9 | Table 9 | xLSTM |   | 0.5 |" in text()
    assert "speed, from `reference/bench/new.json`: cpu, 2 threads, 4 CPUs; fpexp bench speed" in text()
    assert "| length 16 | 2 ms | 1 ms to 3 ms | 1.5 | 5.188 |" in text()
    assert "bench/old.json" not in text()
    assert "warning: bench/broken.json: no benchmark that can be read" in answer.err
    html = (RESULTS / "report/report.html").read_text()
    assert all(part in html for part in ('id="fig11_cap"', "runs/stranger", "xLSTM", "length 16"))


def write_benchmark(path: Path, time: str, seconds: float) -> None:
    path.parent.mkdir(parents=True)
    environment = {"device": "cpu", "cpus": 4, "threads": 2, "command": "fpexp bench speed"}
    row = {"group": "", "contender": "length 16", "missing": None, "median_s": seconds, "ratio": 1.5, "baseline": None}
    row |= {"quartiles_s": [0.001, 0.003], "numbers": {"iterations_mean": 5.1875}}
    path.write_text(json.dumps({"benchmark": "speed", "time": time, "environment": environment, "contenders": [row]}))


def test_an_experiment_that_cannot_be_composed_leaves_the_others(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = dict.fromkeys(("reference_a5", "gone"), "")
    monkeypatch.setattr("fpexp.commands.report.choices", lambda group, own: few)
    answer = cli("report")
    assert answer.code == 0, answer.err
    assert "warning: experiment=gone: " in answer.err
    assert "reference_a5" in answer.out


def test_experiments_are_the_same_in_however_many_processes(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("demo_a4", "gone", "reference_a5", "demo_a5", "reference_a4")
    reports = []
    for alone in (False, True):
        monkeypatch.setattr("fpexp.commands.report.choices", lambda *_: dict.fromkeys(names, ""))
        monkeypatch.setattr("fpexp.commands.report.FOR_A_PROCESS", 100 if alone else 1)
        answer = cli("report")
        assert answer.code == 0, answer.err
        assert sorted(line.partition(": ")[2] for line in answer.err.splitlines() if " of 5" in line) == sorted(names)
        assert "warning: experiment=gone: " in answer.err
        reports.append(digest(RESULTS / "report"))
    assert reports[0] == reports[1]


def test_a_process_that_is_killed_is_one_line(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fpexp.commands.report._composed", _die)
    monkeypatch.setattr("fpexp.commands.report.FOR_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)  # of one process it would be this one
    answer = cli("report", "experiment=demo_a4,demo_a5")
    assert answer.code == 1
    assert answer.err == "fpexp: error: a process that composes experiments was killed; name fewer of them\n"
    assert not (RESULTS / "report").exists()


def _die(name: str, words: object, results_dir: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


SLOW = """
import time
from pathlib import Path
from fpexp.commands import report

def compose(name, words, results_dir):
    Path(name).touch()
    time.sleep(600)

report._composed, report.FOR_A_PROCESS, report.os.cpu_count = compose, 1, lambda: 2
"""


def test_a_ctrl_c_ends_all_processes_at_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    code = "import slow, sys; from fpexp.cli import main; sys.exit(main(['report', 'experiment=demo_a4,demo_a5']))"
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, stdout=-1, stderr=-1, text=True)
    try:
        wait_for(lambda: all((tmp_path / name).exists() for name in ("demo_a4", "demo_a5")), process, timeout=120)
        os.killpg(process.pid, signal.SIGINT)
        assert finish(process) == Answer(130, "", "fpexp: interrupted\n")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_mistakes_are_one_line(cli: CommandLine) -> None:
    cli("report", "experiment=demo_a6").refused("unknown experiment 'demo_a6'; did you mean 'demo_a")
    cli("report", "experiment=").refused("unknown experiment ''")
    cli("report", "experiment=fig4").refused("unknown experiment 'fig4'; did you mean 'fig4_state_tracking'?")
    cli("report", "experiment=fig1").refused("did you mean 'fig1_iterations'?")
    cli("report", "experiment=demo_a4", "training.lrr=1").refused("training.lrr", "training.lr")
    cli("report", "demo_a4").refused("'demo_a4' is not understood")
    cli("train", "experiment=demo_a5", "report.title=a").refused("'report.title' is for the files in conf/experiment")
    assert not RESULTS.exists()


def test_curves_are_numbers_in_the_page_that_nothing_can_end(report: CommandLine) -> None:
    record(RESULTS, "<!--<script>&'", lstm())
    report()
    html = (RESULTS / "report/report.html").read_text()
    assert "<!--" not in html
    (data,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    (panel,) = json.loads(data)["panels"]
    (line,) = panel["lines"]
    assert [(point["x"], point["y"]) for point in line["points"]] == [(2, 1.0), (4, 0.9), (8, 0.8), (16, 0.7)]
    assert line["points"][0]["runs"] == [["<!--<script>&'", 1.0]]
    assert panel["levels"] == [[1 / 12, "chance"]]
    assert panel["marks"] == [[4.0, "longest in training"]]
    assert not re.findall(r'(?:src|href)="(?!#)', html)  # it loads nothing and leads nowhere else


def test_an_evaluation_with_other_settings_changes_nothing(cli: CommandLine) -> None:
    """What the experiment's sweep.evaluate asks for is reported, whatever else was measured later."""
    experiment = "experiment=fig12_sequential_parallel"
    run = record(RESULTS, "run", small(experiment, "solver=auto"))

    def evaluated(time: str, asked: dict[str, object], kind: str, **row: float) -> None:
        folder = run.path / "evaluations" / time
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(json.dumps(asked))
        write_rows(folder / f"{kind}.jsonl", [{"length": 4, **row}])

    asked = {"samples": 256, "solver": "picard", "against": "sequential"}
    evaluated("1", asked, "agreement", distance_mean=0.25)
    evaluated("2", {**asked, "samples": 8}, "agreement", distance_mean=9.5)
    evaluated("3", {"lengths": [4], "solver": "picard"}, "curve", token_accuracy=0.125)
    assert cli("report", experiment, *SMALL).code == 0
    assert row_of("trained as in figure 4")[1:3] == ["1", "0.700"]
    figure = (RESULTS / "report/csv/fig12_sequential_parallel_figure.csv").read_text()
    assert "0.25" in figure
    assert "9.5" not in figure


def test_text_is_reported_by_its_perplexity(cli: CommandLine) -> None:
    run = record(RESULTS, "run", lstm())
    rows = [curve_row(n, 0.5, perplexity=4.0 + n, unigram_perplexity=20.0) for n in (2, 4, 8, 16)]
    write_rows(run.curve, rows)
    cli("report", GRID, *SMALL)
    assert row_of("LSTM")[2:5] == ["8.000", "12.000", "20.000"]
    assert "perplexity of a token at 4" in text()
