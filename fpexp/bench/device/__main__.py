"""python -m fpexp.bench.device [<file>] [parts=<name>,...] [--rehearse]"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from fpexp.bench.device.runner import Part, Row, run_parts
from fpexp.commands.arguments import take
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError
from fpexp.run_folder import write_json
from fpexp.tracking.console import note, print_table

USAGE = """\
usage: scripts/gpu_check.sh [<file>] [parts=<name>,...] [--rehearse]

Checks and times everything on one GPU, in under eight minutes, with torch, triton and numba alone: each kernel against
the float64 reference, then against its floor; training steps; solves; a short run on A5. Prints a table last and writes
JSON to <file>, results/gpu_check/<time>.json by default. --rehearse does it all on the CPU at tiny sizes, where the
times mean nothing. The last line is the verdict; exit code 1 where a part failed or a number is wrong.

parts: {parts}"""

ROOM = "fpexp.bench.device"

PARTS = (
    Part("versions", f"{ROOM}.versions", limit=20, item_limit=20),
    Part("correctness", f"{ROOM}.correctness", limit=90, item_limit=60, lanes=8),
    Part("offsets", f"{ROOM}.offsets", limit=30, item_limit=15),
    Part("compile", f"{ROOM}.compiling", limit=45, item_limit=45, lanes=8),
    Part("kernels", f"{ROOM}.times", limit=60, item_limit=20),
    Part("training", f"{ROOM}.training", limit=75, item_limit=25),
    Part("solves", f"{ROOM}.solves", limit=60, item_limit=25),
    Part("learning", f"{ROOM}.learning", limit=100, item_limit=100),
)

BUDGET = 450.0
"""Seconds for all parts."""

SLOWER = 5
"""Times as long as that in a rehearsal, on a machine that may be busy."""


def main(words: list[str]) -> int:
    """Run the check; 2 for a mistake in what was asked for."""
    if "-h" in words or "--help" in words:
        note(USAGE.format(parts=", ".join(part.name for part in PARTS)))
        return 0
    named, words = take(words, "parts")
    parts = PARTS if named is None else [_part(name) for name in named.split(",")]
    files = [word for word in words if not word.startswith("-") and "=" not in word]
    if len(files) > 1 or set(words) - {*files, "--rehearse"}:
        raise UserError(f"cannot read '{' '.join(words)}'; {USAGE.splitlines()[0]}")
    rehearse = "--rehearse" in words
    if not rehearse:
        _check_gpu()
    file = Path(files[0] if files else f"results/gpu_check/{time.strftime('%Y%m%d-%H%M%S')}.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def after(part: Part, rows: list[Row]) -> None:
        write_json(file, {"rehearsal": rehearse, "seconds": time.monotonic() - began, "rows": rows})
        note(f"{part.name}: over after {time.monotonic() - began:.0f} s")

    slow = SLOWER if rehearse else 1
    parts = [dataclasses.replace(part, limit=slow * part.limit, item_limit=slow * part.item_limit) for part in parts]
    rows = run_parts(parts, slow * BUDGET, rehearse, after)
    show(rows)
    note(f"rows: {file}")
    note(verdict(rows))
    return 0 if all(row["good"] is not False for row in rows) else 1


def _part(name: str) -> Part:
    names = {part.name: part for part in PARTS}
    if name not in names:
        raise UserError(f"unknown part '{name}'{did_you_mean(name, names)} ({', '.join(names)})")
    return names[name]


def show(rows: list[Row]) -> None:
    """Print the table."""
    cells = [
        [
            row["part"],
            row["what"],
            row["error"] or row["found"],
            row["against"],
            {True: "ok", False: "BAD"}.get(row["good"], ""),
        ]
        for row in rows
    ]
    print_table("", ["part", "what", "found", "against", ""], cells)


def verdict(rows: list[Row]) -> str:
    """Return in a line how many of the rows that are held against something are not good, and which."""
    checks = [row for row in rows if row["good"] is not None]
    failed = [": ".join(filter(None, (row["part"], row["what"]))) for row in checks if not row["good"]]
    if failed:
        return f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}"
    return f"all {len(checks)} checks passed" if checks else "nothing to check in these parts"


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("there is no GPU here; --rehearse does every part at tiny sizes on the CPU")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
