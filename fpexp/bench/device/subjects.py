"""Resolved configs of the models that are trained and solved on the device, kept beside this file as JSON.

A machine with a GPU need not have Hydra. `python -m fpexp.bench.device.subjects` writes them from conf/.
"""

from __future__ import annotations

import json
from pathlib import Path

from fpexp.build import Experiment, build
from fpexp.config.run import RunConfig
from fpexp.errors import FpexpError, UserError

FILE = Path(__file__).with_name("subjects.json")

FIXED_POINTS = ("fp_mamba_k", "fp_mamba_h", "fp_mamba_dplr")
BASELINES = ("lstm", "mamba", "mamba2", "gdn", "deltaproduct", "transformer")

LEARNING = "learning"
"""The run to accuracy: the demo's model at the larger scale."""

SUBJECTS = {
    **{model: [f"model={model}"] for model in (*FIXED_POINTS, *BASELINES)},
    LEARNING: ["model=fp_mamba_h", "model.delta_range=[0.1,1.0]"],
}
"""Words of `fpexp train` beside the task and the scale, by name."""


def resolve() -> dict[str, object]:
    """Compose all subjects."""
    from fpexp.config.compose import compose

    return {name: compose(["task=a5", "scale=gpu", *words]).to_dict() for name, words in SUBJECTS.items()}


def read(name: str) -> RunConfig:
    """Read a subject's config, checked as on the command line; FpexpError where the file is not what it should be."""
    try:
        return RunConfig.parse(json.loads(FILE.read_text())[name])
    except (OSError, ValueError, KeyError, UserError) as error:
        raise FpexpError(f"{FILE.name}: {error}; make it anew: python -m fpexp.bench.device.subjects") from error


def make(name: str, device: str, rehearse: bool, precision: str = "auto") -> Experiment:
    """Build a subject on a device; with `rehearse` at sizes that say nothing."""
    config = read(name).to_dict() | {"device": device, "precision": precision}
    if rehearse:
        config["model"]["d_model"] = 16
        config["model"] |= {key: 8 for key in ("head_size", "state_size") if config["model"].get(key)}
        config["training"] |= {"batch_size": 4, "warmup_steps": 0}
        config["task"]["lengths"]["max"] = 4
        config["evaluation"] |= {"lengths": [2, 4, 8], "batch_size": 8}
    return build(RunConfig.parse(config))


def main() -> None:
    """Write the file: one subject a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(tree)}" for name, tree in resolve().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
