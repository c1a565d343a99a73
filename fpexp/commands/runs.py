"""fpexp runs: what is recorded."""

from __future__ import annotations

from fpexp.commands.arguments import parse
from fpexp.reporting.store import summarise
from fpexp.run_folder import all_runs
from fpexp.tracking.console import print_table


def run(arguments: list[str]) -> int:
    """Print one row for each run, oldest first."""
    results_dir = parse(arguments, {"results_dir": str}).get("results_dir", "results")
    summaries = [summarise(folder) for folder in all_runs(results_dir)]
    if not summaries:
        print(f"no runs under {results_dir}/runs yet; `fpexp train task=a4 model=lstm` makes one")
        return 0
    text = any(summary.perplexity is not None for summary in summaries)
    rows = [
        [
            s.id,
            s.task,
            s.model,
            s.state,
            _accuracy(s.training_length, s.accuracy),
            _accuracy(s.far_length, s.far_accuracy),
            *(["-" if s.perplexity is None else f"{s.perplexity:.4g} @{s.training_length}"] if text else []),
        ]
        for s in summaries
    ]
    columns = ["id", "task", "model", "status", "accuracy", "at 4x length", *(["perplexity"] if text else [])]
    print_table("runs", columns, rows)
    return 0


def _accuracy(length: int | None, value: float | None) -> str:
    return "-" if value is None or length is None else f"{value:.3f} @{length}"
