"""What experiments ask for, composed here and handed to the report as plain data: it knows neither Hydra nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fpexp.build import settle_for_device, uses_solver
from fpexp.config.catalogue import choice_file, choices
from fpexp.config.compose import each_job, measured_afterwards
from fpexp.config.quoting import shell_word
from fpexp.config.run import RunConfig
from fpexp.config.search_path import own_folders
from fpexp.reporting.layout import read_layout
from fpexp.reporting.outcome import Job, Plan
from fpexp.reporting.paper import read_paper
from fpexp.run_folder import RunFolder


def plan(name: str, words: Sequence[str], results_dir: Path) -> Plan:
    """Compose an experiment's jobs, with further words as for train. A `UserError` where that cannot be done."""
    folders = own_folders(words)
    layout = read_layout(choice_file("experiment", name, folders))
    description = choices("experiment", folders)[name].removesuffix(" (-m)")
    paper = read_paper(results_dir, name)
    where = [f"results_dir={results_dir}"] if results_dir != Path("results") else []
    if layout.benchmarks:
        return Plan(name, description, _command(["bench", *layout.benchmarks, *where]), (), layout, paper)
    common = [f"experiment={name}", *words]
    jobs = []
    composed = each_job(common)
    verb = ["train", "-m"] if measured_afterwards(composed[0][0]) else ["train"]  # a sweep measures, also of one job
    for job, config in composed:
        shared = [word for word in common if word in job]  # not those that name several values
        own = [word for word in job if word not in shared]
        jobs.append(
            Job(
                seed=config.seed,
                settings={key: value for key, _, value in (word.partition("=") for word in own) if key != "seed"},
                command=_command([*verb, *shared, *own, *where]),
                config=config.to_dict(),
                identities=identities(config),
            )
        )
    command = _command(["train", "-m", *common, *where]) if len(jobs) > 1 else jobs[0].command
    resume = _command(["train", *where, "resume="])
    return Plan(name, description, command, tuple(jobs), layout, paper, resume)


def identities(config: RunConfig) -> frozenset[str]:
    """Return what a run of this config, with any seed, can be known by: an `auto` is settled by the device it is on."""
    devices = ("cpu", "cuda") if config.device == "auto" else (config.device,)
    return frozenset(identity(settle_for_device(config.replace(device=device))[0]) for device in devices)


def identity(config: RunConfig) -> str:
    """Hash of what decides a settled run's numbers but for the seed and the order of sums in them.

    Solver, schedule and gradient mean nothing to a model that solves no fixed point.
    """
    unused = () if uses_solver(config.model) else ("solver", "schedule", "gradient")
    config = config.replace(device=config.device.partition(":")[0])
    return config.fingerprint(("seed", "deterministic", *unused))


def identify(run: RunFolder) -> str:
    """Return the identity of a recorded run, its config brought to the present schema."""
    return identity(run.config())


def _command(words: Sequence[str]) -> str:
    return " ".join(["fpexp", *map(shell_word, words)])
