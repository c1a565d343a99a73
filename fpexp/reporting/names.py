"""What models, tasks and keys are called in the paper, and the look of each series of a figure.

Every model has a colour of its own in every figure: blues for FP-Mamba, violets for FP-Mamba-2, greens for FP-RNN,
other hues for the baselines. Series of one model differ in marker and dashes, so that no two of a figure look alike,
with any kind of colour vision and in print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fpexp.reporting.layout import Layout


class Named(NamedTuple):
    """A model's name, and its colour on white and on dark."""

    name: str
    on_white: str
    on_dark: str


MODELS = {
    "fp_mamba_k": Named("FP-Mamba-K", "#08306b", "#a9c3ff"),
    "fp_mamba_h": Named("FP-Mamba-H", "#0072b2", "#3f9fe6"),
    "fp_mamba_dplr": Named("FP-Mamba-DPLR", "#56b4e9", "#7fe0ff"),
    "fp_mamba2_k": Named("FP-Mamba-2-K", "#4a1486", "#c9a9f5"),
    "fp_mamba2_h": Named("FP-Mamba-2-H", "#807dba", "#9d8cf0"),
    "fp_rnn_k": Named("FP-RNN-K", "#00572f", "#8fe3b4"),
    "fp_rnn_h": Named("FP-RNN-H", "#009e73", "#2fc795"),
    "fp_rnn_dplr": Named("FP-RNN-DPLR", "#66c2a4", "#5aa58a"),
    "lstm": Named("LSTM", "#1c1c1a", "#ecebe6"),
    "transformer": Named("Transformer", "#8a8a84", "#a5a49c"),
    "mamba": Named("Mamba", "#d55e00", "#f08a4b"),
    "mamba2": Named("Mamba-2", "#e69f00", "#eab340"),
    "gdn": Named("Gated DeltaNet", "#cc79a7", "#f0a3cb"),
    "deltaproduct": Named("DeltaProduct", "#882255", "#d05f92"),
}
OTHER = Named("", "#7a5230", "#c9a27a")
COLOURS = (*MODELS.values(), OTHER)
"""By number: one a model, the last for models that are none of these. Okabe and Ito 2008, with shades for families."""

MARKERS, DASHES = 9, 3
"""How many there are, in `drawing` and on the page."""

RANK = "model.channel_mixer.rank"
NAMES: Mapping[str, str] = {
    **{key: named.name for key, named in MODELS.items()},
    "a4": "A4",
    "a5": "A5",
    "s5": "S5",
    "copy": "copying",
    "fineweb": "FineWeb",
    "modular_arithmetic": "modular arithmetic",
    RANK: "r",
    "model.householder_steps": "r",
}
"""Of choices and of keys; an experiment's `labels` come first."""


@dataclass(frozen=True)
class Style:
    """The look of a series: numbers of a colour, a marker and a kind of dashes."""

    colour: int
    marker: int
    dash: int


def styles(series: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """Return the style of each label, from (label, model): no two are alike up to MARKERS * DASHES of one model."""
    known, found, members = list(MODELS), dict[str, Style](), dict[int, int]()
    for label, model in dict(series).items():
        colour = known.index(model) if model in MODELS else len(known)
        member = members[colour] = members.get(colour, -1) + 1
        around, place = divmod(member, MARKERS)
        found[label] = Style(colour, (colour + place) % MARKERS, (place + around) % DASHES)
    return found


def label_of(values: Mapping[str, str], layout: Layout) -> str:
    """Return what a setting is called: FP-Mamba-H r=2, cap=4. Of switches, those that are on: Q+b, or none.

    A group's choice is named alone, other keys as their last part = value.
    """
    parts: list[str] = []
    switches, on, of_model = False, [], False
    for key, value in _joined(values, layout).items():
        name, short = name_of(value, layout), name_of(key, layout, key.rpartition(".")[2])
        if value.lower() in ("true", "false"):
            switches = True
            on += [short] if value.lower() == "true" else []
        elif of_model and key.startswith("model."):
            parts[-1] += f" {short}={name}"
        else:
            parts.append(name if "." not in key else f"{short}={name}")
            of_model = key == "model"
    return ", ".join([*parts, *(["+".join(on) or "none"] if switches else [])])


def name_of(key: str, layout: Layout, otherwise: str | None = None) -> str:
    """Return what a choice or a key is called."""
    return str(layout.labels.get(key, NAMES.get(key, key if otherwise is None else otherwise)))


def _joined(values: Mapping[str, str], layout: Layout) -> dict[str, str]:
    """Return the values, those that have a name together (`model=gdn model.decay=false`) in the place of the first."""
    result = dict(values)
    for words, name in layout.labels.items():
        pairs = dict(word.split("=", 1) for word in str(words).split() if "=" in word)
        if pairs and all(result.get(key, "").lower() == value.lower() for key, value in pairs.items()):
            first, *others = pairs
            result[first] = str(name)
            for key in others:
                del result[key]
    return result
