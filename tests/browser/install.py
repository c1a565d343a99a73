"""Find or fetch a Chromium for the tests of the report's page; prints the path of the program alone.

usage: python tests/browser/install.py <folder for what is fetched>

In this order: what an earlier call has left in the folder, Playwright's own build, a browser that is installed, and a
build for servers from the npm registry, for machines that reach package registries and nothing else.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

INSTALLED = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SERVER_BUILD = "@sparticuz/chromium@153.0.0"
"""A tarball with Chromium and the libraries it needs, each packed by brotli."""


def main(folder: Path) -> Path | None:
    """Return a browser's path, None where none is to be had."""
    unpacked = folder / "chromium"
    if unpacked.is_file():
        return unpacked
    return _of_playwright(folder) or _installed() or _server_build(folder)


def _of_playwright(folder: Path) -> Path | None:
    environment = {**os.environ, "PLAYWRIGHT_BROWSERS_PATH": str(folder.resolve() / "playwright")}
    command = [sys.executable, "-m", "playwright", "install", "--only-shell", "chromium"]
    if not _succeeds(command, environment):
        return None
    programs = sorted((folder / "playwright").glob("chromium_headless_shell-*/*/*headless[-_]shell"))
    return programs[-1] if programs else None


def _installed() -> Path | None:
    found = next(filter(None, map(shutil.which, INSTALLED)), None)
    return Path(found) if found else None


def _server_build(folder: Path) -> Path | None:
    import brotli

    with tempfile.TemporaryDirectory() as scratch:
        if not shutil.which("npm") or not _succeeds(["npm", "pack", "--silent", SERVER_BUILD], None, scratch):
            return None
        (archive,) = Path(scratch).glob("*.tgz")
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as package:
            for member in package.getmembers():
                name = Path(member.name)
                file = package.extractfile(member) if name.suffix == ".br" else None
                if file is None:
                    continue
                content = brotli.decompress(file.read())
                if name.name.endswith(".tar.br"):
                    with tarfile.open(fileobj=io.BytesIO(content)) as part:
                        part.extractall(folder, filter="data")
                else:
                    (folder / "unfinished").write_bytes(content)
    program = folder / "chromium"
    (folder / "unfinished").chmod(0o755)
    (folder / "unfinished").rename(program)
    return program


def _succeeds(command: list[str], environment: dict[str, str] | None, cwd: str | None = None) -> bool:
    """Run a command whose failure only means that the next way is tried."""
    try:
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode:
        print(f"{' '.join(command[1:])} failed; trying another browser", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    browser = main(Path(sys.argv[1]))
    if browser is None:
        print("no browser is to be had: install chromium, or set FPEXP_BROWSER to its path", file=sys.stderr)
        sys.exit(1)
    print(browser.resolve())
