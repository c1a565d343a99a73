"""What every benchmark is told beside its sizes, and the child processes that some of them need."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import fpexp

NOT_INSTALLED = "not installed: pip install 'fpexp[bench]'"
PEERS = ("mambapy", "transformers")


@dataclass(frozen=True)
class Context:
    """Where runs are, the number of CPU threads (0: torch's own choice), and a folder that is gone afterwards."""

    results_dir: str
    threads: int
    scratch: Path


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, in which a child imports this very fpexp."""
    path = [str(Path(fpexp.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}
