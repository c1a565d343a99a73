"""The arrows of ARCHITECTURE.md that never exist, read from the sources; and what each entry point loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fpexp

PACKAGE = Path(fpexp.__file__).parent
CONF = PACKAGE.parent / "conf"
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(file: Path) -> str:
    """Return a file's module: fpexp.ops.selective_scan.reference."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imports(file: Path) -> Iterator[str]:
    """Every name that a file imports, at any depth: `from a.b import c` is a.b.c."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def room(*packages: str) -> list[Path]:
    files = [file for file in FILES if under(name_of(file), *packages)]
    assert files, f"there is nothing in {packages}"
    return files


def of_project(file: Path) -> list[str]:
    return [name for name in imports(file) if under(name, "fpexp")]


def arrows(files: list[Path], *targets: str) -> list[str]:
    """Every import from `files` that goes into one of `targets`."""
    return [f"{name_of(file)} -> {name}" for file in files for name in imports(file) if under(name, *targets)]


def kinds(package: str) -> dict[str, str]:
    """What conf/ names as a `_target_` in a room: the module that defines it, and the name it is exported under."""
    targets = {t for file in CONF.rglob("*.yaml") for t in re.findall(r"_target_: (fpexp\.[\w.]+)", file.read_text())}
    found = {}
    for target in sorted(target for target in targets if under(target, package)):
        for file in room(package):
            definitions = [n for n in tree_of(file).body if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
            if target.rpartition(".")[2] in {node.name for node in definitions}:
                found[name_of(file)] = target
    assert found, f"conf/ names nothing in {package}"
    return found


def test_the_reader_sees_imports_at_any_depth(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import a.b\nif True:\n    def f():\n        from c.d import e, g\n")
    assert list(imports(file)) == ["a.b", "c.d.e", "c.d.g"]


def test_ops_import_shared_types_only() -> None:
    """Arrow 1."""
    for file in room("fpexp.ops"):
        assert all(
            under(name, "fpexp.ops", "fpexp.errors", "fpexp.ranges", "fpexp.status") for name in of_project(file)
        ), file


@pytest.mark.parametrize(("compiler", "stem"), [("triton", "triton"), ("numba", "cpu")])
def test_compilers_are_imported_by_their_backends_only(compiler: str, stem: str) -> None:
    """Arrow 1."""
    allowed = [file for file in room("fpexp.ops") if file.stem == stem]
    assert not arrows([file for file in FILES if file not in allowed], compiler)


def test_fixed_point_knows_no_mixer_model_or_task() -> None:
    """Arrow 2."""
    allowed = ("fpexp.fixed_point", "fpexp.ops", "fpexp.errors", "fpexp.ranges", "fpexp.status")
    for file in room("fpexp.fixed_point"):
        assert all(under(name, *allowed) for name in of_project(file)), file


def others(file: Path, found: dict[str, str]) -> list[str]:
    """Every kind but the one that a file holds, by both of its names."""
    return [name for pair in found.items() if pair[0] != name_of(file) for name in pair]


def test_channel_mixers_stand_alone() -> None:
    """Arrow 3: no scan, solver or model in a mixer, and no kind in another kind; kernels know mixers, so their types
    and their norm may be used."""
    found = kinds("fpexp.channel_mixers")
    assert len(found) >= 3
    for file in room("fpexp.channel_mixers"):
        shared = ("fpexp.channel_mixers", "fpexp.ops.mixers", "fpexp.ops.l2norm")
        types = ("fpexp.errors", "fpexp.ranges", "fpexp.status")
        assert all(under(name, *shared, *types) for name in of_project(file)), file
        assert file.stem == "__init__" or not arrows([file], *others(file, found))


def test_only_fp_models_join_mixer_scan_and_solver() -> None:
    """Arrow 3: other models know of fixed points only the types in their signature; no kind imports another."""
    found = kinds("fpexp.models")
    assert {"fpexp.models.fp_mamba", "fpexp.models.fp_rnn", "fpexp.models.lstm"} <= set(found)
    types = {"fpexp.fixed_point.Cap", "fpexp.fixed_point.SolveResult"}
    for file in room("fpexp.models"):
        assert file.stem == "__init__" or not arrows([file], *others(file, found))
        if not file.stem.startswith("fp_"):
            assert not arrows([file], "fpexp.channel_mixers")
            assert {name for name in imports(file) if under(name, "fpexp.fixed_point")} <= types, file


def test_tasks_and_models_do_not_know_each_other() -> None:
    """Arrow 4."""
    assert not arrows(room("fpexp.tasks"), "fpexp.models", "fpexp.channel_mixers", "fpexp.fixed_point", "fpexp.ops")
    assert not arrows(room("fpexp.models", "fpexp.channel_mixers", "fpexp.fixed_point", "fpexp.ops"), "fpexp.tasks")


def test_training_and_evaluation_import_no_kind_of_task_or_model() -> None:
    """Arrow 4: neither the module of a kind nor the name that its room exports."""
    hidden = [name for package in ("fpexp.models", "fpexp.tasks") for pair in kinds(package).items() for name in pair]
    assert {"fpexp.models.lstm", "fpexp.tasks.word_problem", "fpexp.tasks.WordProblem"} <= set(hidden)
    assert not arrows(room("fpexp.training", "fpexp.evaluation"), *hidden, "fpexp.channel_mixers", "fpexp.ops")


def test_training_and_evaluation_test_no_names() -> None:
    """Arrow 4: no `if "fp" in name`; no string is a model's, a task's or a mixer's name."""
    names = {path.stem for group in ("model", "task", "model/base") for path in (CONF / group).glob("*.yaml")}
    names |= {"fp", "mamba", "FPMambaLayer", "FPRNNLayer", "LSTMLayers", "WordProblem"}
    names |= {"Householder", "Kronecker", "DPLR"}
    for file in room("fpexp.training", "fpexp.evaluation"):
        strings = {n.value for n in ast.walk(tree_of(file)) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not strings & names, file


def test_data_knows_no_task_model_or_training() -> None:
    """Token streams stand alone; what is heavy in them is imported where it is used."""
    shared = ("fpexp.data", "fpexp.errors", "fpexp.randomness", "fpexp.run_folder")
    for file in room("fpexp.data"):
        assert all(under(name, *shared) for name in of_project(file)), file
    others = [file for file in FILES if not under(name_of(file), "fpexp.data")]
    assert not arrows(others, "datasets", "pyarrow", "tokenizers")


def test_reporting_imports_no_torch() -> None:
    """Arrow 5."""
    assert not arrows(room("fpexp.reporting"), "torch")


def test_hydra_stays_at_the_command_line() -> None:
    """Arrow 5."""
    allowed = ("fpexp.cli", "fpexp.commands", "fpexp.config", "fpexp.build")
    rest = [file for file in FILES if not under(name_of(file), *allowed)]
    assert not arrows(rest, "hydra", "omegaconf")


def test_wandb_stays_in_its_tracker() -> None:
    """Arrow 5."""
    assert not arrows([file for file in FILES if name_of(file) != "fpexp.tracking.wandb"], "wandb")


def test_benchmarks_stand_apart() -> None:
    """Nothing but the commands that run or ask for them knows them; what they compare with they alone import."""
    others = [file for file in FILES if not under(name_of(file), "fpexp.bench")]
    assert not arrows(others, "mambapy", "transformers")
    commands = ("fpexp.commands.bench", "fpexp.commands.experiments", "fpexp.commands.usage")
    assert not arrows([file for file in others if name_of(file) not in commands], "fpexp.bench")


def run(code: str) -> None:
    """Run Python in a fresh process; its last words on stderr are the failure's message."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, cwd=PACKAGE.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        [],
        ["--version"],
        ["train", "--help"],
        ["runs", "--help"],
        ["list"],
        ["bench", "--help"],
        ["bench", "--list"],
        ["data", "--help"],
        ["report", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    run(f"""
import sys
from fpexp.cli import main
assert main({arguments!r}) == 0
heavy = {{"torch", "numpy", "hydra", "omegaconf", "wandb", "datasets", "matplotlib", "numba", "triton"}}
heavy |= {{"pyarrow", "tokenizers"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
""")


def test_reporting_loads_no_torch() -> None:
    modules = [name_of(file) for file in room("fpexp.reporting")]
    run(f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
assert "torch" not in sys.modules
""")


def test_without_compilers_and_a_gpu_every_model_trains() -> None:
    """CASES.md 38, without numba too, whose kernels may have to be compiled first: import, help, a run, two steps of
    every model; each fall-back is said once, and asking for Triton is one line before a run begins.
    """
    run("""
import contextlib, io, os, sys, tempfile
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
sys.modules["triton"] = sys.modules["numba"] = None
os.chdir(tempfile.mkdtemp())
import torch
from fpexp.build import build
from fpexp.cli import main
from fpexp.config.catalogue import choices
from fpexp.config.compose import compose
from fpexp.evaluation.metrics import summed_loss
from fpexp.training.optimizer import make_optimizer

def train(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["train", *words])
    return code, out.getvalue(), err.getvalue().splitlines()

words = ["task=a4", "model.d_model=8", "training.batch_size=2", "task.lengths.max=2", "training.steps=2"]
words += ["evaluation.lengths=[2]", "evaluation.samples=2", "evaluation.validation_samples=2"]
assert train("task=a4", "model=mamba", "--help")[0] == 0
code, out, told = train("model=fp_mamba_h", *words)
assert (code, out.count("device=auto: cpu (no GPU here)")) == (0, 1), told
for model in choices("model"):
    heads = ["model.head_size=16"] if "mamba2" in model else []
    experiment = build(compose([f"model={model}", *words, *heads]))
    optimizer, source = make_optimizer(experiment.model, experiment.config.training), torch.Generator()
    for _ in range(2):
        batch = experiment.task.sample(2, 2, source)
        with contextlib.redirect_stderr(io.StringIO()) as err:
            logits = experiment.model(batch.inputs, experiment.schedule.training_cap(2, source)).logits
        told += err.getvalue().splitlines()
        summed_loss(logits, batch.targets).backward()
        optimizer.step()
assert len(told) == len(set(told)) > 0, told
assert all("backend=reference" in line and "pip install numba" in line for line in told), told
for solver in ("sequential", "picard"):
    code, _, told = train("model=fp_mamba_h", *words, f"solver={solver}", "solver.backend=triton")
    assert (code, len(told)) == (2, 1), told
assert len(os.listdir("results/runs")) == 1
""")


def test_the_computing_rooms_need_torch_alone() -> None:
    """They import, build a run from a resolved config in JSON, train a step and measure, with the rest absent."""
    rooms = ("ops", "channel_mixers", "fixed_point", "models", "tasks", "training", "evaluation", "data")
    modules = [name_of(file) for name in rooms for file in room(f"fpexp.{name}")]
    from fpexp.config.compose import compose

    words = ["task=a4", "model=fp_mamba_k", "device=cpu", "model.d_model=8", "training.batch_size=4"]
    config = compose([*words, "evaluation.validation_samples=4"]).to_dict()
    run(f"""
import importlib, sys
for name in ("hydra", "omegaconf", "wandb", "datasets", "rich", "matplotlib", "yaml", "pyarrow", "tokenizers"):
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)

import torch
from fpexp.build import build
from fpexp.config.run import RunConfig
from fpexp.evaluation.metrics import summed_loss
from fpexp.training.optimizer import make_optimizer

experiment = build(RunConfig.parse({config!r}))
optimizer = make_optimizer(experiment.model, experiment.config.training)
source = torch.Generator().manual_seed(0)
batch = experiment.task.sample(4, 3, source)
output = experiment.model(batch.inputs, experiment.schedule.training_cap(3, source), batch.mask)
summed_loss(output.logits, batch.targets).backward()
optimizer.step()
""")
