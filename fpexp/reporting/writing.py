"""A report as a folder: report.md, report.html, csv/ and figures/, replaced as a whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fpexp.errors import UserError
from fpexp.reporting.drawing import draw
from fpexp.reporting.markdown import markdown
from fpexp.reporting.page import page
from fpexp.reporting.report import Report
from fpexp.reporting.sheets import benchmark_sheet, curves_sheet, figure_sheet, runs_sheet, settings_sheet

PATTERNS = ("report.md", "report.html", "csv/*.csv", "figures/*.png", "figures/*.svg")
"""All that a report consists of."""


def write_report(report: Report, folder: Path) -> None:
    """Write a report to `folder`, in whose place an earlier one may stand and nothing else.

    It is complete before the earlier one goes: whoever reads finds one or the other.
    """
    check_place(folder)
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folder.with_name(f".{folder.name}.{os.getpid()}")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        _fill(new, report)
        if folder.exists():
            os.replace(folder, old)
        try:
            os.replace(new, folder)
        except OSError:
            if old.exists():
                os.replace(old, folder)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def check_place(folder: Path) -> None:
    """Raise a `UserError` where something stands that no report has written: it would be lost."""
    here = folder.resolve()
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or here in (Path.cwd(), *Path.cwd().parents):
        raise UserError(f"out={folder} is not a folder of its own; name another one")
    if not folder.is_dir():
        return
    is_report = all((folder / name).is_file() for name in ("report.md", "report.html"))  # not just a folder of figures
    own = {path for pattern in PATTERNS for path in folder.glob(pattern)} if is_report else set()
    strange = sorted(path for path in folder.rglob("*") if path not in own and (path.is_symlink() or not path.is_dir()))
    if strange:
        raise UserError(
            f"out={folder} holds {strange[0].relative_to(folder)}, which is no report's; name another folder"
        )


def _fill(folder: Path, report: Report) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for part in (folder, folder / "csv", folder / "figures"):
        part.mkdir()
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(page(report), encoding="utf-8")
    for section in report.sections:
        name = section.plan.name
        sheets = {f"benchmark_{made.name}": benchmark_sheet(made) for made in section.benchmarks}
        if section.plan.jobs:
            sheets |= {name: settings_sheet(section.outcome), f"{name}_runs": runs_sheet(section.outcome)}
            sheets[f"{name}_curves"] = curves_sheet(section.outcome)
        sheets |= {f"{chart.name}_figure": figure_sheet(chart) for chart in section.charts}
        for sheet, text in sheets.items():
            (folder / "csv" / f"{sheet}.csv").write_text(text, encoding="utf-8")
        for chart in section.charts:
            draw(chart, folder / "figures" / chart.name)
