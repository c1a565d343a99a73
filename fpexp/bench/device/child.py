"""A process that does a part's items and writes down each step, so that what it has found outlives it.

One JSON object a line: {"items": [...]}, then for each item {"began": ...} and {"done": ..., "rows": [...]} or
{"done": ..., "error": ...}.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fpexp.errors import first_line


def main(module: str, file: str, lane: str, skip: str, rehearse: str) -> int:
    """Do the items of lane k of n, given as k/n, but for the first `skip` of them."""
    with Path(file).open("a") as log:
        for step in _steps(module, lane, int(skip), rehearse == "True"):
            log.write(json.dumps(step) + "\n")
            log.flush()
    return 0


def _steps(module: str, lane: str, skip: int, rehearse: bool) -> Iterator[dict[str, Any]]:
    try:
        from fpexp.bench.device.part import Setup, describe
        from fpexp.ops.backend import only_reference

        setup = Setup("cpu" if rehearse else "cuda", rehearse)
        items = importlib.import_module(module).items(setup)
    except Exception as error:  # the part cannot even begin
        traceback.print_exc()
        yield {"failed": f"{type(error).__name__}: {first_line(error)}"}
        return
    number, lanes = map(int, lane.split("/"))
    names = list(items)[number::lanes]
    yield {"items": names}
    for name in names[skip:]:
        yield {"began": name}
        try:
            with only_reference() if rehearse else nullcontext():  # `auto` would compile for a minute
                rows = [dataclasses.asdict(finding) for finding in items[name]()]
            setup.synchronize()
        except Exception as error:  # whatever one item runs into, the next is tried
            traceback.print_exc()
            yield {"done": name, "error": describe(error)}
            if _is_lost(setup):
                sys.exit("the device is lost to this process")
        else:
            yield {"done": name, "rows": rows}


def _is_lost(setup: Any) -> bool:
    """Tell whether a kernel has left an error that every later call of this process meets."""
    try:
        setup.synchronize()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
