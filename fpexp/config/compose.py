"""Command-line overrides -> RunConfig, by Hydra. Its errors become one line each."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fpexp.config.catalogue import GROUPS, check_choice, choice_file, choices, conf_dir
from fpexp.config.grid import KEY as GRID
from fpexp.config.grid import GridJob, grid_jobs
from fpexp.config.run import RunConfig
from fpexp.config.schema import did_you_mean
from fpexp.config.search_path import own_folders
from fpexp.config.words import key_of, parse_overrides, product, values
from fpexp.errors import UserError

CONFIG_NAME = "config"
WITHIN_CONF = {"of_model": "solver", "of_task": "model", "budget": "training"}
"""What conf/ has files decide for others, which refer to it, and for which; gone once they have their values."""
NO_ROW = GridJob("", [])
"""Of a job that no grid names."""
REPORT = "report"
"""How an experiment is reported (fpexp.reporting.layout): read from its own file, nothing of a run."""
OF_A_SWEEP = ("grid", "evaluate")
"""What `sweep` says of all jobs together; it is no part of one."""


def compose(arguments: Sequence[str]) -> RunConfig:
    """Compose and check one run. Raises `UserError` for anything that is wrong with the arguments."""
    overrides = parse_overrides(arguments)
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"'{override.input_line}' names several values; add -m to run each of them")
    return _compose(overrides)


def compose_jobs(arguments: Sequence[str]) -> list[RunConfig]:
    """Compose and check every job of a multirun, in the order in which they are run."""
    return [config for _, config in each_job(arguments)]


def each_job(arguments: Sequence[str]) -> list[tuple[list[str], RunConfig]]:
    """Return the words of every job of a multirun, with what is composed of them and checked."""
    return [([*words, *job.words], _compose_job(words, job)) for words, job in _expand(arguments)]


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Return the words of every job of a multirun, as a single run takes them.

    They are the product of what the command line names, or else the experiment in hydra.sweeper.params, times the rows
    of the experiment's sweep.grid.
    """
    return [[*words, *job.words] for words, job in _expand(arguments)]


def _expand(arguments: Sequence[str]) -> list[tuple[list[str], GridJob]]:
    """Return the words of every job: those of the command line's product, and those of a row of the grid."""
    overrides = parse_overrides(arguments)
    for override in overrides:
        if override.is_sweep_override() and override.is_hydra_override():
            raise UserError(f"'{override.input_line}': what is Hydra's own takes one value")
    config, _ = _compose_raw([*(o for o in overrides if not o.is_sweep_override()), *_first_values(overrides)])
    given = {str(override.key_or_group) for override in overrides}
    own = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items() if key not in given]
    jobs = product(parse_overrides([*own, *arguments]))
    several = any(o.is_sweep_override() and o.key_or_group == "experiment" for o in overrides)
    if _grid(config) is None and not several:
        return [(words, NO_ROW) for words in jobs]
    return [(words, job) for words in jobs for job in _grid_jobs(words)]


def _grid_jobs(words: Sequence[str]) -> list[GridJob]:
    config, selected = _compose_raw(parse_overrides(words))
    grid = _grid(config)
    if grid is None:
        return [NO_ROW]
    experiment = selected["experiment"]
    if experiment is None or any(key_of(word) == GRID for word in words):
        return grid_jobs(grid, words)
    return grid_jobs(grid, words, f"{choice_file('experiment', experiment, own_folders(words))}: {GRID}")


def _compose_job(words: Sequence[str], job: GridJob) -> RunConfig:
    """Compose a job of a multirun; a mistake that is its row's names the row."""
    try:
        return compose([*words, *job.words])
    except UserError as error:
        if job is NO_ROW or _refusal(words) == str(error):
            raise
        raise UserError(f"{job.row}: {error}") from error


def _refusal(words: Sequence[str]) -> str | None:
    try:
        compose(words)
    except UserError as error:
        return str(error)
    return None


def _grid(config: DictConfig) -> Any:
    """Return sweep.grid as plain data; None where there is none."""
    sweep = config.get("sweep")
    if not isinstance(sweep, DictConfig) or sweep.get("grid") is None:
        return None
    try:
        return OmegaConf.to_container(sweep, resolve=True)["grid"]  # type: ignore[call-overload,index]
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from error


def measured_afterwards(words: Sequence[str]) -> Any:
    """Return a job's sweep.evaluate as plain data: what its experiment has measured of every finished run."""
    sweep = _compose_raw(parse_overrides(words))[0].sweep
    return OmegaConf.to_container(sweep, resolve=True).get("evaluate")  # type: ignore[union-attr]


def permissive(arguments: Sequence[str]) -> list[str]:
    """Return the words of one job for Hydra's launchers, with plain values forced in as `compose` does."""
    return [_force(override) for override in parse_overrides(arguments)]


def _first_values(overrides: Iterable[Override]) -> list[Override]:
    return parse_overrides([values(override)[0] for override in overrides if override.is_sweep_override()])


def _compose(overrides: Sequence[Override]) -> RunConfig:
    return from_hydra(*_compose_raw(overrides))


