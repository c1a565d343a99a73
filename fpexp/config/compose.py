"""Command-line overrides -> RunConfig, by Hydra. Its errors become one line each."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fpexp.config.catalogue import GROUPS, check_choice, choices, conf_dir
from fpexp.config.quoting import is_override, quoted, shell_word
from fpexp.config.run import RunConfig
from fpexp.config.schema import did_you_mean
from fpexp.errors import UserError

CONFIG_NAME = "config"
WITHIN_CONF = {"of_model": "solver", "of_task": "model"}
"""What conf/ has files decide for others, which refer to it, and for which; gone once they have their values."""
REPORT = "report"
"""How an experiment is reported (fpexp.reporting.layout): read from its own file, nothing of a run."""


def parse_overrides(arguments: Sequence[str]) -> list[Override]:
    """Parse `key=value` words by Hydra's grammar; a `UserError` quotes the word that is not one."""
    overrides = []
    for argument in arguments:
        if "=" not in argument and not argument.startswith("~"):
            raise UserError(f"'{argument}' is not an override; write <key>=<value>, such as task=a5")
        try:
            overrides += OverridesParser.create().parse_overrides([argument])
        except OverrideParseException as error:
            raise UserError(_unread(argument, error)) from error
    return overrides


def compose(arguments: Sequence[str]) -> RunConfig:
    """Compose and check one run. Raises `UserError` for anything that is wrong with the arguments."""
    overrides = parse_overrides(arguments)
    for override in overrides:
        if override.is_sweep_override():
            raise UserError(f"'{override.input_line}' names several values; add -m to run each of them")
    return _compose(overrides)[0]


def compose_jobs(arguments: Sequence[str]) -> list[RunConfig]:
    """Compose and check every job of a multirun, in the order in which Hydra runs them."""
    return [_compose(parse_overrides(words))[0] for words in expand(arguments)]


def expand(arguments: Sequence[str]) -> list[list[str]]:
    """Return the words of every job of a multirun, each of which `compose` takes."""
    overrides = parse_overrides(with_own_sweep(arguments))
    alternatives = [
        [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
        if override.is_sweep_override()
        else [str(override.input_line)]
        for override in overrides
    ]
    return [list(words) for words in itertools.product(*alternatives)]


def with_own_sweep(arguments: Sequence[str]) -> list[str]:
    """Return the words with what the experiment sweeps over by itself in front, unless they set the same keys."""
    overrides = parse_overrides(arguments)
    plain = [override for override in overrides if not override.is_sweep_override()]
    swept = [override for override in overrides if override.is_sweep_override()]
    _, hydra = _compose([*plain, *_first_values(swept)])
    given = {str(override.key_or_group) for override in overrides}
    own = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items() if key not in given]
    return [*own, *arguments]


def permissive(arguments: Sequence[str]) -> list[str]:
    """Return the words of a whole sweep for Hydra's multirun, with plain values forced in as `compose` does."""
    return [*(_force(override) for override in parse_overrides(arguments)), "hydra.sweeper.params=null"]


def _first_values(overrides: Iterable[Override]) -> list[Override]:
    return parse_overrides([f"{o.get_key_element()}={next(iter(o.sweep_string_iterator()))}" for o in overrides])


def _compose(overrides: Sequence[Override]) -> tuple[RunConfig, DictConfig]:
    elsewhere = any(override.key_or_group == "hydra.searchpath" for override in overrides)
    for override in overrides:
        if not elsewhere:
            _check_group(override)
        _check_top_level(override)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3", job_name="fpexp"):
            config = hydra_compose(CONFIG_NAME, overrides=[_force(o) for o in overrides], return_hydra_config=True)
            selected = OmegaConf.to_container(config.hydra.runtime.choices)
    except MissingConfigException as error:
        raise UserError(_missing(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_first_line(error)) from error
    return from_hydra(config, dict(selected)), config.hydra  # type: ignore[arg-type]


def from_hydra(config: DictConfig, selected: dict[str, Any]) -> RunConfig:
    """Check what Hydra composed. `selected` are its runtime choices, group -> file."""
    tree = {name: node for name, node in config.items() if name != "hydra"}
    try:
        raw = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(_first_line(error)) from error
    for name in (*WITHIN_CONF, REPORT):
        raw.pop(name, None)  # type: ignore[union-attr,call-arg,arg-type]
    raw["choices"] = {group: selected.get(group) for group in GROUPS}  # type: ignore[index,call-overload]
    return RunConfig.parse(raw)  # type: ignore[arg-type]


def _force(override: Override) -> str:
    """Force plain values in, so that our schema, not Hydra, judges every key.

    Hydra says of a typo only that the key can be added; the schema says which key was meant.
    """
    line = str(override.input_line)
    is_group = override.key_or_group in GROUPS or override.package is not None
    if is_group or override.is_delete() or str(override.key_or_group).startswith("hydra"):
        return line
    return "++" + line.lstrip("+")


def _check_group(override: Override) -> None:
    if override.key_or_group in GROUPS and not override.is_delete():
        value = override.value()
        if not isinstance(value, str):
            raise UserError(
                f"'{override.input_line}': a group takes one name ({', '.join(choices(override.key_or_group))})"
            )
        check_choice(override.key_or_group, value)


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


def _unread(argument: str, error: OverrideParseException) -> str:
    """Say what the grammar does not take, and how to write the value as it is."""
    key, _, value = argument.partition("=")
    word = f"{key}={quoted(value)}"
    example = f": {shell_word(word)}" if is_override(word) else ""
    reason = str(error).splitlines()[0]
    only_repeats = argument.splitlines()[0] in reason  # behind the name of an exception
    return f"cannot read '{argument}'{'' if only_repeats else f': {reason}'}; quote special characters{example}"


def _missing(error: MissingConfigException) -> str:
    options = error.options or []
    name = str(error.missing_cfg_file)
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
