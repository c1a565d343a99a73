"""Figures, by matplotlib without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fpexp.reporting.store import Curve


def draw_curves(curves: Sequence[Curve], path: Path) -> None:
    """Draw token accuracy (solid) and last-token accuracy (dashed) against length, one colour a model; PNG at `path`.

    Where a model has written answers by itself, the share that is right as a whole is dotted. The longest training
    length and chance (grey) are marked. Curves of text, if all are, show perplexity and the unigram's (grey).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = [row for curve in curves for row in curve.rows]
    text = bool(rows) and all(row.get("perplexity") for row in rows)
    draw = _draw_perplexity if text else _draw_accuracy
    levels = sorted({row["unigram_perplexity"] for row in rows} if text else {c.chance for c in curves if c.chance})
    names = sorted({_name(curve) for curve in curves})
    for name in names:
        members = [curve for curve in curves if _name(curve) == name and curve.rows]
        for index, curve in enumerate(members):
            draw(axes, curve, _colour(names.index(name), len(names)), _label(name, members) if index == 0 else None)
    for level in levels:
        axes.axhline(level, color="0.7", lw=1)
    for length in sorted({curve.trained_to for curve in curves if curve.trained_to}):
        axes.axvline(length, color="0.4", lw=1, ls=":")
        where = axes.get_xaxis_transform()
        style: dict[str, Any] = {"fontsize": 7, "color": "0.4", "rotation": 90, "va": "bottom", "ha": "right"}
        axes.text(length, 0.02, "longest in training", transform=where, **style)
    if text:
        axes.set(xlabel="length", ylabel="perplexity of a token; of a unigram (grey)", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
    else:
        label = "accuracy: every token (solid), last token (dashed)"
        if any("generated_sequence_accuracy" in row for row in rows):
            label += ",\nwhole answers as written (dotted)"
        axes.set(xlabel="length", ylabel=label, ylim=(0, 1.02))
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.25)
    if rows:
        axes.legend(fontsize=8, loc="center left" if text else "lower left")
    figure.savefig(path, metadata={"Software": None})


def _draw_perplexity(axes: Any, curve: Curve, colour: Any, label: str | None) -> None:
    values = [row["perplexity"] for row in curve.rows]
    axes.plot([row["length"] for row in curve.rows], values, marker="o", ms=3.5, color=colour, label=label)


def _draw_accuracy(axes: Any, curve: Curve, colour: Any, label: str | None) -> None:
    lengths = [row["length"] for row in curve.rows]
    axes.plot(lengths, [row["token_accuracy"] for row in curve.rows], marker="o", ms=3.5, color=colour, label=label)
    axes.plot(lengths, [row["last_token_accuracy"] for row in curve.rows], ls="--", lw=1, color=colour, alpha=0.6)
    written = [row for row in curve.rows if "generated_sequence_accuracy" in row]
    if written:
        accuracies = [row["generated_sequence_accuracy"] for row in written]
        axes.plot([row["length"] for row in written], accuracies, ls=":", lw=1.5, color=colour)


def _colour(index: int, count: int) -> Any:
    """Return the colour of one of so many models: dark and pale ones in turn where there are more than ten."""
    from matplotlib import colormaps

    return colormaps["tab10"](index % 10) if count <= 10 else colormaps["tab20"](index % 20)


def _name(curve: Curve) -> str:
    return f"{curve.task} {curve.model}"


def _label(name: str, members: Sequence[Curve]) -> str:
    seeds = ", ".join(str(curve.seed) for curve in members)
    return f"{name}, seed{'s' if len(members) > 1 else ''} {seeds}"
