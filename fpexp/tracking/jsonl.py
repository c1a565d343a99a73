"""Rows to the run's own JSONL files."""

from __future__ import annotations

from fpexp.run_folder import Row, RunFolder, append_row, read_rows, rewrite_rows
from fpexp.tracking.tracker import RunStart


class JsonlTracker:
    """metrics.jsonl and curve.jsonl; a resumed run drops the rows after its checkpoint, so each step stands once."""

    def __init__(self) -> None:
        self.run: RunFolder

    def start(self, start: RunStart) -> None:
        """Begin, or cut the rows back to the step that the run goes on from."""
        self.run = start.run
        if start.resumed_from is None:
            return
        for path in (self.run.metrics, self.run.curve):
            if path.exists():
                rewrite_rows(path, [row for row in read_rows(path) if row["step"] <= start.resumed_from])

    def log(self, row: Row) -> None:
        """Append to the file of the row's kind."""
        append_row(self.run.curve if row["kind"] == "curve" else self.run.metrics, row)

    def progress(self, step: int) -> None:
        """Nothing to write between rows."""

    def finish(self, state: str) -> None:
        """Nothing is held open."""
