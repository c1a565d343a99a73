"""`fpexp bench`: every benchmark at a tiny size, the keys, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runs import CommandLine

import fpexp.commands.bench as command
from fpexp.bench import BENCHMARKS, load, sampling, second_start, subjects, training_step
from fpexp.bench.measure import Check, Contender
from fpexp.errors import FpexpError
from fpexp.machine import set_threads
from fpexp.tasks import IGNORE

QUICK = ["threads=1", "repeats=2", "warmup=0"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command sets the threads of this process."""
    yield
    set_threads(0)


def written(results: str = "results") -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(results, "bench").iterdir())]


def rows(cli: CommandLine, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run one benchmark and return what it wrote, by group and contender."""
    answer = cli("bench", *words, *QUICK)
    assert answer.code == 0, answer.err
    assert answer.err == ""
    (found,) = written()
    assert found["benchmark"] == words[0]
    assert found["settings"]["repeats"] == 2
    environment = found["environment"]
    assert environment["command"] == shlex.join(["fpexp", "bench", *words, *QUICK])
    assert environment["threads"] == 1
    assert {"commit", "device", "python", "fpexp", "backends"} <= environment.keys()
    assert {"torch", "mambapy", "transformers"} <= environment["packages"].keys()
    for row in found["contenders"]:
        assert row["contender"] in answer.out
        assert row["missing"] or row["repeats"] in (1, 2)
        assert all(check["value"] <= check["limit"] for check in row["checks"])
    return {(row["group"], row["contender"]): row for row in found["contenders"]}


# Every benchmark, at sizes that say nothing


def test_training_step(cli: CommandLine) -> None:
    run = cli.train("model.d_model=64", task="a5", model="fp_mamba_h")
    found = rows(cli, "training_step", "batch_size=3", "length=2", f"run={run.id}")
    trained = f"trained {run.id}"
    targets = {name: row["target"] and row["target"]["at_most"] for (_, name), row in found.items()}
    assert targets == {
        "LSTM": None, "FP-Mamba-K": 3, "FP-Mamba-H r=1": 3, "FP-Mamba-H r=2": 3, "FP-Mamba-H r=4": 4, trained: 3
    }  # fmt: skip
    for (_, name), row in found.items():
        assert row["checks"]
        assert (row["ratio"] is None) == (name == "LSTM")
        assert ("iterations_mean" in row["numbers"]) == (name != "LSTM")


def test_a_training_step_leaves_the_weights() -> None:
    experiment = subjects.fresh("fp_mamba_h", "model.d_model=16")
    batch = experiment.task.sample(2, 3, torch.Generator())
    before = [parameter.clone() for parameter in experiment.model.parameters()]
    step = training_step.training_step(experiment, batch, experiment.schedule.evaluation_cap())
    step()
    step()
    after = list(experiment.model.parameters())
    assert all(bool((a == b).all()) for a, b in zip(after, before, strict=True))
    assert all(parameter.grad is not None for parameter in after)


def test_sampling(cli: CommandLine) -> None:
    found = rows(cli, "sampling", "model=lstm", "sequences=3")
    assert {name for _, name in found} == {"training step", "drawing"}
    assert {group.partition(", batch")[0] for group, _ in found} == {
        "a5", "copy, one example a row", "copy, packed", "modular_arithmetic"
    }  # fmt: skip
    for (group, name), row in found.items():
        assert group.endswith("lstm")
        if name == "drawing":
            assert [check["value"] for check in row["checks"]] == [0]
            assert row["baseline"] == "training step"
            assert row["target"] == {"number": "ratio", "at_most": 0.05, "at_least": None}
            assert row["numbers"]["samples_per_second"] > 0


@pytest.mark.parametrize("name", sampling.SUBJECTS)
def test_a_wrong_target_of_a_batch_is_found(name: str) -> None:
    task, words = sampling.SUBJECTS[name]
    experiment = subjects.fresh("lstm", *words, task=task)
    batch = sampling.drawing(experiment, 4)()
    assert sampling.wrong_rows(experiment.task, batch).passed
    last = int((batch.targets[1] != IGNORE).nonzero()[-1])
    batch.targets[1, last] = (batch.targets[1, last] + 1) % 5
    assert sampling.wrong_rows(experiment.task, batch).value == 1


def test_sequential_solve_of_a_fresh_model(cli: CommandLine) -> None:
    found = rows(cli, "sequential_solve", "lengths=[3,16]", "batch_size=2")
    assert len(found) == 8
    for (group, name), row in found.items():
        assert "not trained" in group
        assert {"iterations_mean", "iterations_max", "converged"} <= row["numbers"].keys()
        has_target = name == "picard" and "length 16" in group
        assert row["target"] == ({"number": "ratio", "at_most": None, "at_least": 4.0} if has_target else None)
        assert ("difference_max" in row["numbers"]) == (name == "picard")
    assert {group.rpartition(" ")[2] for group, _ in found} == {"training", "evaluation"}


def test_sequential_solve_of_a_run(cli: CommandLine) -> None:
    run = cli.train(model="fp_mamba_h")
    found = rows(cli, "sequential_solve", f"run={run.path}", "lengths=[2]", "batch_size=2")
    assert all(group.startswith(run.id) for group, _ in found)


def test_solve_scaling(cli: CommandLine) -> None:
    found = rows(cli, "solve_scaling", "lengths=[2,4,8]", "batch_size=2")
    assert [(row["contender"], row["baseline"]) for row in found.values()] == [
        ("length 2", None), ("length 4", "length 2"), ("length 8", "length 4")
    ]  # fmt: skip
    assert all(row["ratio"] for row in list(found.values())[1:])


def test_selective_scan(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fpexp.bench.differentiated.peak_extra", lambda prepare, **arguments: 1000)
    found = rows(cli, "selective_scan", "batch_size=1", "length=4", "width=3", "state_size=2")
    names = {name: row for (_, name), row in found.items()}
    assert list(names) == ["cpu", "reference", "mambapy", "transformers"]
    inputs = 4 * (2 * 4 * 3 + 3 * 2 + 2 * 4 * 2 + 3)
    assert names["reference"]["numbers"] == {"peak_extra_mb": 0.001, "memory_of_inputs": 1000 / inputs}
    for name in ("mambapy", "transformers"):
        assert names[name]["target"]["at_least"] == 5.0
        assert names[name]["missing"] in (None, "not installed: pip install 'fpexp[bench]'")


def test_ops(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fpexp.bench.differentiated.peak_extra", lambda prepare, **arguments: 1000)
    words = ["ops=[delta_product,selective_scan]", "batch_size=1", "length=12", "width=4"]
    found = rows(cli, "ops", *words)
    assert {group for group, _ in found} == {
        f"{op}, batch size 1, width 4" for op in ("delta_product", "selective_scan")
    }
    names = ["cpu, length 3", "cpu, length 6", "cpu, length 12", "cpu, length 24", "reference, length 12"]
    assert [name for _, name in found] == 2 * names
    for (_, name), row in found.items():
        assert ("memory_of_inputs" in row["numbers"]) == name.endswith("length 12")
        assert bool(row["checks"]) == (name.startswith("cpu") and not row["missing"])


def test_second_start(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(words: list[str], kernels: Path) -> float:
        assert {"training.steps=1", "model=fp_mamba_h", "threads=1"} <= set(words)
        if kernels.exists():
            return 3.0
        kernels.mkdir()
        (kernels / "sweep.nbc").write_text("code")
        return 20.0

    monkeypatch.setattr(second_start, "seconds_to_first_step", start)
    first, second = rows(cli, "second_start", "model=fp_mamba_h").values()
    assert (first["seconds"], second["seconds"]) == ([20.0], [3.0, 3.0])
    assert first["numbers"] == {"cache_files": 1}
    assert second["target"] == {"number": "median_s", "at_most": 8.0, "at_least": None}
    assert second["met"]


def test_a_start_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The LSTM has no kernels, which would take their time to compile."""
    words = second_start._words("lstm", tmp_path / "results", threads=1)
    assert 0 < second_start.seconds_to_first_step(words, tmp_path / "kernels") < 300
    (run,) = (tmp_path / "results" / "runs").iterdir()
    assert json.loads((run / "status.json").read_text())["state"] == "finished"


def test_a_second_start_that_compiles_is_found(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"

    def compile_kernel() -> float:
        kernels.mkdir(exist_ok=True)
        (kernels / f"{len(list(kernels.iterdir()))}.nbc").write_text("code")
        return 1.0

    check = second_start._check_cache(kernels, compile_kernel, compile_kernel)
    assert (check.value, check.passed) == (1, False)
    assert second_start._check_cache(kernels, compile_kernel, lambda: 1.0).passed


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(FpexpError, match=r"ended with exit code 2: .*did you mean 'lstm'"):
        second_start.seconds_to_first_step(["train", "task=a4", "model=lstn"], tmp_path)


# The command


def test_list(cli: CommandLine) -> None:
    answer = cli("bench", "--list")
    assert answer.code == 0
    assert [line.split()[0] for line in answer.out.splitlines()] == list(BENCHMARKS)
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_help_shows_every_key_and_its_default(cli: CommandLine, name: str) -> None:
    shown = dict(word.split("=", 1) for word in BENCHMARKS[name].keys.replace("<run id or folder>", "").split())
    module = load(name)
    defaults = {field.name: getattr(module.Sizes(), field.name) for field in dataclasses.fields(module.Sizes)}
    texts = {
        key: str(value).replace(" ", "").replace("'", "").replace("True", "true") for key, value in defaults.items()
    }
    texts = {key: text.replace("64,128,256,512,", "...,") for key, text in texts.items()}
    assert shown == texts
    assert BENCHMARKS[name].keys in cli("bench", "--help").out


def test_a_key_has_one_type_in_all_benchmarks() -> None:
    kinds: dict[str, Any] = dict(command.OPTIONS)
    for name in BENCHMARKS:
        for key, kind in typing.get_type_hints(load(name).Sizes, include_extras=True).items():
            assert kinds.setdefault(key, kind) == kind, key


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_counts_its_operations(name: str) -> None:
    assert "Roofline" in (inspect.getdoc(load(name)) or "")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Two benchmarks of one contender each, whose errors a test may set."""
    errors = {"first": 0.0, "last": 0.0}

    @dataclasses.dataclass(frozen=True)
    class Sizes:
        length: int = 4

    def module(name: str) -> SimpleNamespace:
        def contenders(sizes: Any, context: Any) -> list[Contender]:
            return [Contender(f"our {name}", "", lambda: 0.5, lambda: [Check("error", errors[name], 0.1)])]

        return SimpleNamespace(Sizes=Sizes, contenders=contenders)

    monkeypatch.setattr(command, "BENCHMARKS", errors)
    monkeypatch.setattr(command, "load", module)
    return errors


def test_all_run_when_none_is_named(cli: CommandLine, fakes: dict[str, float]) -> None:
    answer = cli("bench", "length=8", "results_dir=elsewhere")
    assert answer.code == 0, answer.err
    found = written("elsewhere")
    assert [entry["benchmark"] for entry in found] == ["first", "last"]
    assert all(entry["settings"]["length"] == 8 for entry in found)


def test_a_failed_check_is_told_and_the_others_run(cli: CommandLine, fakes: dict[str, float]) -> None:
    fakes["first"] = 0.3
    cli("bench").refused("first: our first is not right", "error 0.3, at most 0.1", code=1)
    assert [entry["benchmark"] for entry in written()] == ["last"]


def test_memory_that_runs_out(cli: CommandLine, fakes: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("fpexp.bench.measure.measure", fail)
    cli("bench", "last").refused("last: out of memory", "lower", code=1)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["training_stp"], ["unknown benchmark 'training_stp'; did you mean 'training_step'?", "second_start"]),
        (["training_step", "repats=2"], ["unknown key 'repats'; did you mean 'repeats'?"]),
        (["selective_scan", "run=x"], ["unknown key 'run'", "state_size"]),
        (["training_step", "repeats=0"], ["repeats=0 is out of range"]),
        (["training_step", "batch_size=many"], ["batch_size='many' must be an integer"]),
        (["training_step", "run=nope"], ["no run 'nope'"]),
        (["sequential_solve", "run=nope"], ["no run 'nope'"]),
        (["sequential_solve", "lengths=[]"], ["sequential_solve: there is nothing to time"]),
        (["ops", "ops=[]"], ["ops: there is nothing to time"]),
        (["ops", "ops=[delta_ruel]"], ["unknown op 'delta_ruel'; did you mean 'delta_rule'?", "diagonal_scan"]),
        (["solve_scaling", "lengths=[4,6]"], ["lengths=[4, 6] must double: 6 is not twice 4"]),
        (["--lst"], ["'--lst' is not understood", "--list"]),
        (["--list", "training_step"], ["'--list'", "stand alone"]),
    ],
    ids=lambda value: " ".join(value) if len(value) < 3 else "",
)
def test_a_mistake_is_one_line_and_two(cli: CommandLine, words: list[str], parts: list[str]) -> None:
    cli("bench", *words).refused(*parts)


def test_runs_that_do_not_fit(cli: CommandLine) -> None:
    run = cli.train()
    cli("bench", "training_step", f"run={run.id}").refused("vocabulary of 12 and d_model 16", "task=a5")
    cli("bench", "solve_scaling", f"run={run.id}").refused(f"run={run.id} is a lstm", "no fixed point")


def test_a_results_dir_that_cannot_be_written(cli: CommandLine) -> None:
    Path("file").write_text("kept")
    cli("bench", "training_step", "results_dir=file").refused("cannot write to results_dir=file")
