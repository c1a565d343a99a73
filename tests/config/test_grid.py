"""sweep.grid: a list of products, what the command line makes of it, and every experiment in conf/."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from fpexp.build import check
from fpexp.config.catalogue import choices
from fpexp.config.compose import compose, compose_jobs, expand
from fpexp.config.grid import grid_jobs
from fpexp.config.run import RunConfig
from fpexp.errors import UserError

GRID: list[dict[str, Any]] = [
    {"model": "fp_mamba_h", "model.channel_mixer.rank": "1,2", "model.delta_range": [0.1, 1.0]},
    {"model": "lstm,gdn"},
    {"model": "gdn", "model.decay": False, "training.clip": None},
]


def texts(grid: Any, *given: str) -> list[str]:
    return [" ".join(job.words) for job in grid_jobs(grid, given)]


def test_a_grid_is_a_list_of_products() -> None:
    assert texts(GRID, "seed=0") == [
        "model=fp_mamba_h model.channel_mixer.rank=1 model.delta_range=[0.1,1.0]",
        "model=fp_mamba_h model.channel_mixer.rank=2 model.delta_range=[0.1,1.0]",
        "model=lstm",
        "model=gdn",
        "model=gdn model.decay=false training.clip=null",
    ]


def test_a_group_on_the_command_line_chooses_rows_and_another_key_takes_the_place_of_theirs() -> None:
    assert texts(GRID, "model=gdn") == ["", "model.decay=false training.clip=null"]
    assert texts(GRID, "model=gdn", "++model.decay=true") == ["", "training.clip=null"]
    assert texts(GRID, "model=fp_mamba_h", "model.channel_mixer.rank=8") == ["model.delta_range=[0.1,1.0]"]
    assert texts([{"task": "a5", "model": "lstm"}, {"task": "s5"}], "task=s5", "model=gdn") == [""]
    assert texts(GRID, "model='lstm'") == [""]


def test_jobs_of_two_rows_are_one_where_their_values_are() -> None:
    rows = [
        {"training.lr": "1e-3", "model.delta_range": [0.1, 1.0]},
        {"training.lr": 0.001, "model.delta_range": "[0.1, 1.0]"},
    ]
    assert texts([*rows, {"training.lr": "2e-3"}]) == [
        "training.lr=1e-3 model.delta_range=[0.1,1.0]",
        "training.lr=2e-3",
    ]


@pytest.mark.parametrize(
    ("grid", "given", "parts"),
    [
        (GRID, ["model=lstn"], ["model=lstn is in no row of sweep.grid; did you mean 'lstm'?", "sweep.grid=null"]),
        ([{"task": "a5", "model": "lstm"}, {"task": "s5"}], ["task=a5", "model=gdn"], ["model=gdn is in no row"]),
        (
            [{"task": "a5", "model": "lstm"}, {"task": "s5", "model": "gdn"}],
            ["task=a5", "model=gdn"],
            ["no row of sweep.grid has all of task=a5 model=gdn"],
        ),
        ({"model": "lstm"}, [], ["sweep.grid=", "must be a list of rows"]),
        ([], [], ["must be a list of rows"]),
        ([GRID[0], "model=lstm"], [], ["sweep.grid[1]='model=lstm' must be a row"]),
        ([{"model": {"layers": 2}}], [], ["sweep.grid[0].model={'layers': 2} must be a value", "with dots"]),
        ([{"sweep.rerun": True}], [], ["sweep.grid[0]: 'sweep.rerun' is not of a single run"]),
        ([{"hydra/launcher": "joblib"}], [], ["'hydra/launcher' is not of a single run"]),
        ([{"model": "lstm"}, {"training.lr": "[1"}], [], ["sweep.grid[1]: cannot read 'training.lr=[1'"]),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(grid: Any, given: list[str], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        grid_jobs(grid, given)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, str(caught.value)


@pytest.fixture
def mine(tmp_path: Path) -> Any:
    """Return what writes an experiment outside the package, and the words that choose it."""

    def write(text: str) -> list[str]:
        folder = tmp_path / "conf" / "experiment"
        folder.mkdir(parents=True, exist_ok=True)
        head = "# @package _global_\ndefaults:\n  - override /task: a4\n  - override /model: lstm\n"
        (folder / "mine.yaml").write_text(head + text)
        return ["experiment=mine", f"hydra.searchpath=[file://{tmp_path / 'conf'}]"]

    return write


def test_a_typo_in_a_row_names_the_whole_key(mine: Any) -> None:
    for row, message in (
        ("model: fp_mamba_h, model.channel_mixer.rnak: '1,2'", "unknown key 'model.channel_mixer.rnak'; did you mean"),
        ("training.lrr: 1", "unknown key 'training.lrr'; did you mean 'training.lr'?"),
        ("modle: lstm", "unknown key 'modle'; did you mean 'model'?"),
    ):
        with pytest.raises(UserError, match=message.replace("?", r"\?")):
            compose_jobs(mine(f"sweep:\n  grid:\n    - {{{row}}}\n"))


def test_a_mistake_in_a_grid_names_the_file_and_the_row(mine: Any, tmp_path: Path) -> None:
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    good = "{model: lstm, training.steps: '5,6'}"
    for row, message in (
        ("{model: fp_mamba_h, model.channel_mixer.rank: 0}", "[1]: model.channel_mixer.rank=0 is out of range"),
        ("{model: lstm, training.lr: '[1'}", "[1]: cannot read 'training.lr=[1'"),
        ("{model: lstm, training: {lr: 1}}", "[1].training={'lr': 1} must be a value"),
        ("lstm", "[1]='lstm' must be a row"),
    ):
        words = mine(f"sweep:\n  grid:\n    - {good}\n    - {row}\n")
        with pytest.raises(UserError) as caught:
            compose_jobs(words)
        assert str(caught.value).startswith(f"{file}: sweep.grid{message}"), str(caught.value)
    words = mine(f"sweep:\n  grid:\n    - {good}\n")
    with pytest.raises(UserError, match=r"^unknown key 'training\.lrr'; did you mean"):
        compose_jobs([*words, "training.lrr=1"])
    with pytest.raises(UserError, match=r"^sweep.grid\[0\]: unknown key 'model.layer'; did you mean"):
        compose_jobs([*words, "sweep.grid=[{model: lstm, model.layer: 3}]"])


def test_a_file_that_is_no_yaml_or_refers_to_nothing_is_said_in_a_line(mine: Any) -> None:
    for text in ("seed: [1\n", "seed: 1\nseed: 2\n", "a: b: c\n", "seed: ${nowhere}\n", "results_dir: ${nowhere}\n"):
        with pytest.raises(UserError) as caught:
            compose_jobs(mine(text))
        assert "\n" not in str(caught.value)


def test_rows_times_words_and_the_grid_is_no_part_of_a_run(mine: Any) -> None:
    words = mine("sweep:\n  grid:\n    - {seed: 7, training.steps: '10,20'}\n    - {task: a5, model: lstm}\n")
    jobs = compose_jobs([*words, "training.lr=1e-3,2e-3"])
    found = [(job.choices.task, job.seed, job.training.steps, job.training.lr) for job in jobs]
    assert found == [
        (task, seed, steps, lr)
        for lr in (1e-3, 2e-3)
        for task, seed, steps in (("a4", 7, 10), ("a4", 7, 20), ("a5", 0, 6000))
    ]
    assert [job.seed for job in compose_jobs([*words, "seed=1,2", "task=a4"])] == [1, 1, 2, 2]
    single = compose(words)
    assert "grid" not in single.to_dict()["sweep"]
    assert single.fingerprint() == compose(["task=a4", "model=lstm"]).fingerprint()
    assert len(compose_jobs([*words, "sweep.grid=null"])) == 1


def test_rows_may_depend_on_the_scale(mine: Any) -> None:
    words = mine(
        "budget:\n  cpu: {steps: 10}\n  gpu: {steps: 20}\n"
        "sweep:\n  grid:\n    - training.steps: ${budget.${scale.name}.steps}\n"
    )
    jobs = compose_jobs([*words, "scale=cpu,gpu"])
    assert [(job.choices.scale, job.training.steps) for job in jobs] == [("cpu", 10), ("gpu", 20)]
    with pytest.raises(UserError, match=r"'budget\.cpu\.steps' is for the files in conf/; set training\.steps"):
        expand([*words, "budget.cpu.steps=5"])
    with pytest.raises(UserError, match=r"Interpolation key 'budget\.paper\.steps' not found"):
        expand([*words, "scale=paper"])


def test_what_is_hydra_s_own_takes_one_value() -> None:
    with pytest.raises(UserError, match=r"'hydra.launcher.n_jobs=1,2': what is Hydra's own takes one value"):
        expand(["task=a4", "model=lstm", "hydra.launcher.n_jobs=1,2"])


@functools.cache
def jobs_of(experiment: str, scale: str) -> list[RunConfig]:
    return compose_jobs([f"experiment={experiment}", f"scale={scale}"])


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes_and_builds_every_job(experiment: str) -> None:
    jobs = jobs_of(experiment, "cpu")
    assert {(job.choices.experiment, job.choices.scale) for job in jobs} == {(experiment, "cpu")}
    for job in {job.replace(seed=0).fingerprint(): job for job in jobs}.values():
        check(job)
    assert len({job.fingerprint() for job in jobs}) == len(jobs)
    assert len(jobs) > 1 or experiment == "demo_a5"


@pytest.mark.parametrize("scale", ["gpu", "paper"])
@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_model_of_an_experiment_builds_at_larger_scales(experiment: str, scale: str) -> None:
    """One job of each, since Hydra takes its time for each."""
    jobs = expand([f"experiment={experiment}", f"scale={scale}"])
    groups = {tuple(word for word in job if word.startswith(("task=", "model="))): job for job in jobs}
    for job in groups.values():
        config = compose(job)
        assert (config.choices.experiment, config.choices.scale) == (experiment, scale)
        check(config)


STUDIES_ITERATIONS = ("fig1_iterations", "fig3_mixers", "fig7_fig8_language", "fig11_cap", "table2_complexity")


@pytest.mark.parametrize("experiment", STUDIES_ITERATIONS)
def test_what_studies_iterations_counts_those_of_whole_sequences(experiment: str) -> None:
    fixed_points = [job for job in jobs_of(experiment, "cpu") if job.choices.model.startswith("fp_")]
    assert fixed_points
    assert {job.choices.solver for job in fixed_points} == {"picard"}


def test_figures_share_their_runs() -> None:
    caps = {job.fingerprint() for job in jobs_of("fig11_cap", "cpu")}
    state_tracking = {job.fingerprint() for job in jobs_of("fig4_state_tracking", "cpu")}
    assert caps <= {job.fingerprint() for job in jobs_of("fig1_iterations", "cpu")}
    assert {job.fingerprint() for job in compose_jobs(["experiment=fig1_iterations", "model=lstm"])} <= state_tracking
    assert compose(["experiment=demo_a5"]).fingerprint() in state_tracking
    assert jobs_of("fig12_sequential_parallel", "cpu")[0].fingerprint() in state_tracking
    longest = compose_jobs(["experiment=fig6_training_time", "training.steps=6000"])
    assert longest[0].fingerprint() in state_tracking
