"""The `report:` block of an experiment, and the paper's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fpexp.config.catalogue import choices, conf_dir
from fpexp.config.compose import compose
from fpexp.errors import UserError
from fpexp.reporting.layout import Figure, Layout, read_layout
from fpexp.reporting.paper import Paper, Reported, look_up, read_paper

PAPER = Path(__file__).parents[2] / "results/paper"


def layout(tmp_path: Path, block: str) -> Layout:
    path = tmp_path / "x.yaml"
    path.write_text(f"# @package _global_\n# An experiment\n{block}")
    return read_layout(path)


def test_an_experiment_without_a_block_is_reported_by_its_curves(tmp_path: Path) -> None:
    assert layout(tmp_path, "training: {steps: 3}") == Layout()
    assert [figure.kind for figure in Layout().figures] == ["curve"]


def test_a_block_is_read(tmp_path: Path) -> None:
    figures = "figures: [{kind: setting, x: model.layers, metrics: loss}, {kind: training, x: [step]}]"
    found = layout(tmp_path, f"report: {{metrics: iterations_mean, at: [4], labels: {{a: b}}, {figures}}}")
    assert found == Layout(
        metrics=["iterations_mean"],
        at=[4],
        labels={"a": "b"},
        figures=[
            Figure(kind="setting", x=["model.layers"], metrics=["loss"]),
            Figure(kind="training", x=["step"]),
        ],
    )
    assert layout(tmp_path, "report: {figures: []}").figures == []


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("report: {titel: a}", r"unknown key 'report.titel'; did you mean 'report.title'"),
        ("report: {figures: [{kind: curv}]}", r"unknown report.figures\[0\].kind 'curv'; did you mean 'curve'"),
        ("report: {figures: [{metrics: [token_acuracy]}]}", "unknown metric 'token_acuracy'"),
        ("report: {metrics: [token_acuracy]}", "unknown metric 'token_acuracy'; did you mean 'token_accuracy'"),
        ("report: {figures: [{kind: setting}]}", "a figure of kind setting needs x"),
        ("report: {at: [0]}", "at is a list of lengths, or of multiples .* not 0"),
        ("report: {at: [2y]}", "not '2y'"),
        ("report: {at: {a5: 16}}", "not 16"),
        ("report: {labels: 3}", "labels is a mapping"),
        ("report: [1]", "report is a mapping"),
        ("report: {a: [1", "not YAML"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path: Path, block: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"x\.yaml: .*{said}"):
        layout(tmp_path, block)


@pytest.mark.parametrize("name", choices("experiment"))
def test_every_block_is_one(name: str) -> None:
    read_layout(conf_dir() / "experiment" / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(PAPER.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_of_the_paper_is_one(path: Path) -> None:
    paper = read_paper(PAPER.parent, path.stem)
    assert paper is not None
    assert paper.source
    assert paper.claims or paper.rows


def test_numbers_of_the_paper_are_those_of_its_tables() -> None:
    def values(name: str) -> dict[str, str]:
        paper = read_paper(PAPER.parent, name)
        assert paper is not None
        return {row.label: row.text for row in paper.rows}

    assert values("table4_modular_arithmetic")["FP-Mamba-H r=4"] == "0.384"
    dependence = values("table1_dependence")
    assert [dependence[key] for key in ("none", "Q", "b+c", "lambda+Q+b+c")] == ["0.11", "0.53", "0.81", "0.94"]
    assert values("table3_catbabi")["FP-Mamba-H r=3, 2 layers"] == "89.55"


def test_a_row_is_of_the_settings_that_have_all_its_values() -> None:
    config = {"choices": {"model": "mamba", "task": "a5"}, "model": {"_target_": "x", "layers": 2, "on": False}}
    assert look_up(config, "model") == "mamba"
    assert look_up(config, "model.layers") == 2
    assert look_up(config, "model.layers.deeper") is None
    assert Reported("a", {"model": "mamba", "model.layers": 2, "model.on": False}, value=1.0).fits(config)
    assert not Reported("a", {"model": "mamba", "model.layers": 4}, value=1.0).fits(config)
    assert not Reported("a", None, value=1.0).fits(config)
    assert Reported("a", {"model": ["lstm", "mamba"]}, value=1.0).fits(config)
    assert not Reported("a", {"model": ["lstm", "gdn"]}, value=1.0).fits(config)


def test_a_key_that_no_setting_of_the_row_has_is_a_mistake() -> None:
    def check(when: dict[str, object]) -> None:
        Paper(rows=(Reported("a", when, value=1.0),)).check_keys(configs)

    configs = [
        {"choices": {"task": "a5", "model": model}, "model": {"layers": 2, key: True}}
        for model, key in (("mamba", "wide"), ("gdn", "decay"))
    ]
    check({"model": "gdn", "model.layers": 4, "model.decay": True})
    check({"model": "lstm", "model.anything": 1})  # no setting of it, as where a command line names other models
    mistakes: list[tuple[dict[str, object], str]] = [
        ({"model": "gdn", "model.layer": 2}, "'a': unknown key 'model.layer' in when; did you mean 'model.layers'?"),
        ({"model": "mamba", "model.decay": True}, "unknown key 'model.decay'"),
        ({"modle": "gdn"}, "unknown key 'modle' in when; did you mean 'model'?"),
    ]
    for when, said in mistakes:
        with pytest.raises(UserError, match=re.escape(said)):
            check(when)


def test_what_all_rows_have_in_common_is_written_once(tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    rows = "rows: [{label: a, when: {model: b}, value: 1}, {label: c, when: {task: d}, value: 2}, {label: e, value: 3}]"
    (tmp_path / "paper/x.yaml").write_text("when: {task: a5}\n" + rows)
    paper = read_paper(tmp_path, "x")
    assert paper is not None
    assert [row.when for row in paper.rows] == [{"task": "a5", "model": "b"}, {"task": "d"}, None]
    (tmp_path / "paper/x.yaml").write_text("when: [a]\n" + rows)
    with pytest.raises(UserError, match="when is a mapping"):
        read_paper(tmp_path, "x")


@pytest.mark.parametrize(
    ("name", "label", "others"),
    [
        ("fig4_state_tracking", "Mamba", ["model.layers=4", "task=a4", "task.lengths.max=32"]),
        ("table1_dependence", "none", ["model.dependence.gate=false", "model.layers=2", "model=fp_mamba_dplr"]),
        ("table4_modular_arithmetic", "Mamba", ["task.brackets=false", "model.layers=4"]),
    ],
)
def test_a_value_of_the_paper_stands_beside_its_own_models_alone(name: str, label: str, others: list[str]) -> None:
    paper = read_paper(PAPER.parent, name)
    assert paper is not None
    (row,) = [row for row in paper.rows if row.label == label]
    words = [f"{key}={value[0] if isinstance(value, list) else str(value)}" for key, value in row.when.items()]
    assert row.fits(compose(words).to_dict())
    for other in others:
        own = [word for word in words if word.partition("=")[0] != other.partition("=")[0]]
        assert not row.fits(compose([*own, other]).to_dict()), other


@pytest.mark.parametrize("row", ["{label: a}", "{label: a, value: 1, says: b}", "{label: a, value: 1, when: [b]}"])
def test_a_row_that_says_nothing_or_two_things_is_refused(tmp_path: Path, row: str) -> None:
    (tmp_path / "paper").mkdir()
    (tmp_path / "paper/x.yaml").write_text(f"rows: [{row}]")
    with pytest.raises(UserError, match=r"x\.yaml: 'a'"):
        read_paper(tmp_path, "x")
