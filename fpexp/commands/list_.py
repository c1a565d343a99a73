"""fpexp list: what conf/ and folders of one's own offer; of models, with their sizes."""

from __future__ import annotations

from fpexp.config.catalogue import choices
from fpexp.config.schema import did_you_mean
from fpexp.config.search_path import is_search_path, own_folders
from fpexp.errors import UserError

KINDS = ("tasks", "models", "solvers", "schedules", "gradients", "scales", "experiments")

SCALES = ("cpu", "gpu", "paper")
"""In this order; others come after them."""

SIZED_TASK = "task=a5"
"""The task whose vocabulary and widths the sizes are for, unless another is named."""


def run(arguments: list[str]) -> int:
    """Print one line for each choice of the kinds asked for, or of all; for models alone, their parameter counts."""
    kinds = [word for word in arguments if "=" not in word]
    settings = [word for word in arguments if "=" in word]
    for kind in kinds:
        if kind not in KINDS:
            raise UserError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS)} ({', '.join(KINDS)})")
    if kinds == ["models"]:
        _print_sizes(settings)
        return 0
    own = own_folders(settings)
    for word in settings:
        if not is_search_path(word):
            raise UserError(f"'{word}' has a meaning with models alone: fpexp list models {word}")
    for kind in kinds or KINDS:
        if len(kinds) != 1:
            print(f"{kind}:")
        indent = "" if len(kinds) == 1 else "  "
        for name, text in choices(kind.removesuffix("s"), own).items():
            print(f"{indent}{name:<16} {text}")
    return 0


def _print_sizes(settings: list[str]) -> None:
    """One line a model: name, parameters at each scale, description. `settings` are words as train takes them."""
    from fpexp.build import parameter_count
    from fpexp.config.compose import compose

    if not any(word.startswith(("task=", "experiment=")) for word in settings):
        settings = [SIZED_TASK, *settings]
    for word in settings:
        if word.startswith(("model=", "scale=")):
            raise UserError(f"'{word}': every model is listed at every scale; leave it out")
    own = own_folders(settings)
    scales = sorted(choices("scale", own), key=lambda name: SCALES.index(name) if name in SCALES else len(SCALES))
    rows: dict[str, list[int]] = {}
    for name in choices("model", own):
        try:
            rows[name] = [parameter_count(compose([*settings, f"model={name}", f"scale={s}"])) for s in scales]
        except UserError as error:
            raise UserError(f"model={name}: {error}") from error
    print(f"{'parameters':<16} " + " ".join(f"{f'scale={scale}':>12}" for scale in scales) + f"  {' '.join(settings)}")
    for name, text in choices("model", own).items():
        print(f"{name:<16} " + " ".join(f"{count:>12,}" for count in rows[name]) + f"  {text}")
