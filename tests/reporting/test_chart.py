"""Figures as numbers: their kinds, what is drawn across and upright, and that pictures are the same bytes."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from recorded import curve_row

from fpexp.reporting.chart import Chart, Panel
from fpexp.reporting.drawing import SHAPES, STROKES, draw
from fpexp.reporting.layout import Figure, Layout
from fpexp.reporting.measured import lengths_of, longest_above, summarise
from fpexp.reporting.names import COLOURS, DASHES, MARKERS, MODELS, Style, label_of, styles
from fpexp.reporting.outcome import Plan, PlannedRun, match
from fpexp.reporting.panels import charts_of
from fpexp.reporting.record import Evaluation, Record
from fpexp.reporting.report import Found, make_report


def config(model: str = "lstm", task: str = "a5", seed: int = 0, cap: int = 2) -> dict[str, Any]:
    return {
        "choices": {"task": task, "model": model, "scale": "cpu"},
        "task": {"lengths": {"max": 4}},
        "schedule": {"max_iterations": cap},
        "evaluation": {"lengths": [2, 4, 8, 16]},
        "seed": seed,
        "device": "cpu",
    }


def job(seed: int = 0, cap: int = 2, **values: str) -> PlannedRun:
    settings = {**values, "schedule.max_iterations": str(cap)}
    made = config(values.get("model", "lstm"), values.get("task", "a5"), seed, cap)
    return PlannedRun(seed, settings, "task=a5", made, frozenset([repr(sorted(settings.items()))]))


def run(of: PlannedRun, accuracies: Any = (1.0, 0.9, 0.5, 0.2), **more: Any) -> Record:
    (identity,) = of.identities
    metrics = tuple(
        {"kind": "validation", "step": step, "seconds": step * 10.0, "token_accuracy": step / 10, "length": 4, **more}
        for step in (2, 4)
    )
    rows = tuple(curve_row(n, a, iterations_mean=2.0 * n) for n, a in zip((2, 4, 8, 16), accuracies, strict=True))
    ended = datetime(2026, 1, 1, tzinfo=UTC)
    return Record(f"{identity}-{of.seed}", "runs", identity, of.config, "finished", "", ended, rows, metrics, {})


def charts(layout: Layout, jobs: list[PlannedRun], runs: list[Record]) -> tuple[Chart, ...]:
    return charts_of(match(Plan("x", "", "", tuple(jobs), layout), runs))


def chart(layout: Layout, jobs: list[PlannedRun], runs: list[Record]) -> Chart:
    (made,) = charts(layout, jobs, runs)
    return made


def lines(panel: Panel) -> dict[str, list[tuple[float, float]]]:
    return {line.label: [(point.x, round(point.y.mean, 6)) for point in line.points] for line in panel.lines}


def test_mean_spread_and_what_is_no_number() -> None:
    found = summarise([("a", 1.0), ("b", 3.0), ("c", None)])
    assert found is not None
    assert (found.mean, found.spread, found.n) == (2.0, pytest.approx(2**0.5), 2)
    assert summarise([("a", 1.0)]).spread is None  # type: ignore[union-attr]
    assert summarise([("a", None)]) is None


def test_curves_by_length_with_a_panel_for_each_task_and_metric() -> None:
    jobs = [job(task=task, model=model) for task in ("a5", "s5") for model in ("lstm", "mamba")]
    made = chart(Layout(metrics=["token_accuracy", "iterations_mean"]), jobs, [run(of) for of in jobs[:3]])
    assert [(panel.title, panel.y.label) for panel in made.panels] == [
        ("A5", "accuracy of tokens"),
        ("A5", "iterations"),
        ("S5", "accuracy of tokens"),
        ("S5", "iterations"),
    ]
    first, iterations, third, _ = made.panels
    assert lines(first) == {name: [(2, 1.0), (4, 0.9), (8, 0.5), (16, 0.2)] for name in ("LSTM", "Mamba")}
    assert [(line.label, line.index) for line in third.lines] == [("LSTM", 0)]
    assert (first.levels, first.marks) == (((1 / 12, "chance"),), ((4.0, "longest in training"),))
    assert iterations.levels == ()
    assert first.x.scale == "log2"


def test_a_line_keeps_its_colour_when_others_are_missing() -> None:
    jobs = [job(model=model, cap=cap) for model, cap in (("lstm", 2), ("gdn", 2), ("gdn", 4))]
    (whole,) = chart(Layout(), jobs, [run(of) for of in jobs]).panels
    (panel,) = chart(Layout(), jobs, [run(jobs[2])]).panels
    assert [line.label for line in whole.lines] == [
        "LSTM, max_iterations=2",
        "Gated DeltaNet, max_iterations=2",
        "Gated DeltaNet, max_iterations=4",
    ]
    assert panel.lines == whole.lines[2:]


def test_no_two_series_look_alike_and_a_model_keeps_its_colour() -> None:
    models = [*MODELS, "own", "another"]
    looks = styles([(f"{model} {i}", model) for i in range(MARKERS * DASHES // 2) for model in models])
    assert len(set(looks.values())) == len(looks) == len(models) * (MARKERS * DASHES // 2)
    assert {looks[f"fp_mamba_h {i}"].colour for i in range(9)} == {list(MODELS).index("fp_mamba_h")}
    assert looks["own 0"] == Style(len(MODELS), len(MODELS) % MARKERS, 0)
    alone = styles((f"r={i}", "fp_mamba_h") for i in range(MARKERS * DASHES))
    assert len(set(alone.values())) == MARKERS * DASHES
    assert len({look.marker for look in list(alone.values())[:MARKERS]}) == MARKERS
    assert len({named.on_white for named in COLOURS}) == len({named.on_dark for named in COLOURS}) == len(COLOURS)


def test_pictures_and_the_page_have_every_marker_and_dash() -> None:
    assert (len(SHAPES), len(STROKES)) == (MARKERS, DASHES)
    script = (files("fpexp.reporting.page") / "page.js").read_text()
    shapes, dashes = (re.search(rf"const {name} = \[(.*?)\];", script, re.S) for name in ("SHAPES", "DASHES"))
    assert shapes is not None
    assert dashes is not None
    assert shapes[1].count('"') == 2 * MARKERS
    assert dashes[1].count('"') == 2 * DASHES


def test_over_a_setting_with_a_line_for_each_length() -> None:
    jobs = [job(cap=cap, seed=seed) for cap in (8, 2) for seed in (0, 1)]
    runs = [run(of, (1.0, 0.1 * of.config["schedule"]["max_iterations"] + 0.02 * of.seed, 0.5, None)) for of in jobs]
    layout = Layout(figures=[Figure("setting", x=["schedule.max_iterations"])], at=[4, 8])
    (panel,) = chart(layout, jobs, runs).panels
    assert lines(panel) == {"length 4": [(2, 0.21), (8, 0.81)], "length 8": [(2, 0.5), (8, 0.5)]}
    assert panel.x.label == "max iterations"
    assert panel.lines[0].points[0].y.n == 2


def test_a_panel_whose_lengths_the_layout_does_not_name_has_its_own() -> None:
    jobs = [job(task=task) for task in ("a5", "copy")]
    layout = Layout(figures=[Figure("setting", x=["schedule.max_iterations"])], at={"a5": [16]})
    one, other = chart(layout, jobs, [run(of) for of in jobs]).panels
    assert lines(one) == {"length 16": [(2, 0.2)]}
    assert lines(other) == {"length 4": [(2, 0.9)], "length 8": [(2, 0.5)], "length 16": [(2, 0.2)]}


def test_the_longest_length_above_90_percent_by_training_time() -> None:
    jobs = [job(cap=cap) for cap in (2, 4)]
    runs = [run(jobs[0]), run(jobs[1], (1.0, 0.95, 0.91, 0.2))]
    figure = Figure("setting", ["longest_above_90"], x=["seconds"])
    (panel,) = chart(Layout(figures=[figure]), jobs, runs).panels
    assert lines(panel) == {"max_iterations=2": [(40.0, 2.0)], "max_iterations=4": [(40.0, 8.0)]}
    joined = dataclasses.replace(figure, over=["schedule.max_iterations"])
    (panel,) = chart(Layout(figures=[joined]), jobs, runs).panels
    assert lines(panel) == {"longest length above 90 %": [(40.0, 2.0), (40.0, 8.0)]}
    assert longest_above(run(jobs[0], (0.5, 1.0, 1.0, 1.0))) == 0.0
    assert longest_above(run(jobs[0], (1.0, 0.9, 1.0, 1.0))) == 2.0  # 90 % are not above 90 %
    assert longest_above(run(jobs[0], (0.95, None, 1.0, 1.0))) == 2.0


def test_over_training_and_into_layers() -> None:
    one = job()
    layers = [{"iterations_mean": 5.0}, {"iterations_mean": 7.0}]
    metrics = ["token_accuracy", "layers.1.iterations_mean", "layers.2.x"]
    made = chart(Layout(figures=[Figure("training", metrics, x=["step"])]), [one], [run(one, layers=layers)])
    assert [lines(panel) for panel in made.panels] == [{"LSTM": [(2, 0.2), (4, 0.4)]}, {"LSTM": [(2, 7.0), (4, 7.0)]}]
    (by_time,) = chart(Layout(figures=[Figure("training", x=["seconds"])]), [one], [run(one)]).panels
    assert lines(by_time) == {"LSTM": [(20.0, 0.2), (40.0, 0.4)]}


def test_a_number_of_the_config_that_settings_have_under_several_keys() -> None:
    def made(key: str, value: int) -> PlannedRun:
        name = "model.layers" if key == "layers" else "model.channel_mixer.rank"
        settings = {"model": "mamba" if key == "layers" else "fp", name: str(value)}
        model = {"layers": value} if key == "layers" else {"layers": 1, "channel_mixer": {"rank": value}}
        full = {**config(settings["model"]), "model": model}
        return PlannedRun(0, settings, "", full, frozenset([repr(settings)]))

    jobs = [made("layers", 2), made("layers", 4), made("rank", 1)]
    figure = Figure("setting", x=["model.channel_mixer.rank", "model.layers"])
    (panel,) = chart(Layout(figures=[figure], at=[4]), jobs, [run(of) for of in jobs]).panels
    assert lines(panel) == {"Mamba, length 4": [(2, 0.9), (4, 0.9)], "fp, length 4": [(1, 0.9)]}
    assert panel.x.label == "r or layers"


def test_what_a_run_was_evaluated_for_besides_its_curve() -> None:
    one = job()
    capped = [{"max_iterations": cap, "length": n, "token_accuracy": cap / 10} for cap in (2, 4) for n in (4, 8, 2)]
    apart = [{"length": n, "distance_mean": n / 100} for n in (2, 4)]
    asked: dict[str, dict[str, Any]] = {}
    asked |= {"iterations": {"solver": "picard", "max_iterations": [2, 4]}, "agreement": {"against": "sequential"}}
    stranger = [{"max_iterations": 2, "length": 4, "token_accuracy": 0.0}]
    evaluated = (
        Evaluation("iterations", asked["iterations"], capped),
        Evaluation("iterations", {"solver": "picard", "max_iterations": [2]}, stranger),  # newer, by hand
        Evaluation("agreement", asked["agreement"], apart),
        Evaluation("agreement", None, [{"length": 2, "distance_mean": 9.0}]),
    )
    tolerant = {**one.config, "solver": {"tolerance": 0.1}}
    measured = dataclasses.replace(run(one), evaluations=evaluated, config=tolerant)
    figures = [Figure("iterations"), Figure("agreement", ["distance_mean"]), Figure("curve")]
    plan = Plan("x", "", "", (one,), Layout(figures=figures, at=[4, 8]), evaluations=asked)
    caps, distances, curve = charts_of(match(plan, [measured]))
    expected = {"LSTM, length 4": [(2, 0.2), (4, 0.4)], "LSTM, length 8": [(2, 0.2), (4, 0.4)]}
    assert lines(caps.panels[0]) == expected
    assert lines(distances.panels[0]) == {"LSTM": [(2, 0.02), (4, 0.04)]}
    assert distances.panels[0].levels == ((0.1, "tolerance"),)
    assert [made.name for made in (caps, distances, curve)] == ["x", "x_2", "x_3"]
    assert charts(Layout(figures=figures[:2]), [one], [dataclasses.replace(run(one))]) == ()


def test_a_table_has_no_figure_and_neither_has_what_is_not_measured() -> None:
    one = job()
    assert charts(Layout(figures=[]), [one], [run(one)]) == ()
    assert charts(Layout(), [one], []) == ()


def test_lengths_of_the_table() -> None:
    one, other = job(), job(task="copy")
    other.config["task"]["lengths"]["max"] = 3  # type: ignore[index]
    other.config["evaluation"]["lengths"] = [3, 5, 7, 20]  # type: ignore[index]

    def lengths(*at: int) -> list[int]:
        layout = Layout(at=list(at))
        return lengths_of(layout, match(Plan("x", "", "", (one, other), layout), []).settings)

    assert lengths() == [3, 4, 7, 8, 16, 20]
    assert lengths(8, 2, 1000) == [2, 8]
    by_task = Layout(at={"a5": ["1x", 16], "copy": ["2x"]})  # twice 3, or what is measured next
    assert lengths_of(by_task, match(Plan("x", "", "", (one, other), by_task), []).settings) == [4, 7, 16]
    assert lengths(1000) == [3, 4, 7, 8, 16, 20]  # at a scale that measures other lengths


def test_names_of_settings() -> None:
    together = "model=gdn model.decay=false"
    layout = Layout(labels={"mamba": "M", "model.layers": "depth", together: "DeltaNet"})
    assert label_of({"task": "a5", "model": "mamba", "model.layers": "2"}, layout) == "A5, M depth=2"
    assert label_of({"model": "fp_mamba_h", "schedule.cap": "4"}, layout) == "FP-Mamba-H, cap=4"
    assert label_of({"model": "gdn", "model.decay": "False"}, layout) == "DeltaNet"
    assert label_of({"model": "gdn", "model.decay": "true"}, layout) == "Gated DeltaNet, decay"
    switches = {"model.dependence.Q": "False", "model.dependence.b": "true"}
    assert label_of(switches, layout) == "b"
    assert label_of(dict.fromkeys(switches, "false"), layout) == "none"


def test_settings_are_named_by_the_keys_of_the_layout() -> None:
    jobs = [job(cap=cap, model=model) for cap, model in ((2, "lstm"), (4, "mamba"))]
    outcome = match(Plan("x", "", "", tuple(jobs), Layout(names=["model"])), [])
    assert [setting.label for setting in outcome.settings] == ["LSTM", "Mamba"]


def test_the_rank_of_its_mixer_is_a_part_of_a_models_name() -> None:
    ranked = job(model="fp_mamba_h")
    ranked.config["model"] = {"channel_mixer": {"rank": 2}}  # type: ignore[index]
    for keys in (["model"], ["schedule.max_iterations"], []):
        (setting,) = match(Plan("x", "", "", (ranked,), Layout(names=keys)), []).settings
        assert setting.label == ("max_iterations=2" if keys == ["schedule.max_iterations"] else "FP-Mamba-H r=2")


def test_settings_of_one_name_are_told_apart() -> None:
    jobs = [PlannedRun(0, {}, "", config(), frozenset([name])) for name in "ab"]
    assert [s.label for s in match(Plan("x", "", "", tuple(jobs), Layout()), []).settings] == ["LSTM", "LSTM (2)"]


def test_the_same_chart_gives_the_same_bytes(tmp_path: Path) -> None:
    jobs = [job(seed=seed, model=model, task=task) for seed in (0, 1) for model in "a$b" for task in ("a5", "s5", "a4")]
    runs = [run(of, (1.0, 0.9 - 0.1 * of.seed, 0.5, 0.2)) for of in jobs]
    made = chart(Layout(), jobs, runs)
    first, second = ([path.read_bytes() for path in draw(made, tmp_path / name)] for name in ("a", "b"))
    assert first == second
    assert first[0].startswith(b"\x89PNG\r\n\x1a\n")
    assert b"Software" not in first[0]
    assert b"<svg" in first[1]
    assert b"dc:date" not in first[1]
    other = chart(Layout(), jobs, runs[1:])
    draw(other, tmp_path / "c")
    assert (tmp_path / "c.png").read_bytes() != first[0]


def test_a_logarithmic_axis_has_no_place_for_zero(tmp_path: Path) -> None:
    one = job()
    rows = tuple({**curve_row(n, 0.0), "perplexity": float(n - 2)} for n in (2, 4))
    made = chart(Layout(metrics=["perplexity"]), [one], [dataclasses.replace(run(one), curve=rows)])
    assert lines(made.panels[0]) == {"LSTM": [(4, 2.0)]}
    draw(made, tmp_path / "a")


def test_a_run_without_the_evaluation_that_a_figure_needs_is_said() -> None:
    one, other = job(model="fp"), job(model="lstm")
    unsolved = dataclasses.replace(run(other), curve=(curve_row(4, 0.5, iterations_mean=None),))
    layout = Layout(figures=[Figure("curve"), Figure("agreement", ["distance_mean"])])
    asked = {"agreement": {"against": "sequential"}}
    plan = Plan("x", "", "fpexp train -m experiment=x", (one, other), layout, evaluations=asked)
    (section,) = make_report([plan], Found([run(one), unsolved], {}, {}, []), whole=False).sections
    assert [command for _, command in section.unfinished] == ["fpexp train -m experiment=x"]
    assert section.unfinished[0][0].endswith("no evaluation of agreement")
    rows = [{"length": 4, "distance_mean": 0.1}]
    measured = dataclasses.replace(run(one), evaluations=(Evaluation("agreement", asked["agreement"], rows),))
    (section,) = make_report([plan], Found([measured, unsolved], {}, {}, []), whole=False).sections
    assert section.unfinished == ()
    unasked = dataclasses.replace(plan, evaluations={})
    (section,) = make_report([unasked], Found([measured], {}, {}, []), whole=False).sections
    ((what, command),) = section.unfinished
    assert "does not ask for" in what
    assert command is None