def _compose_raw(overrides: Sequence[Override]) -> tuple[DictConfig, dict[str, Any]]:
    """Return what Hydra makes of the overrides, unchecked, and its choices, group -> file."""
    own = own_folders([str(override.input_line) for override in overrides])
    for override in overrides:
        _check_group(override, own)
        _check_top_level(override)
    plain = [override for override in overrides if _is_plain(override)]
    lines = tuple(str(override.input_line) for override in overrides if override not in plain)
    config, selected = _choose(lines, own, _newest_file(own))
    config = copy.deepcopy(config)
    OmegaConf.set_struct(config, False)
    for override in plain:
        try:
            OmegaConf.update(config, override.get_key_element().lstrip("+"), override.value(), force_add=True)
        except OmegaConfBaseException as error:
            raise UserError(f"cannot set '{override.input_line}': {_first_line(error)}") from error
    return config, selected


@functools.lru_cache(maxsize=256)
def _choose(lines: tuple[str, ...], own: tuple[Path, ...], newest: int) -> tuple[DictConfig, dict[str, Any]]:
    """Return what Hydra makes of choices of groups, and of what is its own.

    Once for the jobs of a sweep that differ in plain values alone: Hydra takes its time. `own` and `newest` tell when
    the same words mean something else.
    """
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fpexp"):
            config = hydra_compose(CONFIG_NAME, overrides=list(lines), return_hydra_config=True)
            selected = OmegaConf.to_container(config.hydra.runtime.choices)
    except MissingConfigException as error:
        raise UserError(_missing(error)) from error
    except (HydraException, OmegaConfBaseException, YAMLError) as error:  # YAMLError: of a file of the user's
        raise UserError(_first_line(error)) from error
    return config, dict(selected)  # type: ignore[arg-type]


def _newest_file(own: Sequence[Path]) -> int:
    """Return when the config files have last changed, in ns."""
    return max(path.lstat().st_mtime_ns for folder in (conf_dir(), *own) for path in folder.rglob("*"))


def from_hydra(config: DictConfig, selected: dict[str, Any]) -> RunConfig:
    """Check what Hydra composed. `selected` are its runtime choices, group -> file."""
    try:
        tree = {name: node for name, node in config.items() if name != "hydra"}
        raw = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from error
    for name in (*WITHIN_CONF, REPORT):
        raw.pop(name, None)  # type: ignore[union-attr,call-arg,arg-type]
    for name in OF_A_SWEEP:
        if isinstance(raw.get("sweep"), dict):  # type: ignore[union-attr]
            raw["sweep"].pop(name, None)  # type: ignore[index,call-overload,union-attr]
    raw["choices"] = {group: selected.get(group) for group in GROUPS}  # type: ignore[index,call-overload]
    return RunConfig.parse(raw)  # type: ignore[arg-type]


def _force(override: Override) -> str:
    """Force plain values in, so that our schema, not Hydra, judges every key.

    Hydra says of a typo only that the key can be added; the schema says which key was meant.
    """
    line = str(override.input_line)
    return "++" + line.lstrip("+") if _is_plain(override) else line


def _is_plain(override: Override) -> bool:
    """Tell whether an override sets a value, and neither chooses a file nor takes away nor is Hydra's own."""
    is_group = override.key_or_group in GROUPS or override.package is not None
    return not (is_group or override.is_delete() or str(override.key_or_group).startswith("hydra"))


def _check_group(override: Override, own: Sequence[Path]) -> None:
    if override.key_or_group in GROUPS and not override.is_delete():
        value = override.value()
        if not isinstance(value, str):
            known = ", ".join(choices(override.key_or_group, own))
            raise UserError(f"'{override.input_line}': a group takes one name ({known})")
        check_choice(override.key_or_group, value, own)


def _check_top_level(override: Override) -> None:
    """Catch a misspelt group here: without it Hydra would complain of the group that is missing."""
    key = str(override.key_or_group)
    of = WITHIN_CONF.get(key.partition(".")[0])
    if of:
        leaf = key.partition(".")[2].rpartition(".")[2] or "<name>"
        raise UserError(f"'{key}' is for the files in conf/; set {of}.{leaf} instead")
    if key.partition(".")[0] == REPORT:
        raise UserError(f"'{key}' is for the files in conf/experiment; it is no setting of a run")
    known = {field.name for field in dataclasses.fields(RunConfig)} | {*GROUPS, "hydra"}
    near = did_you_mean(key, known)
    if "." not in key and "/" not in key and key not in known and near:
        raise UserError(f"unknown key '{key}'{near}")


def _missing(error: MissingConfigException) -> str:
    options = error.options or []
    name = str(error.missing_cfg_file)
    if name == "hydra/launcher/joblib":
        return f"{name} needs Hydra's joblib launcher; install it with pip install hydra-joblib-launcher"
    if "submitit" in name:
        return f"{name} needs Hydra's submitit launcher; install it with pip install 'fpexp[slurm]'"
    return f"no config file '{name}'{did_you_mean(name.rpartition('/')[2], options)} ({', '.join(options)})"


def _first_line(error: Exception) -> str:
    message = " ".join(str(error).split())
    if message.startswith("You must specify 'task'"):
        return f"which task? write task=<name> ({', '.join(choices('task'))})"
    if message.startswith("You must specify 'model'"):
        return f"which model? write model=<name> ({', '.join(choices('model'))})"
    return message
