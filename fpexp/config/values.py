"""Plain values as text: YAML in which 1e-3 is a number, as it is on Hydra's command line."""

from __future__ import annotations

import re
from typing import Any

from fpexp.errors import UserError


def parse_value(text: str, what: str) -> Any:
    """Parse YAML; a `UserError` in one line begins with `what`."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none, !!int abc
        raise UserError(f"{what}: {' '.join(str(error).split())}") from error


def as_text(value: Any) -> str:
    """Return a plain value as it is written on the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_text, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _loader() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml is ten times faster
        """YAML 1.1 asks for a point and a sign in 1.0e-3; YAML 1.2 and people do not."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )
    return Loader
