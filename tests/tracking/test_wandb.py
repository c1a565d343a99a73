"""wandb: offline for real, read back from its own file; its failures by a stand-in."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fpexp.config.compose import compose
from fpexp.run_folder import RunFolder
from fpexp.tracking import wandb as tracking_wandb
from fpexp.tracking.tracker import RunStart
from fpexp.tracking.wandb import WandbTracker, flatten

KEY = "0" * 40
LAYERS = [{"iterations_mean": 3.0}, {"iterations_mean": 5.0}]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without a key, and nothing of wandb in the environment."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., RunStart]:
    def make(mode: str = "auto") -> RunStart:
        config = compose(
            ["task=a4", "model=lstm", "tracking=wandb", f"tracking.mode={mode}", f"results_dir={tmp_path}"]
        )
        return RunStart(RunFolder.create(config), config, 123456, None)

    return make


def train(step: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "train", "step": step, "loss": 1.0 / step, **fields}


def curve(step: int, length: int) -> dict[str, Any]:
    return {"kind": "curve", "step": step, "length": length, "token_accuracy": 0.5, "decoding": "teacher"}


def play(start: RunStart, rows: list[dict[str, Any]]) -> None:
    tracker = WandbTracker()
    tracker.start(start)
    for row in rows:
        tracker.log(row)
    tracker.finish("finished")


def read_records(run: RunFolder) -> Iterator[Any]:
    """Yield the records of the run's offline files, oldest first: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(run.path.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # a full record, or the last part of one
                record = wandb_internal_pb2.Record()
                record.ParseFromString(whole)
                whole = b""
                yield record


def read_history(run: RunFolder) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in read_records(run)
        if record.HasField("history")
    ]


def test_offline_without_a_key_and_every_length_survives(
    begin: Callable[..., RunStart], capfd: pytest.CaptureFixture[str]
) -> None:
    start = begin()
    play(start, [train(20, layers=LAYERS, lr=None), *(curve(20, length) for length in (2, 64, 16))])
    history = read_history(start.run)
    assert [row["step"] for row in history] == [20] * 4
    assert history[0]["train/layer1/iterations_mean"] == 5.0
    assert "train/lr" not in history[0]
    assert [row["curve/length"] for row in history[1:]] == [2, 64, 16]
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    metrics = {r.metric.glob_name or r.metric.name: r.metric for r in read_records(start.run) if r.HasField("metric")}
    assert {"train/*", "validation/*", "curve/*", "curve/length"} <= set(metrics)
    assert metrics["curve/*"].step_metric == "curve/length"
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err.count("warning: ") == 1
    assert "no API key" in output.err
    assert len(output.err.splitlines()) == 1


def test_a_resumed_run_is_logged_once(begin: Callable[..., RunStart]) -> None:
    start = begin("offline")
    validation = {"kind": "validation", "step": 40, "length": 16}
    play(start, [train(20), train(40), validation, validation | {"length": 32}])
    resumed = RunStart(start.run, start.config, start.parameters, 20)
    play(resumed, [train(40), validation, train(60), curve(60, 2)])
    play(resumed, [curve(60, 2), curve(60, 4)])
    history = read_history(start.run)
    assert [(row["step"], row.get("curve/length")) for row in history] == [
        (20, None),
        (40, None),
        (40, None),
        (40, None),
        (60, None),
        (60, 2),
        (60, 4),
    ]
    assert [row["_step"] for row in history] == list(range(1, 8))
    ids = {record.run.run_id for record in read_records(start.run) if record.HasField("run")}
    assert ids == {start.run.id}


def test_online_without_network_goes_offline_in_bounded_time(
    begin: Callable[..., RunStart], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking_wandb, "INIT_TIMEOUT", 1.0)
    start = begin("online")
    play(start, [train(20)])
    assert [row["train/loss"] for row in read_history(start.run)] == [0.05]
    assert capfd.readouterr().err.count("warning: ") == 1


@pytest.mark.parametrize("stdin", ["closed", "terminal"])
def test_it_never_prompts(stdin: str, begin: Callable[..., RunStart]) -> None:
    start = begin("online")
    code = (
        "import sys; from pathlib import Path; from fpexp.run_folder import RunFolder\n"
        "from fpexp.tracking.tracker import RunStart; from fpexp.tracking.wandb import WandbTracker\n"
        "run = RunFolder(Path(sys.argv[1])); tracker = WandbTracker()\n"
        "tracker.start(RunStart(run, run.config(), 1, None)); tracker.finish('finished')"
    )
    theirs, ours = pty.openpty()
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if stdin == "terminal":
        options = dict.fromkeys(("stdin", "stdout", "stderr"), ours)
    process = subprocess.Popen([sys.executable, "-c", code, str(start.run.path)], **options)
    _, errors = process.communicate(timeout=60)
    shown = errors if errors is not None else os.read(theirs, 65536)
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0
    assert shown.startswith(b"warning: wandb runs offline (no API key")
    assert len(shown.splitlines()) == 1


def test_wandb_mode_is_honoured(begin: Callable[..., RunStart], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    start = begin()
    play(start, [train(20)])
    assert not (start.run.path / "wandb").exists()


def test_without_wandb_one_warning(
    begin: Callable[..., RunStart], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    play(begin(), [train(20), train(40)])
    output = capsys.readouterr()
    assert output.err.count("warning: ") == 1
    assert "not installed" in output.err
    assert output.out == ""


class FakeWandb:
    """A wandb that is online and records its entries; `broken` names the calls that fail."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.entries: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.url = "https://wandb.example/run"
        self.settings = SimpleNamespace(mode="online", sync_dir="/somewhere")
        self.Settings = SimpleNamespace

    def setup(self, settings: Any) -> FakeWandb:
        return self

    def login(self, **options: Any) -> bool:
        return True

    def teardown(self) -> None:
        pass

    def init(self, **options: Any) -> FakeWandb:
        return self._maybe_fail("init")

    def define_metric(self, *names: str, **options: Any) -> None:
        self._maybe_fail("define_metric")

    def log(self, entry: dict[str, Any], step: int) -> None:
        self._maybe_fail("log")
        self.entries.append(entry)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        self._maybe_fail("finish")

    def _maybe_fail(self, call: str) -> FakeWandb:
        if call == self.broken:
            raise RuntimeError(f"no {call}\nfor you")
        return self


@pytest.mark.parametrize("broken", ["init", "define_metric", "log", "finish"])
def test_a_failure_ends_the_tracking_not_the_run(
    broken: str,
    begin: Callable[..., RunStart],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeWandb(broken)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    play(begin(), [train(20), train(40)])
    assert len(fake.entries) == (2 if broken == "finish" else 0)
    errors = capsys.readouterr().err
    assert errors.count("warning: ") == len(errors.splitlines()) == 1
    assert f"no {broken} for you" in errors


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("interrupted", 1), ("failed", 1)])
def test_online_it_says_where_and_passes_the_state_on(
    state: str,
    code: int,
    begin: Callable[..., RunStart],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    tracker = WandbTracker()
    tracker.start(begin())
    tracker.log(train(20))
    tracker.finish(state)
    tracker.finish(state)
    assert fake.exit_codes == [code]
    assert fake.entries == [{"step": 20, "train/loss": 0.05}]
    assert capsys.readouterr().out == "wandb: https://wandb.example/run\n"


def test_layers_are_flattened() -> None:
    assert flatten({"kind": "train", "step": 1, "a": None, "b": 0, "layers": LAYERS}) == {
        "b": 0,
        "layer0/iterations_mean": 3.0,
        "layer1/iterations_mean": 5.0,
    }
