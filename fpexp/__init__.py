"""Fixed-Point RNNs: train, measure and compare them from the command line. See `fpexp --help`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fpexp.models.lm import LanguageModel

__version__ = "0.1.0"


def load(run: str | Path, *, results_dir: str | Path = "results", device: str = "cpu") -> LanguageModel:
    """Return the trained model of a run, in evaluation mode, with its `RunConfig` as `model.config`.

    `run` is a run id (looked up under `results_dir`/runs) or the run's folder. The best checkpoint is taken where
    one was recorded, else the newest. Raises `fpexp.errors.UserError` when there is no such run or no checkpoint.
    """
    from fpexp.loading import load_run

    return load_run(run, results_dir=results_dir, device=device).model
