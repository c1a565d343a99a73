"""fpexp train: one run, a resumed run, or with -m a sweep of runs."""

from __future__ import annotations

from fpexp.commands.arguments import take
from fpexp.config.run import RunConfig, read_config
from fpexp.errors import UserError
from fpexp.run_folder import RunFolder
from fpexp.tracking.watchers import trackers

MOVABLE = ("device", "threads", "tracking")
"""What may change when a run is resumed: where it runs and who watches, nothing that decides its numbers."""


def run(arguments: list[str]) -> int:
    """Train as the overrides say."""
    words = [word for word in arguments if word not in ("-m", "--multirun")]
    if len(words) < len(arguments):
        from fpexp.commands import sweep

        return sweep.run(words)
    resume, words = take(words, "resume")
    if resume is not None:
        return _resume(resume, words)
    from fpexp.run import start_run

    config = read_run_config(words)
    _show_where(start_run(config, trackers(config), arguments))
    return 0


def read_run_config(words: list[str]) -> RunConfig:
    """Return the config that the words describe: composed from conf/, or a saved one given as config=<file>."""
    from pathlib import Path

    from fpexp.config.override import override

    saved, words = take(words, "config")
    if saved is not None:
        return override(read_config(Path(saved)), words)
    from fpexp.config.compose import compose

    return compose(words)


def _resume(run_id: str, words: list[str]) -> int:
    from fpexp.config.override import override
    from fpexp.run import resume_run

    results_dir, words = take(words, "results_dir")
    folder = RunFolder.find(run_id, results_dir or "results")
    for word in words:
        key = word.partition("=")[0].lstrip("+~")
        if key.partition(".")[0] not in MOVABLE:
            raise UserError(
                f"'{key}' cannot change in a resumed run, which goes on as it was configured; a new run from its "
                f"config: fpexp train config={folder.path / 'config.yaml'} {word}"
            )
    config = override(folder.config(), words)
    _show_where(resume_run(folder, config, trackers(config), [f"resume={folder.id}", *words]))
    return 0


def _show_where(folder: RunFolder) -> None:
    print(f"run {folder.id}: {folder.path}")
    print(f"curve: {folder.path / 'curve.png'}")
