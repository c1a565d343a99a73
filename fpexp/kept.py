"""What is committed under results/: `reference`, recorded runs and benchmarks, and `paper`, what the paper reports."""

from __future__ import annotations

from pathlib import Path

from fpexp.config.catalogue import conf_dir


def kept(name: str, results_dir: str | Path) -> Path:
    """Return that of a results folder where it has one of its own, else the repository's, whatever the working folder.

    An installed wheel has none: the folder need not be there.
    """
    own = Path(results_dir) / name
    return own if own.is_dir() else repository_results() / name


def places(name: str, results_dir: str | Path) -> dict[str, Path]:
    """Return where a results folder has its runs/ or bench/, and where reference/ has them, once if they are one."""
    own, reference = Path(results_dir) / name, kept("reference", results_dir) / name
    return {name: own} | ({} if reference.resolve() == own.resolve() else {f"reference/{name}": reference})


def repository_results() -> Path:
    """Return results/ beside conf/."""
    return conf_dir().parent / "results"
