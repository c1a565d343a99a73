"""From conf/ and the command line to a checked config, and from a saved config back to the same run."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from runs import TINY, CommandLine, run_python, tiny, without_time

from fpexp.build import check
from fpexp.commands.train import read_run_config
from fpexp.config.catalogue import GROUPS, choices
from fpexp.config.compose import compose, compose_jobs
from fpexp.config.run import RunConfig, read_config, write_config
from fpexp.config.schema import Component, settings_of
from fpexp.errors import UserError
from fpexp.fixed_point import Picard, Sequential
from fpexp.run_folder import read_rows

BASE = ["task=a4", "model=lstm"]
TASK_WORDS = {"group": ["task.group='A4 x Z5'"]}
SCALES = list(choices("scale"))


def task_words(task: str) -> list[str]:
    return [f"task={task}", *TASK_WORDS.get(task, [])]


def fits(solver: str, schedule: str) -> bool:
    """Fixed and gamma cap whole-sequence iterations, which the sequential solver does not make."""
    return not (solver == "sequential" and schedule in ("fixed", "gamma"))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("task", choices("task"))
def test_every_task_composes_and_builds_at_every_scale(task: str, scale: str) -> None:
    experiment = check(compose([*task_words(task), "model=fp_mamba_k", f"scale={scale}"]))
    assert experiment.task.vocabulary_size == experiment.model.head.out_features
    assert experiment.config.choices.task == task
    assert experiment.config.choices.scale == scale


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("solver", choices("solver"))
@pytest.mark.parametrize("model", choices("model"))
def test_every_model_composes_and_builds_at_every_scale_with_every_solver(model: str, solver: str, scale: str) -> None:
    experiment = check(compose(["task=a5", f"model={model}", f"solver={solver}", f"scale={scale}"]))
    assert experiment.model.parameter_count() > 0


@pytest.mark.parametrize("schedule", choices("schedule"))
@pytest.mark.parametrize("solver", choices("solver"))
def test_every_solver_composes_with_every_schedule_that_fits(solver: str, schedule: str) -> None:
    words = ["task=a5", "model=fp_mamba_h", f"solver={solver}", f"schedule={schedule}", "device=cpu"]
    if not fits(solver, schedule):
        with pytest.raises(UserError, match=f"schedule={schedule} .*use solver=picard, or schedule=converge"):
            check(compose(words))
        return
    settled = check(compose(words)).config.solver.resolve()
    if solver == "auto":
        assert settled is (Sequential if schedule == "converge" else Picard)
    else:
        assert settled.__name__.lower() == solver


def test_a_capped_schedule_does_not_bother_a_model_without_solver() -> None:
    check(compose([*BASE, "solver=sequential", "schedule=gamma"]))


@pytest.mark.parametrize("gradient", choices("gradient"))
@pytest.mark.parametrize("model", choices("model"))
def test_every_model_builds_with_every_gradient(model: str, gradient: str) -> None:
    config = check(compose(["task=a4", f"model={model}", f"gradient={gradient}"])).config
    assert config.choices.gradient == gradient
    assert config.gradient.target.startswith("fpexp.fixed_point.")


@pytest.mark.parametrize("tracking", choices("tracking"))
def test_every_tracking_composes(tracking: str) -> None:
    assert compose([*BASE, f"tracking={tracking}"]).tracking.wandb == (tracking == "wandb")


def test_demo_is_fp_mamba_against_the_lstm_and_can_be_changed() -> None:
    assert [job.choices.model for job in compose_jobs(["experiment=demo_a4"])] == ["fp_mamba_k", "lstm"]
    jobs = compose_jobs(["experiment=demo_a4", "model=fp_mamba_h", "seed=0,1,2"])
    assert [(job.choices.model, job.seed) for job in jobs] == [("fp_mamba_h", seed) for seed in (0, 1, 2)]
    assert compose(["experiment=demo_a4"]).choices.task == "a4"


def test_a_sweep_is_the_product_of_its_values() -> None:
    jobs = compose_jobs(["task=a4,a5", "model=lstm", "seed=0,1", "training.lr=1e-3"])
    assert [(job.choices.task, job.seed) for job in jobs] == [("a4", 0), ("a4", 1), ("a5", 0), ("a5", 1)]


def components(value: Any) -> Iterator[Component]:
    if isinstance(value, Component):
        yield value
        for setting in value.settings.values():
            yield from components(setting)


@pytest.mark.parametrize(
    "words",
    [[*task_words(task), "model=lstm"] for task in choices("task")]
    + [["task=a4", f"model={model}"] for model in choices("model")]
    + [[*BASE, f"solver={solver}"] for solver in choices("solver")]
    + [[*BASE, f"schedule={schedule}"] for schedule in choices("schedule")]
    + [[*BASE, f"gradient={gradient}"] for gradient in choices("gradient")],
    ids=" ".join,
)
def test_every_setting_of_a_component_stands_in_its_file(words: list[str]) -> None:
    config = compose(words)
    for root in (config.task, config.model, config.solver, config.schedule, config.gradient):
        for component in components(root):
            assert set(component.settings) == set(settings_of(component.resolve())), component.target


def test_setting_of_a_model_needs_no_plus() -> None:
    assert compose([*BASE, "model.dropout=0.1"]).model.settings["dropout"] == 0.1


@functools.cache
def composed(*words: str) -> dict[str, Any]:
    return compose(words).to_dict()


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        ([], "choices.scale", "cpu"),
        ([], "choices.solver", "auto"),
        ([], "choices.schedule", "converge"),
        ([], "solver.tolerance", 0.1),
        ([], "solver.picard.outlier_quantile", 0.25),
        (["model=fp_rnn_k"], "solver.picard.outlier_quantile", 0.1),
        (["model=fp_mamba2_k"], "solver.picard.outlier_quantile", 0.1),
        (["model=lstm", "solver=picard"], "solver.outlier_quantile", 0.25),
        (["solver=anderson"], "solver.outlier_quantile", 0.25),
        *(
            (["model=fp_rnn_h", f"solver={s}"], "solver.outlier_quantile", 0.1)
            for s in ("picard", "anderson", "lagged")
        ),
        (["solver=picard", "model=fp_mamba2_h"], "solver.outlier_quantile", 0.1),
        (["model=fp_rnn_h", "solver=picard", "solver.outlier_quantile=0.3"], "solver.outlier_quantile", 0.3),
        (["solver.outlier_quantile=0.25", "model=fp_rnn_h", "solver=picard"], "solver.outlier_quantile", 0.25),
        ([], "solver.inner_max_iterations", 100),
        ([], "schedule.max_iterations", 100),
        ([], "schedule.evaluation_max_iterations", 1000),
        (["schedule=gamma"], "schedule.mean", 4.0),
        (["schedule=gamma"], "schedule.shape", 4.0),
        ([], "choices.gradient", "one_step"),
        ([], "gradient._target_", "fpexp.fixed_point.OneStep"),
        ([], "model.dependence", {"lambda": False, "Q": True, "b": True, "c": True, "gate": True}),
        (["model=fp_mamba_h"], "model.channel_mixer.a_max", 2.0),
        (["model=fp_mamba_dplr"], "model.channel_mixer.a_max", 2.0),
        (["model=fp_mamba_k"], "model.channel_mixer.a_max", 2.0),
        (["model=fp_mamba_k"], "model.channel_mixer.normalise", "spectral"),
        ([], "model.weight_norm", False),
        (["scale=paper"], "model.weight_norm", True),
        ([], "model.expand", 2.0),
        ([], "model.dt_rank", None),
        ([], "model.state_size", 16),
        ([], "model.norm", "layer_norm"),
        ([], "model.norm_epsilon", 1e-6),
        ([], "model.conv_width", 0),
        ([], "task.bos", False),
        ([], "task.lengths.policy", "grow"),
        ([], "task.lengths.min", 2),
        (["scale=paper"], "task.lengths", {"policy": "fixed", "min": 16, "max": 16, "mastery": 0.75, "rehearsal": 0.0}),
        (["scale=paper"], "training.steps", 125_000),
        (["scale=paper"], "training.batch_size", 512),
        (["scale=paper"], "training.lr", 1e-4),
        (["scale=paper"], "training.weight_decay", 0.01),
        (["scale=paper"], "training.betas", [0.9, 0.999]),
        (["scale=paper"], "training.clip", 1.0),
        (["scale=paper"], "training.lr_schedule", "cosine"),
        (["scale=paper"], "model.d_model", 512),
        ([], "precision", "auto"),
        ([], "results_dir", "results"),
    ],
)
def test_defaults_are_those_of_the_specification(words: list[str], path: str, expected: Any) -> None:
    value: Any = composed("task=a5", "model=fp_mamba_h", *words)
    for name in path.split("."):
        value = value[name]
    assert value == expected


def test_the_model_s_outliers_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep too, whose jobs Hydra composes; and they are no key of a run."""
    monkeypatch.chdir(tmp_path)
    cli = CommandLine(capsys, tmp_path)
    words = ["task=a4", "model=fp_rnn_h", *TINY, "training.steps=1"]
    assert cli("train", *words, "solver=picard").code == 0
    assert cli("train", "-m", *words, "solver=anderson,lagged").code == 0
    saved = [yaml.safe_load((run.path / "config.yaml").read_text()) for run in cli.runs()]
    assert len(saved) == 3
    assert all(tree["solver"]["outlier_quantile"] == 0.1 and "of_model" not in tree for tree in saved)


