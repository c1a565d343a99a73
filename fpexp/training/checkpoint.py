"""Checkpoints: one safetensors file each, `checkpoints/step_<number>.safetensors`, written whole or not at all.

Tensors are named `model.*`, `optimizer.<index>.*` and `random.*`; everything else is JSON in the file's metadata.
Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fpexp.errors import FpexpError, UserError
from fpexp.run_folder import write_json
from fpexp.sharding import shared_like, whole

_NAME = re.compile(r"step_(\d+)\.safetensors")
_COMPILED_PREFIX = "_orig_mod."


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds: `tensors` by name and the JSON `state`."""

    path: Path
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    def load_model(self, model: nn.Module) -> None:
        """Load the weights; a `UserError` names the keys that do not fit. Loads what a compiled model saved, too.

        FpexpError where a weight is not finite: none was saved like that.
        """
        self.check_fits(model)
        weights = self._weights()
        if bad := first_non_finite(weights):
            raise FpexpError(f"{self.path}: {bad} is not finite; move this checkpoint away to use the one before it")
        ours = model.state_dict()
        model.load_state_dict({name: shared_like(tensor, ours[name]) for name, tensor in weights.items()})

    def check_fits(self, model: nn.Module) -> None:
        """Raise a `UserError` that names the keys which are missing, unexpected or of another shape."""
        ours, saved = model.state_dict(), self._weights()
        missing, surplus = sorted(ours.keys() - saved.keys()), sorted(saved.keys() - ours.keys())
        shapes = [
            f"{name} {tuple(saved[name].shape)} is not {tuple(ours[name].shape)}"
            for name in sorted(ours.keys() & saved.keys())
            if saved[name].shape != ours[name].shape
        ]
        problems = [f"missing {name}" for name in missing] + [f"unexpected {name}" for name in surplus] + shapes
        if problems:
            shown = ", ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
            raise UserError(f"{self.path} is of another model: {shown}")

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Load the moments; groups and learning rate are the config's."""
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in self._part("optimizer.").items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, moments in state.items():
            weight = parameters[number]
            for key, tensor in moments.items():
                moments[key] = shared_like(tensor, weight) if tensor.shape == weight.shape else tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def load_randomness(self) -> None:
        """Set torch's global generators, which dropout draws from, to where they were."""
        torch.set_rng_state(self.tensors["random.cpu"])
        for name, state in self._part("random.cuda.").items():
            if int(name) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(name))

    def _weights(self) -> dict[str, Tensor]:
        return {name.replace(_COMPILED_PREFIX, ""): tensor for name, tensor in weights_of(self.tensors).items()}

    def _part(self, prefix: str) -> dict[str, Tensor]:
        return _part(self.tensors, prefix)


def weights_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's own among the tensors of a checkpoint, by the names that they have there."""
    return _part(tensors, "model.")


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def first_non_finite(weights: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor that holds NaN or infinity; empty where none does."""
    return next((name for name, tensor in weights.items() if not tensor.isfinite().all()), "")


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, whole ones also where the processes of a run have a part each.

    Then all must collect; those that do not `keep` anything return nothing.
    """
    parts = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        parts |= {f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in moments.items()}
    tensors = {}
    for name, part in parts.items():
        tensor = whole(part)
        if keep:
            tensors[name] = tensor if tensor is part else tensor.cpu()  # one layer's worth at a time on the GPU
    if keep:
        tensors["random.cpu"] = torch.get_rng_state()
        for number in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            tensors[f"random.cuda.{number}"] = torch.cuda.get_rng_state(number)
    return tensors


def write(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
    """Write `step`'s checkpoint beside the others; on failure they stay as they were and an `FpexpError` says so."""
    path = _path(folder, step)
    temporary = folder / f".{path.name}.partial"
    try:
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, temporary, metadata={"state": json.dumps({**state, "step": step})})
        _sync(temporary)
        os.replace(temporary, path)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        earlier = next(iter(_newest_first(folder)), None)
        kept = f"{earlier.name} is whole" if earlier else "there is no earlier one"
        raise FpexpError(f"cannot save the checkpoint {path}: {error}; {kept}; free some disk space") from error
    return path


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one, and what a killed process left half-written."""
    best = best_step(folder)
    for path in list(_newest_first(folder))[keep:]:
        if step_of(path) != best:
            path.unlink()
    for pattern in (".*.partial", ".tmp*"):  # ours, and safetensors' own
        for path in folder.glob(pattern):
            path.unlink()


def mark_best(folder: Path, step: int, accuracy: float, loss: float) -> None:
    """Remember which step did best in validation."""
    write_json(folder / "best.json", {"step": step, "sequence_accuracy": accuracy, "loss": loss})


def best_step(folder: Path) -> int | None:
    """Return the step that did best in validation, None where none was marked."""
    try:
        return int(json.loads((folder / "best.json").read_text())["step"])
    except (OSError, ValueError, KeyError):
        return None


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def load_newest(folder: Path, warnings: list[str]) -> Checkpoint:
    """Load the newest checkpoint that is whole; newer ones that are not are set aside, with a line in `warnings`."""
    if not any(folder.glob("step_*")):
        raise UserError(
            f"no whole checkpoint in {folder}: the run was kept without its weights, or ended before its first one; it "
            f"can be trained anew: fpexp train config={folder.parent / 'config.yaml'}"
        )
    for path in _newest_first(folder):
        try:
            return read(path)
        except UserError as error:
            aside = path.with_name(f"{path.name}.broken")
            path.rename(aside)
            warnings.append(f"{error}; going back to the one before, and keeping it as {aside.name}")
    raise UserError(f"no whole checkpoint in {folder}; start a new run")


def load_best(folder: Path) -> Checkpoint:
    """Load the checkpoint that did best in validation."""
    step = best_step(folder)
    if step is None:
        raise UserError(f"no checkpoint in {folder} is marked as the best: there was no validation yet")
    return read(_path(folder, step))


def read(path: Path) -> Checkpoint:
    """Read one checkpoint file onto the CPU."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            state = json.loads(file.metadata()["state"])
            return Checkpoint(path, {name: file.get_tensor(name) for name in file.keys()}, state)  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the checkpoint {path}: {error}") from error


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}.safetensors"


def _newest_first(folder: Path) -> Iterator[Path]:
    found = [path for path in folder.glob("step_*.safetensors") if _NAME.fullmatch(path.name)]
    yield from sorted(found, key=step_of, reverse=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
