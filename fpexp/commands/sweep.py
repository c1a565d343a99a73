"""fpexp sweep status: which jobs of a sweep are done, and what makes those that are not."""

from __future__ import annotations

from collections import Counter

from fpexp.commands.duration import say_duration
from fpexp.commands.sweep_jobs import Job, Standing, find_jobs, look_up, own_overrides, steps_done
from fpexp.config.catalogue import choices
from fpexp.config.quoting import shell_word
from fpexp.config.schema import did_you_mean
from fpexp.config.search_path import own_folders
from fpexp.config.words import key_of
from fpexp.errors import UserError
from fpexp.sweep_folder import own_words
from fpexp.tracking.console import note, print_table

NOT_DONE = ("missing", "failed", "interrupted", "lost", "damaged")


def run(arguments: list[str]) -> int:
    """Print one row a job, and the commands that make what is not done; reads results/ alone."""
    if not arguments or arguments[0] != "status":
        word = arguments[0] if arguments else ""
        said = f"unknown '{word}'{did_you_mean(word, ['status'])}; " if word else ""
        raise UserError(f"{said}write fpexp sweep status experiment=<name> [key=value ...]")
    words = [word for word in arguments[1:] if word not in ("-m", "--multirun")]
    if not any(key_of(word) in ("experiment", "task", "model") for word in words):
        known = ", ".join(choices("experiment", own_folders(words)))
        raise UserError(
            "sweep status of what? write experiment=<name>, or task=<name> model=<name> and what else was given to "
            f"fpexp train -m; experiments: {known}"
        )
    jobs = find_jobs(words)
    found = look_up(jobs)
    texts = own_words([{"overrides": own_overrides(job.words)} for job in jobs])
    rows = [
        [str(number), text, _state(standing), _detail(job, standing)]
        for number, (job, standing, text) in enumerate(zip(jobs, found, texts, strict=True))
    ]
    print_table("jobs", ["job", "overrides", "state", "run, reason or step"], rows)
    counts = Counter(_state(standing) for standing in found)
    note(
        f"{len(jobs)} {'job' if len(jobs) == 1 else 'jobs'}: "
        + ", ".join(f"{count} {state}" for state, count in counts.items())
    )
    todo = [(job, standing) for job, standing in zip(jobs, found, strict=True) if _is_wanting(standing)]
    if todo:
        note(say_duration([standing.seconds for _, standing in todo]))
        note("one at a time:")
        note("\n".join(f"  {_command(_verb(job, standing), job.words)}" for job, standing in todo))
        note(f"all that is not done:\n  {_command('fpexp train -m', words)}")
    return 0


def _is_wanting(standing: Standing) -> bool:
    return standing.state in NOT_DONE or (standing.state != "running" and bool(standing.wanting))


def _state(standing: Standing) -> str:
    unmeasured = standing.wanting and standing.state in ("finished", "recorded")
    return f"{standing.state}, not measured" if unmeasured else standing.state


def _detail(job: Job, standing: Standing) -> str:
    if standing.run is None:
        return ""
    if standing.state == "failed":
        return f"{standing.run.id}: {standing.run.status().get('reason', '')}"
    if standing.state in ("running", "interrupted", "lost"):
        return f"{standing.run.id}: step {steps_done(standing.run)}/{job.config.training.steps}"
    return standing.run.id


def _verb(job: Job, standing: Standing) -> str:
    """A sweep, also of one job, goes on with what is begun and measures what its experiment wants to know after it."""
    return "fpexp train -m" if job.measurements or standing.state in ("interrupted", "lost") else "fpexp train"


def _command(start: str, words: list[str]) -> str:
    return " ".join([start, *map(shell_word, words)])
