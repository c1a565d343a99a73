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
from fpexp.config.catalogue import choices
from fpexp.config.compose import compose, compose_jobs
from fpexp.config.migration import LATER, migrate
from fpexp.config.run import RunConfig, read_config, write_config
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


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.parent.name)
def test_a_recorded_config_gains_the_settings_that_came_later(path: Path) -> None:
    """All that conf/ has today, and no value but those that it has."""
    config = read_config(path)
    composed = compose([f"task={config.choices.task}", f"model={config.choices.model}"])
    for found, today in ((config.model, composed.model), (config.gradient, composed.gradient)):
        assert set(found.settings) == set(today.settings)
    mixer, today = (c.model.settings.get("channel_mixer") for c in (config, composed))
    assert (mixer is None) == (today is None)
    assert mixer is None or set(mixer.settings) == set(today.settings)
    saved = yaml.safe_load(path.read_text())["model"]
    for name in {"mlp_expand", "decay", "decay_scale"} - saved.keys():
        assert config.model.settings.get(name) == composed.model.settings.get(name)


@pytest.mark.parametrize("job", compose_jobs(["experiment=reference_a5", "device=cpu", "threads=1"]))
def test_a_recorded_run_is_recognised_when_it_is_asked_for_again(job: RunConfig) -> None:
    """A sweep finds it by the fingerprint of what it composes."""
    recorded = {read_config(path).fingerprint() for path in RECORDED if "a5-fp_mamba_h" in str(path)}
    assert check(job).config.fingerprint() in recorded


def test_later_settings_are_settings_and_what_conf_says() -> None:
    """A name that no component has, or a value that conf/ has not, would give old runs another fingerprint."""
    composed = [compose(["task=a4", f"model={name}"]).model for name in choices("model")]
    parts = [part for model in composed for part in (model, model.settings.get("channel_mixer")) if part is not None]
    parts += [compose(["task=a4", "model=fp_mamba_k", f"solver={name}"]).solver for name in choices("solver")]
    for target, later in LATER.items():
        of_target = [part for part in parts if part.target == target]
        assert of_target, target
        for name, value in later.items():
            assert of_target[0].settings[name] == value
            assert type(of_target[0].settings[name]) is type(value)


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


@pytest.mark.parametrize("model", choices("model"))
def test_a_saved_config_keeps_its_fingerprint(tmp_path: Path, model: str) -> None:
    """A sweep knows by it what has run."""
    config = compose([f"model={model}", "task=a5"])
    write_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml").fingerprint() == config.fingerprint()


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
