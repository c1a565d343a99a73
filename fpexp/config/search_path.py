"""`hydra.searchpath=[file:///path/to/my/conf]`: folders of one's own whose files stand beside those in conf/.

Every command that takes the words of a run, or lists what there is to choose, knows them by this word.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from fpexp.errors import UserError

KEY = "hydra.searchpath"


def is_search_path(word: str) -> bool:
    """Tell whether a word names folders of one's own."""
    return word.partition("=")[0].lstrip("+") == KEY


def own_folders(words: Sequence[str]) -> tuple[Path, ...]:
    """Return the folders that the last such word names, in the order in which Hydra looks into them."""
    named = [word for word in words if is_search_path(word)]
    if not named:
        return ()
    from fpexp.config.words import parse_overrides  # by Hydra's grammar, which takes its time to load

    value = parse_overrides(named)[-1].value()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UserError(f"'{named[-1]}' must be a list of folders, such as {KEY}=[file:///path/to/my/conf]")
    return tuple(_folder(item) for item in value)


def _folder(place: str) -> Path:
    scheme, found, path = place.rpartition("://")
    if scheme == "pkg":
        return _package(path)
    if found and scheme != "file":
        raise UserError(f"{KEY}: '{place}' is neither file://<folder> nor pkg://<package>")
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise UserError(f"{KEY}: there is no folder {path}")
    return folder


def _package(path: str) -> Path:
    name = path.replace("/", ".").rstrip(".")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"{KEY}: there is no package {name}")
    return Path(spec.submodule_search_locations[0])