def test_what_the_model_decides_is_overridden_where_it_is_used() -> None:
    with pytest.raises(UserError, match=r"'of_model\.outlier_quantile' is .* set solver\.outlier_quantile instead"):
        compose([*BASE, "of_model.outlier_quantile=0.2"])


@pytest.mark.parametrize(
    ("task", "scale", "model", "conv_width", "state_size"),
    [
        ("a5", "paper", "fp_mamba_h", 0, 16),
        ("modular_arithmetic", "paper", "fp_mamba_h", 0, 16),
        ("copy", "cpu", "fp_mamba_k", 4, 16),
        ("copy", "paper", "fp_mamba_h", 4, 32),
        ("copy", "paper", "mamba", 4, 32),
        ("copy", "paper", "fp_mamba2_h", 4, 128),
        ("copy", "paper", "lstm", None, None),
        ("fineweb", "cpu", "fp_mamba2_h", 4, 128),
        ("fineweb", "paper", "fp_mamba_h", 4, 16),
    ],
)
def test_a_protocol_has_convolution_and_state_for_models_that_have_them(
    task: str, scale: str, model: str, conv_width: int | None, state_size: int | None
) -> None:
    config = compose([f"task={task}", f"model={model}", f"scale={scale}"])
    assert config.model.settings.get("conv_width") == conv_width
    assert config.model.settings.get("state_size") == state_size
    assert "of_task" not in config.to_dict()
    with pytest.raises(UserError, match=r"'of_task\.fp\.conv_width' is .* set model\.conv_width instead"):
        compose([*BASE, "of_task.fp.conv_width=2"])


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        (["task=copy"], "model.d_model", 1024),
        (["task=copy"], "task.alphabet", 26),
        (["task=copy"], "task.context", 256),
        (["task=copy"], "task.packing", True),
        (["task=copy"], "task.lengths", {"policy": "fixed", "min": 5, "max": 50, "mastery": 0.9, "rehearsal": 0.0}),
        (["task=copy"], "training.steps", 10_000),
        (["task=copy"], "training.batch_size", 128),
        (["task=copy"], "training.lr", 1e-5),
        (["task=copy"], "training.weight_decay", 0.1),
        (["task=copy"], "training.clip", 1.0),
        (["task=copy"], "training.lr_schedule", "linear"),
        (["task=copy"], "training.warmup_steps", 300),
        (["task=copy"], "training.betas", [0.9, 0.999]),
        (["task=modular_arithmetic"], "model.d_model", 128),
        (["task=modular_arithmetic"], "task.modulus", 5),
        (["task=modular_arithmetic"], "task.context", 256),
        (["task=modular_arithmetic"], "task.lengths.min", 3),
        (["task=modular_arithmetic"], "task.lengths.max", 40),
        (["task=modular_arithmetic"], "training.steps", 100_000),
        (["task=modular_arithmetic"], "training.batch_size", 256),
        (["task=modular_arithmetic"], "training.lr", 1e-3),
        (["task=modular_arithmetic"], "training.weight_decay", 0.1),
        (["task=modular_arithmetic"], "training.clip", None),
        (["task=modular_arithmetic"], "training.lr_schedule", "cosine"),
        (["task=modular_arithmetic"], "training.final_lr_fraction", 1e-3),
        (["task=modular_arithmetic"], "training.warmup_steps", 10_000),
        (["task=fineweb"], "model.d_model", 768),
        (["task=fineweb"], "model.layers", 12),
        (["task=fineweb", "model=transformer"], "model.layers", 12),
        (["task=modular_arithmetic"], "model.layers", 2),
        (["task=copy"], "model.layers", 1),
        (["task=copy", "model=mamba"], "model.layers", 2),
        (["task=fineweb"], "model.expand", 8 / 3),
        (["task=fineweb"], "model.gate", "inside"),
        (["task=fineweb", "model=mamba"], "model.expand", 2),
        (["task=fineweb"], "task.tokenizer", "gpt2"),
        (["task=fineweb"], "task.context", 2048),
        (["task=fineweb"], "task.validation_tokens", 200_000),
        (["task=fineweb"], "training.steps", 4800),
        (["task=fineweb"], "training.batch_size", 256),
        (["task=fineweb"], "training.lr", 4e-3),
        (["task=fineweb"], "training.weight_decay", 0.1),
        (["task=fineweb"], "training.clip", 1.0),
        (["task=fineweb"], "training.lr_schedule", "cosine"),
        (["task=fineweb"], "training.warmup_steps", 480),
        (["task=fineweb"], "training.betas", [0.9, 0.95]),
    ],
)
def test_protocols_at_paper_scale_are_the_papers(words: list[str], path: str, expected: Any) -> None:
    value: Any = composed("model=fp_mamba_h", "scale=paper", *words)
    for name in path.split("."):
        value = value[name]
    assert value == expected


