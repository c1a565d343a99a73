"""Changing single values of a config that is already whole, without Hydra."""

from __future__ import annotations

from collections.abc import Sequence

from fpexp.config.catalogue import GROUPS
from fpexp.config.run import RunConfig
from fpexp.config.values import parse_value
from fpexp.errors import UserError


def override(config: RunConfig, words: Sequence[str]) -> RunConfig:
    """Return the config with `key.path=value` applied and checked; values are YAML."""
    if not words:
        return config
    tree = config.to_dict()
    for word in words:
        path, equals, text = word.lstrip("+").partition("=")
        if not equals:
            raise UserError(f"'{word}' is not an override; write <key>=<value>")
        if path in GROUPS:
            raise UserError(
                f"'{word}' chooses a group, which a saved config has settled; change its keys: {path}.<key>=<value>"
            )
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise UserError(f"unknown key '{path}'; {parent} has no keys of its own")
        node[name] = parse_value(text, f"cannot read the value of '{word}'")
    return RunConfig.parse(tree)
