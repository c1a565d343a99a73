"""What conf/ offers, in a checkout and in an installed wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from runs import TINY, run_python

import fpexp
from fpexp.config.catalogue import GROUPS, check_choice, choices, conf_dir
from fpexp.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def test_conf_of_a_checkout_is_beside_the_package() -> None:
    assert conf_dir() == ROOT / "conf"


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_says_what_it_is(group: str) -> None:
    described = choices(group)
    assert described
    for name, text in described.items():
        assert text, name
        assert not text.startswith(("@", "#"))


def test_unknown_choice_is_refused_with_the_alternatives() -> None:
    check_choice("task", "a5")
    with pytest.raises(
        UserError,
        match=r"unknown task 'grup'; did you mean 'group'\? \(a4, a5, copy, fineweb, group, modular_arithmetic, s5\)",
    ):
        check_choice("task", "grup")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if not name.endswith("/")}
    assert {name.partition("/")[0] for name in files} == {"fpexp", f"fpexp-{fpexp.__version__}.dist-info"}
    conf = {f"fpexp/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*") if path.is_file()}
    assert {name for name in files if name.startswith("fpexp/conf/")} == conf
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fpexp").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    others = {f"fpexp/reporting/page/page.{kind}" for kind in ("html", "css", "js")} | {
        "fpexp/bench/device/subjects.json"
    }
    assert {name for name in files if not name.endswith((".py", ".yaml")) and "dist-info" not in name} == others


INSTALLED = f"""
import sys
from pathlib import Path
import fpexp
from fpexp.cli import main
from fpexp.config.catalogue import conf_dir
package = Path(fpexp.__file__).parent
assert package.parent == Path({{site!r}}), package
assert conf_dir() == package / "conf", conf_dir()
assert main(["list"]) == 0
assert "torch" not in sys.modules
assert main(["train", "task=a4", "model=lstm", *{TINY!r}]) == 0
assert main(["train", "--help"]) == 0
assert main(["report", "experiment=demo_a5"]) == 0
"""


def test_wheel_works_outside_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    wheel.extractall(site)
    answer = run_python(INSTALLED.format(site=str(site)), elsewhere, "-P", PYTHONPATH=str(site))
    assert answer.code == 0, answer.err
    assert "lstm             torch's LSTM" in answer.out
    (run,) = (elsewhere / "results/runs").iterdir()
    assert '"state": "finished"' in (run / "status.json").read_text()
    assert '"commit": null' in (run / "environment.json").read_text()
    assert {path.name for path in elsewhere.iterdir()} == {"results"}
