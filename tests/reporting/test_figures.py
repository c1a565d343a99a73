"""The picture of length curves."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fpexp.reporting.figures import draw_curves
from fpexp.reporting.store import Curve


def curve(model: str = "lstm", seed: int = 0, **row: Any) -> Curve:
    rows = [
        {"length": n, "token_accuracy": 1 / n, "last_token_accuracy": 0.5 / n, "sequence_accuracy": 0.0, "n": 8, **row}
        for n in (2, 4, 8)
    ]
    return Curve(task="a4", model=model, seed=seed, trained_to=4, chance=1 / 12, rows=rows)


def draw(path: Path, *curves: Curve) -> bytes:
    draw_curves(curves, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    return content


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    curves = [curve(), curve(seed=1), curve("fp_mamba_h")]
    first = draw(tmp_path / "a.png", *curves)
    assert draw(tmp_path / "b.png", *curves) == first
    assert draw(tmp_path / "c.png", curve()) != first


def test_a_curve_without_rows_or_training_length_or_accuracy_is_drawn_as_far_as_it_goes(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", dataclasses.replace(curve(), trained_to=None, chance=None))
    draw(tmp_path / "b.png", dataclasses.replace(curve(), rows=[]))
    draw(tmp_path / "d.png", dataclasses.replace(curve(), rows=[]), curve("fp_mamba_k"))
    draw(tmp_path / "c.png", curve(token_accuracy=None, last_token_accuracy=None))


def test_a_picture_is_replaced(tmp_path: Path) -> None:
    first = draw(tmp_path / "a.png", curve())
    assert draw(tmp_path / "a.png", curve(seed=5)) != first


def test_text_is_drawn_by_its_perplexity(tmp_path: Path) -> None:
    def text(perplexity: float) -> bytes:
        return draw(tmp_path / "text.png", curve(perplexity=perplexity, unigram_perplexity=20.0))

    assert text(4.0) != text(5.0)
    assert text(4.0) != draw(tmp_path / "accuracy.png", curve())
    mixed = draw(tmp_path / "mixed.png", curve(perplexity=4.0, unigram_perplexity=20.0), curve(seed=1))
    assert mixed == draw(tmp_path / "mixed.png", curve(), curve(seed=1))