# CASES 32


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_typo_on_the_command_line(plus: str) -> None:
    with pytest.raises(UserError) as caught:
        compose([*BASE, f"{plus}training.lrr=1"])
    assert str(caught.value) == "unknown key 'training.lrr'; did you mean 'training.lr'?"


@pytest.fixture
def saved(tmp_path: Path) -> RunConfig:
    return tiny(tmp_path / "results")


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_the_same_typo_in_a_config_file(saved: RunConfig, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"run.{suffix}"
    tree = saved.to_dict()
    tree["training"]["lrr"] = 1
    path.write_text(yaml.safe_dump(tree) if suffix == "yaml" else json.dumps(tree))
    with pytest.raises(UserError) as caught:
        read_run_config([f"config={path}"])
    assert str(caught.value) == f"{path}: unknown key 'training.lrr'; did you mean 'training.lr'?"


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_the_same_typo_beside_a_config_file(saved: RunConfig, tmp_path: Path, plus: str) -> None:
    write_config(saved, tmp_path / "run.yaml")
    with pytest.raises(UserError) as caught:
        read_run_config([f"config={tmp_path / 'run.yaml'}", f"{plus}training.lrr=1"])
    assert str(caught.value) == "unknown key 'training.lrr'; did you mean 'training.lr'?"


def test_a_typo_in_the_section_beside_a_config_file(saved: RunConfig, tmp_path: Path) -> None:
    write_config(saved, tmp_path / "run.yaml")
    with pytest.raises(UserError, match=r"unknown key 'trainin.*did you mean 'training"):
        read_run_config([f"config={tmp_path / 'run.yaml'}", "trainin.lr=1"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model=lstn"], ["unknown model 'lstn'", "did you mean 'lstm'?", "(deltaproduct, fp_mamba2_h, "]),
        (["modle=lstm"], ["unknown key 'modle'", "did you mean 'model'?"]),
        (["model=lstm,zz"], ["'model=lstm,zz'", "-m"]),
        (["seed=0,1"], ["'seed=0,1'", "-m"]),
        (["seed=range(3)"], ["'seed=range(3)'", "-m"]),
        (["trainin.lr=1"], ["unknown key 'trainin", "did you mean 'training"]),
        (["lr=1"], ["unknown key 'lr'", "did you mean 'training.lr'?"]),
        (["dropout=0.1"], ["unknown key 'dropout'", "did you mean 'model.dropout'?"]),
        (["model=fp_mamba_h", "model.channel_mixer.rnak=2"], ["'model.channel_mixer.rnak'", "channel_mixer.rank'?"]),
        (
            ["solver=pickard"],
            ["unknown solver 'pickard'", "did you mean 'picard'?", "(anderson, auto, lagged, picard, sequential)"],
        ),
        (["gradient=implicite"], ["unknown gradient 'implicite'", "'implicit'?", "(implicit, one_step, unrolled)"]),
        (["gradient=unrolled", "gradient.steps=0"], ["gradient.steps=0 is out of range"]),
        (["gradient=unrolled", "gradient.step=2"], ["'gradient.step'", "did you mean 'gradient.steps'?"]),
        (["gradient=implicit", "gradient.tolerance=0"], ["gradient.tolerance=0 is out of range"]),
        (["gradient=implicit", "gradient.restart=0"], ["gradient.restart=0 is out of range"]),
        (["gradient.tolerance=0.1"], ["unknown key 'gradient.tolerance'"]),
        (["model.gradient=one_step"], ["unknown key 'model.gradient'"]),
        (["scale=huge"], ["unknown scale 'huge'", "(cpu, gpu, paper)"]),
        (["tracking=wanbd"], ["unknown tracking 'wanbd'", "did you mean 'wandb'?"]),
        (["experiment=demo_a"], ["unknown experiment 'demo_a'", "did you mean 'demo_a"]),
        (["training.lr=abc"], ["training.lr='abc' must be a finite number"]),
        (["training=5"], ["training=5 must be a mapping"]),
        (["~training.lr"], ["training.lr is missing"]),
        (["training.lr=[1"], ["cannot read 'training.lr=[1'"]),
        (
            ["task.tokenizer=~x/t.json"],
            ["cannot read 'task.tokenizer=~x/t.json'; quote special characters: \"task.tokenizer='~x/t.json'\""],
        ),
        (["task.files=it's"], ["cannot read 'task.files=it's'; quote special characters: 'task.files="]),
        (["a b=1"], ["cannot read 'a b=1'; quote special characters"]),
        (["lstm"], ["'lstm' is not an override", "<key>=<value>"]),
        (["precision=fp8"], ["unknown precision 'fp8'", "(auto, float32, bfloat16, float64)"]),
        (["seed=-1"], ["seed=-1 is out of range"]),
        (["training.clip=0"], ["training.clip=0 is out of range"]),
        (["training.lr=${nowhere}"], ["nowhere"]),
        (["training.accumulation=5"], ["training.accumulation=5 is more than training.batch_size=4"]),
        (["evaluation.lengths=[]"], ["evaluation.lengths=[] is empty"]),
        (["task.lengths.min=5"], ["task.lengths.min=5 is more than task.lengths.max=4"]),
        (["model=null"], ["model"]),
        (["task=null"], ["task"]),
    ],
)
def test_a_mistake_is_a_user_error_with_the_key(words: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        compose([*BASE, *TINY, *words])
    message = str(caught.value)
    assert "\n" not in message
    missing = [part for part in parts if part not in message]
    assert not missing, message


def test_missing_groups_are_asked_for() -> None:
    with pytest.raises(
        UserError, match=r"which task\? write task=<name> \(a4, a5, copy, fineweb, group, modular_arithmetic, s5\)"
    ):
        compose(["model=lstm"])
    with pytest.raises(UserError, match=r"which model\? write model=<name>"):
        compose(["task=a4"])
    with pytest.raises(UserError, match=r"which model\? write model=<name>"):
        compose_jobs(["task=a4,a5"])


def test_a_length_that_does_not_fit_its_context_names_its_key() -> None:
    for words, key in (
        (["evaluation.lengths=[2,4097]"], r"evaluation.lengths\[1\]=4097"),
        (["task.bos=true", "evaluation.lengths=[4096]"], r"evaluation.lengths\[0\]=4096"),
        (["task.lengths.max=4097"], "task.lengths.max=4097"),
        (["task.context=8"], "task.lengths.max=16"),
    ):
        with pytest.raises(UserError, match=f"{key} needs .* tokens, more than task.context="):
            check(compose([*BASE, *words]))


@pytest.mark.parametrize("with_file", [False, True])
def test_numbers_are_numbers(saved: RunConfig, tmp_path: Path, with_file: bool) -> None:
    words = ["training.lr=1e-3", "training.steps=2e3", "training.weight_decay=1E-2", "model.dropout=.5"]
    if with_file:
        write_config(saved, tmp_path / "run.yaml")
        config = read_run_config([f"config={tmp_path / 'run.yaml'}", *words])
    else:
        config = compose([*BASE, *words])
    assert config.training.lr == 0.001
    assert config.training.steps == 2000
    assert type(config.training.steps) is int
    assert config.training.weight_decay == 0.01
    assert config.model.settings["dropout"] == 0.5


@pytest.mark.parametrize("number", ["1e-3", "1.0e-3", "0.001", "1E-3"])
def test_numbers_in_a_config_file_are_numbers(saved: RunConfig, tmp_path: Path, number: str) -> None:
    path = tmp_path / "run.yaml"
    lines = yaml.safe_dump(saved.to_dict(), sort_keys=False).splitlines()
    changed = [f"  lr: {number}" if line.startswith("  lr:") else line for line in lines]
    path.write_text("\n".join(changed))
    assert read_config(path).training.lr == 0.001


def test_small_numbers_survive_saving(tmp_path: Path) -> None:
    config = tiny(tmp_path, "training.lr=1e-5", "training.weight_decay=1e-20", "solver.picard.divergence_limit=1e20")
    write_config(config, tmp_path / "run.yaml")
    assert read_config(tmp_path / "run.yaml") == config


def test_a_text_that_looks_like_a_list_or_has_spaces(saved: RunConfig, tmp_path: Path) -> None:
    write_config(saved, tmp_path / "run.yaml")
    for words in ([*task_words("group"), "model=lstm"], ["task=group", "model=lstm", "task.group=A4 x Z5"]):
        assert compose(words).task.settings["group"] == "A4 x Z5"
    changed = read_run_config([f"config={tmp_path / 'run.yaml'}", "task.group=A4 x Z5", "evaluation.lengths=[3, 7]"])
    assert changed.task.settings["group"] == "A4 x Z5"
    assert changed.evaluation.lengths == [3, 7]


def test_a_group_cannot_be_chosen_for_a_saved_config(saved: RunConfig, tmp_path: Path) -> None:
    write_config(saved, tmp_path / "run.yaml")
    for group in GROUPS:
        with pytest.raises(UserError, match=f"'{group}=x' chooses a group.*{group}.<key>=<value>"):
            read_run_config([f"config={tmp_path / 'run.yaml'}", f"{group}=x"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "is neither YAML nor JSON"),
        (b"- 1\n- 2\n", "holds no config"),
        (b"", "holds no config"),
        (b"task: {}\n", "model is missing"),
        (bytes(range(128, 256)), "run.yaml"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_run_config([f"config={path}"])
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_config_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the config .*nowhere.yaml: No such file"):
        read_run_config([f"config={tmp_path / 'nowhere.yaml'}"])


# The saved config


@pytest.mark.parametrize("model", choices("model"))
def test_round_trip(model: str, tmp_path: Path) -> None:
    sizes = ["model.head_size=16"] if model == "mamba2" else []  # a head of the default size does not fit
    config = check(tiny(tmp_path, "model.dropout=0.1", *sizes, model=model)).config
    assert RunConfig.parse(config.to_dict()) == config
    assert RunConfig.parse(json.loads(json.dumps(config.to_dict()))) == config
    write_config(config, tmp_path / "run.yaml")
    assert read_config(tmp_path / "run.yaml") == config


def test_fingerprint_is_of_what_decides_the_numbers(tmp_path: Path) -> None:
    fingerprint = tiny(tmp_path).fingerprint()
    for same in (["tracking=wandb"], ["results_dir=elsewhere"], ["sweep.rerun=true"], ["threads=3"]):
        assert tiny(tmp_path, *same).fingerprint() == fingerprint
    for other in (
        ["seed=1"],
        ["training.lr=0.5"],
        ["evaluation.samples=9"],
        ["task.group=S3"],
        ["model.layers=2"],
        ["gradient=implicit"],
    ):
        assert tiny(tmp_path, *other).fingerprint() != fingerprint


def test_saved_config_runs_again_with_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fpexp = CommandLine(capsys, tmp_path)
    first = fpexp.train("model.channel_mixer.rank=1", model="fp_mamba_h")
    assert fpexp("train", f"config={first.path / 'config.yaml'}").code == 0
    second = fpexp.runs()[-1]
    assert second.id != first.id
    assert second.config() == first.config()
    environments = [json.loads((run.path / "environment.json").read_text()) for run in (first, second)]
    prints = [environment["sittings"][0]["fingerprint"] for environment in environments]
    assert prints == [first.config().fingerprint()] * 2
    for name in ("metrics", "curve"):
        rows = [without_time(read_rows(getattr(run, name))) for run in (first, second)]
        assert rows[0]
        assert rows[0] == rows[1]


BARE_MACHINE = """
import sys
for name in ("yaml", "hydra", "omegaconf", "wandb", "datasets", "rich"):
    sys.modules[name] = None
import torch
from fpexp.cli import main
assert main(["train", "config=run.json"]) == 0
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_json_config_runs_without_yaml_hydra_wandb_datasets_and_rich(tmp_path: Path) -> None:
    """On the threads that the config asks for, during the run and after it."""
    config = check(tiny(Path("results"), "threads=1", model="fp_mamba_h")).config
    (tmp_path / "run.json").write_text(json.dumps(config.to_dict()))
    answer = run_python(BARE_MACHINE, tmp_path, OMP_NUM_THREADS="2")
    assert answer.code == 0, answer.err
    (path,) = (tmp_path / "results/runs").iterdir()
    assert read_config(path / "config.yaml") == config
    assert json.loads((path / "status.json").read_text())["state"] == "finished"
    assert len(read_rows(path / "curve.jsonl")) == 2
