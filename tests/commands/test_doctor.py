"""`fpexp doctor` on a machine that has everything, and on some that do not."""

from __future__ import annotations

import builtins
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import fpexp.ops
from fpexp.commands import doctor
from fpexp.errors import UserError

REQUIRES = [
    "numpy<2.6,>=2.1",
    "rich<16,>=14.0",
    "torch~=2.13.0",
    'triton<3.8,>=3.7; sys_platform == "linux"',
    'colorama>=1; sys_platform == "win32"',
    'mypy<2.5,>=2.4; extra == "dev"',
]
VERSIONS = {"numpy": "2.4.6", "rich": "15.0.0", "torch": "2.13.0+cpu", "triton": "3.7.1"}

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed; a test may take some away."""
    installed = dict(VERSIONS)

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRES)
    monkeypatch.setattr(metadata, "metadata", lambda name: {"Requires-Python": "<4,>=3.11"})
    monkeypatch.setattr(fpexp.ops, "backends", lambda: {"selective_scan": "reference"})
    return installed


@pytest.fixture
def examine(versions: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(results_dir: Path = tmp_path / "results") -> tuple[int, str]:
        code = doctor.run([f"results_dir={results_dir}"])
        return code, capsys.readouterr().out

    return run


def test_a_healthy_machine(examine: Doctor, tmp_path: Path) -> None:
    code, out = examine()
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["torch", "2.13.0+cpu", "~=2.13.0", "ok"] in rows
    assert ["rich", "15.0.0", ">=14.0,<16", "ok"] in rows
    assert ["op", "selective_scan", "reference", "ok"] in rows
    assert "mypy" not in out
    assert "problem" not in out
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


@pytest.mark.parametrize("version", [None, "13.9.4", "16.0.0"])
def test_a_package_missing_or_out_of_bounds(version: str | None, examine: Doctor, versions: dict[str, str]) -> None:
    versions.pop("rich")
    if version:
        versions["rich"] = version
    code, out = examine()
    assert code == 1
    assert "pip install 'rich>=14.0,<16'" in out.splitlines()
    assert f"rich: {version or 'missing'}, needed: >=14.0,<16" in out.splitlines()


def test_a_python_out_of_bounds(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.10.4")
    code, out = examine()
    assert code == 1
    assert "make a virtual environment with Python >=3.11,<4" in out.splitlines()


def test_torch_missing_or_broken(examine: Doctor, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    versions.pop("torch")
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out = examine()
    assert code == 1
    assert "pip install 'torch~=2.13.0'" in out.splitlines()


def test_presence_alone_without_packaging(
    examine: Doctor, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    real_import = builtins.__import__

    def without_packaging(name: str, *args: Any) -> Any:
        if name.startswith("packaging"):
            raise ImportError(name)
        return real_import(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_packaging)
    versions |= {"numpy": "1.0", "colorama": "1.0"}
    assert examine()[0] == 0
    versions.pop("numpy")
    code, out = examine()
    assert code == 1
    assert "pip install 'numpy'" in out.splitlines()


def test_a_checkout_that_is_not_installed(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    for function in ("requires", "metadata"):
        monkeypatch.setattr(metadata, function, nothing)
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    code, out = examine()
    assert code == 0
    assert "not installed: versions are not compared" in out


def test_backends_that_cannot_be_told(examine: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def backends() -> dict[str, str]:
        raise ImportError("numba needs an older numpy")

    monkeypatch.setattr(fpexp.ops, "backends", backends)
    code, out = examine()
    assert code == 1
    assert "numba needs an older numpy" in out


def test_a_results_dir_that_cannot_be_written(examine: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out = examine(tmp_path / "file" / "results")
    assert code == 1
    assert "choose another folder with results_dir=<folder>" in out.splitlines()


def test_a_full_disk(examine: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**29)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    code, out = examine()
    assert code == 1
    assert "free disk: 0.5 GiB, needed: >=1 GiB" in out


@pytest.mark.parametrize("argument", ["resultsdir=x", "torch", "lengths=[1]"])
def test_unknown_arguments(argument: str) -> None:
    with pytest.raises(UserError, match="unknown argument"):
        doctor.run([argument])
