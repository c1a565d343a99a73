"""The report as Markdown."""

from __future__ import annotations

from fpexp.reporting.benchmark import Benchmark
from fpexp.reporting.report import Report, Section
from fpexp.reporting.table import escaped, to_markdown
from fpexp.reporting.words import BENCHMARKS, CAPTION, OTHERS, PAPERS, READING, TITLE, summary_of


def markdown(report: Report) -> str:
    """Return report.md; figures stand beside it under figures/, numbers under csv/."""
    parts = [f"# {TITLE}", READING, to_markdown(summary_of(report))]
    if report.problems:
        parts += ["Not as it should be:", _bullets(report.problems)]
    parts += [part for section in report.sections for part in _section(section)]
    if report.benchmarks:
        parts.append(f"## {BENCHMARKS}")
        parts += [part for benchmark in report.benchmarks for part in _benchmark(benchmark)]
    if report.papers:
        parts += [f"## {PAPERS}", to_markdown(report.papers)]
    if report.others:
        parts += [f"## {OTHERS}", to_markdown(report.others)]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    plan, name = section.plan, section.plan.name
    parts = [f"## {escaped(plan.title)}", f"`experiment={name}`. {escaped(plan.description)}"]
    if plan.paper and plan.paper.claims:
        parts += ["As the paper reports it:", _bullets(plan.paper.claims)]
    parts += [f"![{escaped(chart.title)}](figures/{chart.name}.png)" for chart in section.charts]
    if section.charts:
        parts.append(CAPTION)
    if section.table.rows:
        parts.append(to_markdown(section.table))
    parts += [part for benchmark in section.benchmarks for part in _benchmark(benchmark)]
    if section.runs.rows:
        parts += ["Runs:", to_markdown(section.runs)]
    if section.unfinished:
        parts.append("Not finished:")
        parts.append("\n".join(f"- {escaped(what)}{_command(command)}" for what, command in section.unfinished))
    if section.missing:
        parts += [
            f"Missing; `{plan.command}` runs all of it. What is missing:",
            _block(section.missing),
        ]
    if section.remarks:
        parts += ["Recorded more than once:", _bullets(section.remarks)]
    if plan.jobs:
        parts.append(
            f"As numbers: csv/[{name}.csv](csv/{name}.csv), [runs](csv/{name}_runs.csv), "
            f"[curves](csv/{name}_curves.csv)"
        )
    return parts


def _benchmark(benchmark: Benchmark) -> list[str]:
    parts = [f"{escaped(benchmark.name)}, from `{benchmark.file}`: {escaped(benchmark.machine)}"]
    for group, table in benchmark.tables:
        parts += [*([escaped(group)] if group else []), to_markdown(table)]
    return parts


def _command(command: str | None) -> str:
    return f"; `{command}`" if command else ""


def _block(lines: tuple[str, ...]) -> str:
    return "\n".join(("```", *lines, "```"))


def _bullets(lines: tuple[str, ...]) -> str:
    return "\n".join(f"- {escaped(line)}" for line in lines)
