"""Which backend of an op runs: `reference` everywhere, or the fused one for the device, where it is there."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from fpexp.errors import UserError

logger = logging.getLogger(__name__)

_FUSED = {"cpu": "cpu", "cuda": "triton"}
"""The name of the fused backend, by type of device."""

_COMPILER = {"cpu": "numba", "triton": "triton"}
"""The package that a backend needs."""

_UNTRIED = {("fixed_point_iteration", "triton"): "has yet to be tried on a GPU: its programs wait for each other"}
"""Backends that are used when asked for only."""

_auto_is_reference = False


@functools.cache
def say_once(message: str) -> None:
    """Tell, once in a process, that something is slower than it could be."""
    logger.warning(message)


@functools.cache
def choose(op: str, device: torch.device, requested: str = "auto") -> str:
    """Return the name of the backend of `op` for tensors on `device`.

    `auto` is the device's fused backend where it exists and imports, else `reference`. UserError where the backend
    that was asked for does not exist, is for other devices, or does not import. `triton` may be asked for on a CPU
    where its interpreter takes the place of a GPU.
    """
    existing = available(op)
    if requested == "auto":
        return "reference" if _auto_is_reference else _fastest(op, device, existing)
    if requested not in existing:
        raise UserError(f"backend={requested}: {op} has no such backend ({', '.join(('auto', *existing))})")
    if requested == "reference":
        return requested
    check_device(requested, device)
    if reason := _missing(op, requested):
        raise UserError(f"backend={requested} {reason}, or use backend=reference")
    return requested


def check_device(requested: str, device: torch.device, key: str = "backend") -> None:
    """Raise a UserError that names `key` where a backend is for other devices; `choose` tells what it means here."""
    wanted = next((kind for kind, name in _FUSED.items() if name == requested), device.type)
    if wanted != device.type and not (requested == "triton" and device.type == "cpu" and _interprets()):
        raise UserError(f"{key}={requested} is for {wanted} tensors, not {device.type}; use {key}=auto")


@contextmanager
def only_reference() -> Iterator[None]:
    """Inside the block `auto` is `reference`, in every thread: for comparing a whole model with the truth."""
    global _auto_is_reference
    outside = _auto_is_reference
    try:
        _auto_is_reference = True
        choose.cache_clear()
        yield
    finally:
        _auto_is_reference = outside
        choose.cache_clear()


def load(op: str, device: torch.device, requested: str = "auto") -> ModuleType:
    """Return the module of the backend that `choose` names."""
    return importlib.import_module(f"fpexp.ops.{op}.{choose(op, device, requested)}")


def available(op: str) -> tuple[str, ...]:
    """Return the backends that `op` has, whether or not they run on this machine."""
    fused = (name for name in _FUSED.values() if importlib.util.find_spec(f"fpexp.ops.{op}.{name}"))
    return (*fused, "reference")


def _interprets() -> bool:
    """Tell whether Triton, which looks at the same variable, runs kernels in Python on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def _fastest(op: str, device: torch.device, existing: tuple[str, ...]) -> str:
    fused = _FUSED.get(device.type)
    if fused not in existing:
        logger.info("%s on %s: backend=reference", op, device.type)
        return "reference"
    if reason := _UNTRIED.get((op, fused)) or _missing(op, fused):
        say_once(f"the slower backend=reference is used on {device.type}: backend={fused} {reason}")
        return "reference"
    logger.info("%s on %s: backend=%s", op, device.type, fused)
    return fused


def _missing(op: str, name: str) -> str:
    """Return what a backend needs and does not find; empty where it imports."""
    try:
        importlib.import_module(f"fpexp.ops.{op}.{name}")
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        compiler = _COMPILER[name]
        return f"needs {compiler}, which does not import ({error}); pip install {compiler}"
    return ""
