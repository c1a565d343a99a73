"""A real headless browser for these tests, collected only where FPEXP_BROWSER names one: make test-browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = os.environ.get("FPEXP_BROWSER")
collect_ignore_glob = [] if BROWSER else ["test_*.py"]


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium. A build for servers brings libraries of its own, and no fonts: those are matplotlib's."""
    import matplotlib
    from playwright.sync_api import sync_playwright

    program = Path(str(BROWSER))
    fonts = tmp_path_factory.mktemp("fonts") / "fonts.conf"
    folders = (Path(matplotlib.get_data_path()) / "fonts/ttf", Path("/usr/share/fonts"))
    lines = "".join(f"<dir>{folder}</dir>" for folder in folders)
    fonts.write_text(f"<fontconfig>{lines}<cachedir>{fonts.parent}</cachedir></fontconfig>")
    own = {"FONTCONFIG_FILE": str(fonts)}
    if (program.parent / "lib").is_dir():
        own["LD_LIBRARY_PATH"] = str(program.parent / "lib")
    with sync_playwright() as playwright:
        # No sandbox: containers seldom allow one, and the page is ours.
        launched = playwright.chromium.launch(
            executable_path=str(program), args=["--no-sandbox"], env={**os.environ, **own}
        )
        yield launched
        launched.close()
