"""fpexp evaluate: a recorded run, measured once more."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from fpexp.commands.arguments import parse
from fpexp.errors import FpexpError, UserError
from fpexp.measurement import Measurement


def run(arguments: list[str]) -> int:
    """Measure a checkpoint and keep the rows under the run's evaluations/ folder."""
    own = typing.get_type_hints(Measurement, include_extras=True)
    options = parse(arguments, {"run": str, **own, "device": str, "results_dir": str})
    if "run" not in options:
        raise UserError("which run? write run=<run id>; `fpexp runs` lists them")
    measurement = Measurement(**{key: value for key, value in options.items() if key in own})

    from fpexp.build import settle
    from fpexp.machine import is_out_of_memory
    from fpexp.run_folder import RunFolder

    folder = RunFolder.find(options["run"], options.get("results_dir", "results"))
    device = settle(folder.config().replace(device=options.get("device", "auto")))[0].device
    try:
        rows, where = measurement.carry_out(folder, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FpexpError(f"out of memory on {device}; lower batch_size or the longest of lengths") from error
    _show(folder, measurement, rows, where)
    print(f"rows{' and curve' if measurement.file == 'curve.jsonl' else ''}: {where}")
    return 0


def _show(folder: Any, measurement: Measurement, rows: list[dict[str, Any]], where: Path) -> None:
    from fpexp.reporting.figures import draw_curves
    from fpexp.reporting.store import read_curve
    from fpexp.tracking.console import note, print_curve, print_table

    if measurement.file == "curve.jsonl":
        draw_curves([read_curve(folder, where / measurement.file)], where / "curve.png")
        print_curve(rows)
    elif measurement.file == "iterations.jsonl":
        for cap in dict.fromkeys(row["max_iterations"] for row in rows):
            note(f"at most {cap} iterations:")
            print_curve([row for row in rows if row["max_iterations"] == cap])
    else:
        names = {"length": "length", "distance_median": "median", "distance_max": "largest", "n": "n"}
        names |= {"distance_max_converged": "of converged", "both_converged": "converged", "answers_alike": "alike"}
        cells = [[_text(row[key]) for key in names] for row in rows]
        print_table(f"distance of {measurement.solver} from {measurement.against}", list(names.values()), cells)


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
