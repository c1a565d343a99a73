"""The report's page as people meet it: read, pointed at, reached by the keyboard, on a phone, in the dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import SMALL, record, small

from fpexp.cli import main

GRID = "experiment=demo_a4"
HOSTILE = "<img src=x onerror=alert(1)>'\"&<!--<script>"
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two models, the LSTM with three seeds, one run of a hostile name."""
    folder = tmp_path_factory.mktemp("report")
    results = folder / "results"
    for seed, accuracy in enumerate((0.5, 0.7, 0.9)):
        name = HOSTILE if seed == 2 else f"seed{seed}"
        record(results, name, small(GRID, "model=lstm", f"seed={seed}"), (1.0, accuracy, 0.5, 0.1))
    record(results, "k", small(GRID, "model=fp_mamba_k"), (1.0, 1.0, 0.9, 0.8))
    record(results, "stopped", small("experiment=demo_a5"), state="failed", reason=HOSTILE)
    (results / "paper").mkdir()
    paper = {
        "measure": "accuracy",
        "claims": [HOSTILE],
        "rows": [{"label": "LSTM", "when": {"model": "lstm"}, "value": 0.25}],
    }
    (results / "paper/demo_a4.yaml").write_text(json.dumps(paper))
    words = ["report", f"{GRID},demo_a5", f"results_dir={results}", *SMALL]
    assert main(words) == 0
    return results / "report/report.html"


@pytest.fixture
def visit(browser: Any, html: Path) -> Iterator[Callable[..., Any]]:
    """Open the page in a window of some size and theme; nothing may be fetched, logged or raised until the end."""
    contexts, complaints = [], []

    def visit(viewport: dict[str, int] = DESK, scheme: str = "light") -> Any:
        context = browser.new_context(viewport=viewport, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        page.on("request", lambda request: complaints.append(request.url) if request.url != html.as_uri() else None)
        page.goto(html.as_uri())
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not complaints


def figure(page: Any) -> Any:
    return page.locator("figure.chart").first


def test_curves_are_drawn_with_chance_and_the_training_length(visit: Callable[..., Any]) -> None:
    page = visit()
    assert figure(page).locator("path.line").count() == 2 + 2  # in the panel and in the legend
    assert figure(page).locator("path.point").count() == 8
    assert figure(page).locator("path.band").count() == 1
    assert figure(page).locator("line.level").count() == 1
    assert figure(page).locator("line.mark").count() == 1
    texts = figure(page).locator("svg text").all_text_contents()
    assert {"chance", "longest in training", "length", "accuracy of tokens", "2", "4", "8", "16"} <= set(texts)


def test_a_point_that_is_pointed_at_says_its_value_and_its_runs(visit: Callable[..., Any]) -> None:
    page = visit()
    tip = figure(page).locator(".tip")
    assert not tip.is_visible()
    figure(page).locator("path.point").nth(2).hover()  # fp_mamba_k at length 8
    assert tip.is_visible()
    assert tip.text_content() == "FP-Mamba-Klength 8: 0.900k"
    figure(page).locator("path.point").nth(5).hover()  # lstm at length 4
    assert "length 4: 0.700 ± 0.200 (n=3)" in tip.text_content()
    assert f"{HOSTILE}: 0.900" in tip.text_content()
    page.mouse.move(5, 5)
    assert not tip.is_visible()


def test_a_curve_is_switched_off_and_on_by_its_button(visit: Callable[..., Any]) -> None:
    page = visit()
    button = figure(page).get_by_role("button", name="LSTM")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert figure(page).locator(".panel path.line").count() == 1
    figure(page).get_by_role("button", name="all").click()
    assert figure(page).locator(".panel path.line").count() == 2
    figure(page).get_by_role("button", name="none").click()
    assert figure(page).locator(".panel path.line").count() == 0


def test_everything_is_reached_by_the_keyboard(visit: Callable[..., Any]) -> None:
    page = visit()
    described = []
    for _ in range(60):
        page.keyboard.press("Tab")
        described.append(page.evaluate("(e => e.getAttribute('aria-label') || e.textContent)(document.activeElement)"))
        if described[-1].startswith("accuracy of tokens by length"):
            break
    assert described[0] == "To the numbers"
    assert {"FP-Mamba-K", "LSTM", "none"} <= set(described)
    tip = figure(page).locator(".tip")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
        said.append(tip.locator("span").first.text_content()[:9] + tip.locator("strong").text_content())
    assert said == [
        "length 2:FP-Mamba-K",
        "length 4:FP-Mamba-K",
        "length 8:FP-Mamba-K",
        "length 8:LSTM",
        "length 4:LSTM",
        "length 4:FP-Mamba-K",
    ]
    assert tip.get_attribute("role") == "status"
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "region"  # a table, to be scrolled
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")
    assert figure(page).get_by_role("button", name="LSTM").get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_tables_and_not_the_page(visit: Callable[..., Any], width: int) -> None:
    page = visit({**PHONE, "width": width})
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    figure(page).locator("path.point").nth(3).hover()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    heading = page.locator("h1").bounding_box()
    assert heading["height"] > 20  # text has a size: fonts are there
    first = page.locator(".scroll table").nth(1)
    assert first.bounding_box()["width"] > width
    tip = figure(page).locator(".tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= width
    button = figure(page).get_by_role("button", name="LSTM").bounding_box()
    assert button["height"] >= 32


def test_a_window_that_changes_its_width_has_its_curves_drawn_anew(visit: Callable[..., Any]) -> None:
    from playwright.sync_api import expect

    page = visit()
    svg = figure(page).locator(".panel svg")
    wide = svg.get_attribute("viewBox")
    page.set_viewport_size(PHONE)
    expect(svg).not_to_have_attribute("viewBox", wide)
    assert float(svg.get_attribute("viewBox").split()[2]) <= 390


def contrast(page: Any, selector: str) -> float:
    """The contrast of an element's text with the page behind it, as WCAG 2 reckons it."""
    colours = page.locator(selector).first.evaluate(
        "e => [getComputedStyle(e).fill, getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]"
    )
    fill, colour, paper = ([int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]] for text in colours)
    text = fill if "text" in selector else colour

    def luminance(rgb: list[int]) -> float:
        parts = [v / 255 / 12.92 if v <= 10 else ((v / 255 + 0.055) / 1.055) ** 2.4 for v in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((luminance(text), luminance(paper)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(visit: Callable[..., Any], scheme: str) -> None:
    page = visit(scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    for selector in ("p", "td", ".panel text", "figcaption", ".legend button", "td.reported"):
        assert contrast(page, selector) >= 4.5, selector


def test_text_is_shown_as_it_is(visit: Callable[..., Any]) -> None:
    page = visit()
    assert page.locator("img").count() == 0
    assert page.get_by_text(HOSTILE, exact=True).first.is_visible()
    cells = page.locator("tr", has=page.get_by_role("rowheader", name="LSTM", exact=True)).first.locator("td")
    assert cells.all_text_contents()[:5] == ["3", "0.700 ± 0.200", "0.500 ± 0.000", "0.100 ± 0.000", "0.25"]
