"""`fpexp doctor`: is everything here, and what would be used? Nothing is imported that may be missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path

import fpexp
from fpexp.commands.arguments import take
from fpexp.errors import UserError
from fpexp.tracking.console import note, print_table

GIB = 2**30
LEAST_FREE = GIB  # bytes at results_dir

# Looked for when fpexp runs from a folder without being installed: its own metadata is not there to say.
PACKAGES = ["torch", "numpy", "numba", "hydra-core", "omegaconf", "PyYAML"]
PACKAGES += ["safetensors", "datasets", "matplotlib", "rich", "wandb"]


@dataclass
class Findings:
    """Rows of the table (what, found, needed, state), and the problems as (problem, mend)."""

    rows: list[list[str]] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def add(self, what: str, found: str, needed: str = "", mend: str = "") -> None:
        """Add a row; a mend makes it a problem."""
        self.rows.append([what, found, needed, "problem" if mend else "ok"])
        if mend:
            self.problems.append((f"{what}: {found}" + (f", needed: {needed}" if needed else ""), mend))


@dataclass(frozen=True)
class Needed:
    """A package and its bounds, as text and as a check of a version."""

    name: str
    bounds: str = ""
    fits: Callable[[str], bool] = lambda version: True


def run(arguments: list[str]) -> int:
    """Print versions, devices, backends and disk; return 1 if something is missing, with the mend."""
    results_dir, others = take(arguments, "results_dir")
    if others:
        raise UserError(f"unknown argument '{others[0]}'; `fpexp doctor` takes results_dir=<folder> alone")
    findings = Findings()
    _check_python(findings)
    _check_packages(findings)
    if _check_devices(findings):
        _check_backends(findings)
    _check_disk(findings, results_dir or "results")
    print_table("", ["what", "found", "needed", ""], findings.rows)
    for problem, mend in findings.problems:
        note(f"\n{problem}\n{mend}")
    if not findings.problems:
        note("\nall is there")
    return 1 if findings.problems else 0


def _check_python(findings: Findings) -> None:
    found = platform.python_version()
    try:
        from packaging.specifiers import SpecifierSet

        bounds = SpecifierSet(metadata.metadata("fpexp")["Requires-Python"] or "")
    except (ImportError, metadata.PackageNotFoundError):
        findings.add("python", found)
        return
    needed = _lower_first(bounds)
    fits = bounds.contains(found, prereleases=True)
    findings.add("python", found, needed, "" if fits else f"make a virtual environment with Python {needed}")


def _check_packages(findings: Findings) -> None:
    for package in _packages(findings):
        version = _version(package.name)
        mend = "" if version and package.fits(version) else f"pip install '{package.name}{package.bounds}'"
        findings.add(package.name, version or "missing", package.bounds, mend)


def _packages(findings: Findings) -> list[Needed]:
    """Return what the installed fpexp says it needs on this machine."""
    try:
        lines = metadata.requires("fpexp") or []
    except metadata.PackageNotFoundError:
        findings.add("fpexp", f"{fpexp.__version__}, not installed: versions are not compared")
        return [Needed(name) for name in PACKAGES]
    findings.add("fpexp", fpexp.__version__)
    try:
        from packaging.requirements import Requirement
    except ImportError:
        findings.add("packaging", "missing: versions are not compared")
        return [Needed(re.split(r"[^\w.-]", line)[0]) for line in lines if "extra ==" not in line]
    return [
        Needed(r.name, _lower_first(r.specifier), partial(r.specifier.contains, prereleases=True))
        for r in map(Requirement, lines)
        if r.marker is None or r.marker.evaluate({"extra": ""})
    ]


def _lower_first(bounds: object) -> str:
    return ",".join(sorted(str(bounds).split(","), key=lambda bound: bound.startswith("<")))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_devices(findings: Findings) -> bool:
    """Add what there is to compute on; return whether torch could be asked."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cpu = f"{cores} threads, {memory:.0f} GiB"
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        findings.add("cpu", cpu)
        findings.add("devices", f"torch does not import: {error}", mend="pip install --force-reinstall torch")
        return False
    findings.add("cpu", f"{cpu}, torch uses {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        findings.add(f"cuda:{index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB")
    if not torch.cuda.device_count():
        findings.add("cuda", "none")
    return True


def _check_backends(findings: Findings) -> None:
    try:
        from fpexp.ops import backends

        chosen = backends()
    except ImportError as error:
        findings.add("backends", str(error), mend="mend what is missing above, then run `fpexp doctor` again")
        return
    for op, backend in chosen.items():
        findings.add(f"op {op}", backend)


def _check_disk(findings: Findings, results_dir: str) -> None:
    """Look at the folder, or at the nearest one above it that exists; leave nothing behind."""
    folder = Path(results_dir).absolute()
    while not os.path.exists(folder):  # Path.exists raises where one may not look
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            findings.add("results_dir", f"{results_dir} is writable")
    except OSError as error:
        mend = "choose another folder with results_dir=<folder>"
        findings.add("results_dir", f"cannot write in {folder}: {error.strerror}", mend=mend)
    free = shutil.disk_usage(folder).free
    mend = (
        "" if free >= LEAST_FREE else f"free some space on the disk of {folder}, or choose another results_dir=<folder>"
    )
    findings.add("free disk", f"{free / GIB:.1f} GiB", f">={LEAST_FREE / GIB:.0f} GiB", mend)
