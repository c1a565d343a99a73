"""Configs that earlier versions saved are read, built and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from runs import TINY, CommandLine, Recorder, tiny

import fpexp
from fpexp.build import check
from fpexp.commands.train import read_run_config
from fpexp.config.migration import migrate
from fpexp.config.run import read_config
from fpexp.errors import UserError
from fpexp.run import start_run

RUNS = Path(__file__).resolve().parents[2] / "results/reference/runs"
RECORDED = sorted(RUNS.glob("*/config.yaml"))


def before_the_group(tree: dict[str, Any]) -> dict[str, Any]:
    """What was saved of the same run before the gradient was a group."""
    old = json.loads(json.dumps(tree))
    del old["gradient"], old["choices"]["gradient"]
    old["model"]["gradient"] = "one_step"
    return old


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_recorded_config_builds_with_one_step(path: Path) -> None:
    config = check(read_run_config([f"config={path}"])).config
    assert config.gradient.target == "fpexp.fixed_point.OneStep"
    assert config.choices.gradient == "one_step"
    assert "gradient" not in config.model.settings


def test_a_recorded_config_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli = CommandLine(capsys, tmp_path)
    (recorded,) = (path for path in RECORDED if "a4-fp_mamba_k-seed0" in str(path))
    answer = cli("train", f"config={recorded}", *TINY, "training.steps=1")
    assert answer.code == 0, answer.err
    assert cli.runs()[-1].config().choices.gradient == "one_step"


def test_a_run_with_such_a_config_is_loaded_and_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = start_run(tiny(Path("results"), model="fp_mamba_h"), Recorder())
    config, weight = run.config(), fpexp.load(run.id).head.weight
    (run.path / "config.yaml").write_text(yaml.safe_dump(before_the_group(config.to_dict())))
    assert run.config() == config
    assert torch.equal(fpexp.load(run.id).head.weight, weight)
    answer = CommandLine(capsys, tmp_path)("evaluate", f"run={run.id}", "lengths=[3]", "samples=4")
    assert answer.code == 0, answer.err


def test_a_present_config_stays_as_it_is(tmp_path: Path) -> None:
    tree = tiny(tmp_path, "gradient=implicit", model="fp_mamba_h").to_dict()
    assert migrate(tree) is tree


def test_what_no_version_saved_is_still_refused(tmp_path: Path) -> None:
    """The old setting beside the new group, and one that never was."""
    tree = tiny(tmp_path, model="fp_mamba_h").to_dict()
    path = tmp_path / "run.yaml"
    beside, never = {**tree, "model": {**tree["model"], "gradient": "one_step"}}, before_the_group(tree)
    never["model"]["gradient"] = "implicit"
    for wrong, message in ((beside, r"unknown key 'model\.gradient'"), (never, "gradient is missing")):
        path.write_text(yaml.safe_dump(wrong))
        with pytest.raises(UserError, match=message):
            read_config(path)
