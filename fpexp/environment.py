"""Where and with what a run was made."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import fpexp
from fpexp.config.run import RunConfig
from fpexp.ops import OPS
from fpexp.ops.backend import choose

PACKAGES = (
    "torch",
    "triton",
    "numba",
    "numpy",
    "hydra-core",
    "omegaconf",
    "safetensors",
    "datasets",
    "tokenizers",
    "wandb",
)


def describe(config: RunConfig, parameters: int, words: Sequence[str]) -> dict[str, Any]:
    """Return what environment.json says of one sitting; `words` are the arguments of `fpexp train`."""
    return {
        **describe_machine(config.device, ["train", *words]),
        "seed": config.seed,
        "parameters": parameters,
        "fingerprint": config.fingerprint(),
    }


def describe_machine(device: str, words: Sequence[str], packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return versions, commit and machine; `words` are what was typed after `fpexp`."""
    return {
        "fpexp": fpexp.__version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "commit": _commit(),
        "command": shlex.join(["fpexp", *words]),
        "platform": platform.platform(),
        "device": _device_name(device),
        "cpus": os.cpu_count(),
        "backends": {op: choose(op, torch.device(device)) for op in OPS},
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return f"{device}: {platform.processor() or platform.machine()}"


def _commit() -> str | None:
    """Return the checkout's commit, with + where it was changed; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
    return result.stdout.strip()
