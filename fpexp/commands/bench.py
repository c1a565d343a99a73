"""fpexp bench: named benchmarks, checked, timed in turn and kept as JSON."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from fpexp.bench import BENCHMARKS, load
from fpexp.commands.arguments import parse
from fpexp.errors import FpexpError, UserError
from fpexp.ranges import Count, CountOrZero, Positive, Range

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

OPTIONS = {
    "threads": Annotated[int, Range(0, 1024)],
    "repeats": Count,
    "warmup": CountOrZero,
    "budget": Positive,
    "results_dir": str,
}
DEFAULTS = {"threads": 0, "repeats": 15, "warmup": 2, "budget": 60.0, "results_dir": "results"}


def run(arguments: list[str]) -> int:
    """Run the benchmarks that are named, or all; a failed check does not keep the others from running."""
    if arguments == ["--list"]:
        for name, entry in BENCHMARKS.items():
            print(f"{name:<18} {entry.text}")
        return 0
    names = [word for word in arguments if "=" not in word and not word.startswith("-")]
    modules = {name: load(name) for name in names or BENCHMARKS}
    keys = {name: typing.get_type_hints(module.Sizes, include_extras=True) for name, module in modules.items()}
    known = {key: annotation for own in (OPTIONS, *keys.values()) for key, annotation in own.items()}
    words = [_flag(word, known) if word.startswith("-") else word for word in arguments if word not in names]
    given = parse(words, known)
    options = {**DEFAULTS, **{key: value for key, value in given.items() if key in OPTIONS}}

    from fpexp.bench.measure import CheckFailed
    from fpexp.bench.record import make_folder
    from fpexp.machine import is_out_of_memory, set_threads
    from fpexp.tracking.console import note
    from fpexp.training.interruption import Interruption

    folder = make_folder(options["results_dir"])
    set_threads(options["threads"])
    failed = []
    for name, module in modules.items():
        sizes = module.Sizes(**{key: value for key, value in given.items() if key in keys[name]})
        note(f"{name} ...")
        try:
            with Interruption() as interruption, interruption.at_once():
                note(f"rows: {_run_one(name, module, sizes, options, folder, ['bench', *arguments])}\n")
        except CheckFailed as error:
            failed.append(f"{name}: {error}")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise FpexpError(f"{name}: out of memory; lower its batch_size, width or length") from error
    if failed:
        raise FpexpError("; ".join(failed))
    return 0


def _flag(word: str, known: Mapping[str, Any]) -> str:
    """Return `key=true` for --key, where that is a key to switch on."""
    key = word.removeprefix("--").replace("-", "_")
    if not word.startswith("--") or known.get(key) is not bool:
        raise UserError(f"'{word}' is not understood here; `fpexp bench --list` and `--help` stand alone")
    return f"{key}=true"


def _run_one(
    name: str, module: ModuleType, sizes: Any, options: Mapping[str, Any], folder: Path, words: list[str]
) -> Path:
    import tempfile
    from pathlib import Path

    from fpexp.bench.context import PEERS, Context
    from fpexp.bench.measure import Rounds, measure
    from fpexp.bench.record import show, write
    from fpexp.environment import PACKAGES, describe_machine

    with tempfile.TemporaryDirectory(prefix="fpexp-bench-") as scratch:
        context = Context(options["results_dir"], options["threads"], Path(scratch))
        contenders = list(module.contenders(sizes, context))
        if not contenders:
            raise UserError(f"{name}: there is nothing to time; name at least one, not []")
        rows = measure(contenders, Rounds(options["repeats"], options["warmup"], options["budget"]))
    show(name, rows)
    settings = {**dataclasses.asdict(sizes), **{key: options[key] for key in ("repeats", "warmup", "budget")}}
    return write(folder, name, rows, settings, describe_machine("cpu", words, (*PACKAGES, *PEERS)))
