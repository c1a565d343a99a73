"""Fixed-Point RNNs: train, measure and compare them from the command line. See `fpexp --help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fpexp.models.lm import LanguageModel

__version__ = "0.1.0"


def load(
    run: str | Path,
    *,
    results_dir: str | Path = "results",
    device: str = "cpu",
    checkpoint: Literal["newest", "best"] = "newest",
) -> LanguageModel:
    """Return the trained model of a run, in evaluation mode, with its `RunConfig` as `model.config`.

    `run` is a run id (looked up under `results_dir`/runs) or the run's folder. `newest` are the weights that the run's
    curve was measured with, `best` those of the best validation. `model(tokens)` takes indices (B, T) and returns a
    `ModelOutput`. Raises `fpexp.errors.UserError` when there is no such run or checkpoint.
    """
    from fpexp.loading import load_run

    return load_run(run, results_dir=results_dir, device=device, checkpoint=checkpoint).model
