"""What both forms of the report say."""

from __future__ import annotations

from fpexp.reporting.report import Report
from fpexp.reporting.table import Table

TITLE = "Fixed-Point RNNs: our runs beside the paper"

READING = (
    "Made from the files of runs alone. A number is the mean over the runs of a setting, which differ "
    "in nothing but the seed; ± is the sample standard deviation. Iterations are the mean over test sequences at the "
    "training length; with the sequential solver, those of a sequence's dearest token. Wall time is that of training. "
    "What the paper reports stands in a column of its own and is nowhere mixed with ours; it was trained at the "
    "paper's scale, ours at what the column scale says. What has not been run is listed with the command that runs it."
)

CAPTION = (
    "Means over seeds, with a band of one standard deviation where there are several; a guess is dashed, the longest "
    "length in training dotted."
)

BENCHMARKS = "Benchmarks"
PAPERS = "Reported by the paper, no experiment here"
OTHERS = "Runs of no experiment above"


def summary_of(report: Report) -> Table:
    """Return one row for each experiment: how many of its runs are there."""
    rows = [(section.plan.name, section.plan.title, section.done) for section in report.sections]
    return Table(("experiment", "what", "finished"), tuple(rows))
