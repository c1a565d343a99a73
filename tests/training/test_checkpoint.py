"""Checkpoints: whole or not there, found by number, bounded, and of this model or refused."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import run_python
from torch import nn

import fpexp
from fpexp.errors import FpexpError, UserError
from fpexp.training import checkpoint


def make(width: int = 3, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that has moments."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, width)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def write(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> Path:
    return checkpoint.write(folder, step, checkpoint.collect(model, optimizer), state)


def save(folder: Path, step: int, **state: Any) -> Path:
    return write(folder, step, *make(), state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = make()
    torch.manual_seed(3)
    path = write(tmp_path, 7, model, optimizer, {"progress": {"seconds": 0.1}, "lengths": [[2, 8]]})
    expected_draw = torch.rand(2)

    saved = checkpoint.read(path)
    assert saved.state == {"progress": {"seconds": 0.1}, "lengths": [[2, 8]], "step": 7}
    other, other_optimizer = make(steps=0)
    saved.load_model(other)
    saved.load_optimizer(other_optimizer)
    torch.manual_seed(99)
    saved.load_randomness()
    assert torch.equal(torch.rand(2), expected_draw)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for old, new in zip(
        optimizer.state_dict()["state"].values(), other_optimizer.state_dict()["state"].values(), strict=True
    ):
        assert old.keys() == new.keys()
        assert all(torch.equal(torch.as_tensor(old[key]), torch.as_tensor(new[key])) for key in old)


def test_moments_continue_to_the_same_weights(tmp_path: Path) -> None:
    model, optimizer = make(steps=5)
    half, half_optimizer = make(steps=2)
    half.load_state_dict(model.state_dict())
    write(tmp_path, 5, model, optimizer, {})
    checkpoint.read(tmp_path / "step_00000005.safetensors").load_optimizer(half_optimizer)
    for m, o in ((model, optimizer), (half, half_optimizer)):
        o.zero_grad()
        m(torch.ones(4, 3)).square().sum().backward()
        o.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), half.parameters(), strict=True))


# Failing writes


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """No file may grow above `size` bytes in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_keeps_the_earlier_checkpoint_and_names_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    message = r"cannot save .*step_00000002.*step_00000001.safetensors is whole"
    with disk_full_at(100), pytest.raises(FpexpError, match=message) as caught:
        save(tmp_path, 2)
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert names(tmp_path) == ["step_00000001.safetensors"]
    assert checkpoint.load_newest(tmp_path, []).state["step"] == 1


@pytest.mark.parametrize("broken", ["save_file", "_sync"])
def test_write_error_keeps_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    save(tmp_path, 1)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, broken, fail)
    with pytest.raises(FpexpError, match=r"No space left.*step_00000001.safetensors is whole"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step_00000001.safetensors"]


def test_full_disk_at_the_first_checkpoint(tmp_path: Path) -> None:
    with disk_full_at(100), pytest.raises(FpexpError, match="there is no earlier one"):
        save(tmp_path, 1)
    assert names(tmp_path) == []


KILLED_WHILE_SAVING = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from fpexp.training import checkpoint

folder = Path(sys.argv[1])
model = nn.Linear(400, 400)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 400)).sum().backward()
optimizer.step()
random.seed(0)
step, partial = 0, 0
for round in range(20):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            with torch.no_grad():
                model.weight.fill_(step)
            checkpoint.write(folder, step, checkpoint.collect(model, optimizer), {})
            os.write(writer, b"%d\\n" % step)
            checkpoint.prune(folder, 2)
    os.close(writer)
    told = os.read(reader, 100)
    time.sleep(random.uniform(0, 0.01))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told += os.read(reader, 10**6)
    reported = int(told.split(b"\\n")[-2])
    partial += any(folder.glob(".*"))
    warnings = []
    saved = checkpoint.load_newest(folder, warnings)
    step = saved.state["step"]
    assert not warnings, warnings
    assert step >= reported, (step, reported)
    assert (saved.tensors["model.weight"] == step).all()
    for path in folder.glob("step_*"):
        checkpoint.read(path)
assert partial, "no kill hit a save"
checkpoint.prune(folder, 2)
assert not any(folder.glob(".*")), list(folder.iterdir())
print(partial)
"""


def test_killed_twenty_times_while_saving(tmp_path: Path) -> None:
    code = KILLED_WHILE_SAVING.replace("sys.argv[1]", repr(str(tmp_path)))
    answer = run_python(code, tmp_path, OMP_NUM_THREADS="1")
    assert answer.code == 0, answer.err


# Broken files


@pytest.mark.parametrize(
    "breaking",
    [
        truncate,
        lambda path: path.write_bytes(path.read_bytes()[:4]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x00" * 4096),
        lambda path: path.write_text("no checkpoint at all"),
    ],
    ids=["truncated", "header cut", "empty", "zeros", "text"],
)
def test_broken_newest_falls_back_and_is_named(tmp_path: Path, breaking: Callable[[Path], Any]) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    breaking(tmp_path / "step_00000002.safetensors")
    warnings: list[str] = []
    assert checkpoint.load_newest(tmp_path, warnings).state["step"] == 1
    assert len(warnings) == 1
    assert f"cannot read the checkpoint {tmp_path / 'step_00000002.safetensors'}" in warnings[0]
    assert "\n" not in warnings[0]


def test_nothing_whole_is_an_error(tmp_path: Path) -> None:
    truncate(save(tmp_path, 1))
    with pytest.raises(UserError, match=f"no whole checkpoint in {tmp_path}"):
        checkpoint.load_newest(tmp_path, [])


@pytest.mark.parametrize("keep", [1, 2])
def test_what_was_saved_after_a_fall_back_is_not_pruned(tmp_path: Path, keep: int) -> None:
    """A broken file of a later step must not count as one of the newest."""
    save(tmp_path, 10)
    for step in (30, 40):
        truncate(save(tmp_path, step))
    assert checkpoint.load_newest(tmp_path, []).state["step"] == 10
    save(tmp_path, 20)
    checkpoint.prune(tmp_path, keep)
    assert checkpoint.load_newest(tmp_path, []).state["step"] == 20


# Order and number


def test_newest_is_the_largest_number_not_the_last_word(tmp_path: Path) -> None:
    for step in (1000, 999, 123_456_789, 10_000_000, 99_999_999):
        save(tmp_path, step)
    assert checkpoint.load_newest(tmp_path, []).state["step"] == 123_456_789
    (tmp_path / "step_123456789.safetensors").unlink()
    assert checkpoint.load_newest(tmp_path, []).state["step"] == 99_999_999


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("step_2.safetensors.bak", "step_x.safetensors", "step_00000009.safetensors.tmp"):
        (tmp_path / name).write_bytes(b"")
    warnings: list[str] = []
    assert checkpoint.load_newest(tmp_path, warnings).state["step"] == 1
    assert not warnings


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 999, 1000):
        save(tmp_path, step)
    checkpoint.mark_best(tmp_path, 2, 0.5, 1.0)
    for left in (
        ".step_00000004.safetensors.partial",
        ".tmpX4Ssqz",
    ):  # by a killed save; the second is safetensors' own
        (tmp_path / left).write_bytes(b"half")
    checkpoint.prune(tmp_path, 2)
    assert names(tmp_path) == [
        "best.json",
        "step_00000002.safetensors",
        "step_00000999.safetensors",
        "step_00001000.safetensors",
    ]
    checkpoint.mark_best(tmp_path, 1000, 0.6, 1.0)
    checkpoint.prune(tmp_path, 2)
    assert checkpoint.best_step(tmp_path) == 1000
    assert names(tmp_path) == ["best.json", "step_00000999.safetensors", "step_00001000.safetensors"]


@pytest.mark.parametrize("content", [None, "", "{"])
def test_no_or_broken_mark_is_no_best(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "best.json").write_text(content)
    assert checkpoint.best_step(tmp_path) is None
    save(tmp_path, 1)
    checkpoint.prune(tmp_path, 1)


# CASES 30


class Compiled(nn.Module):
    """What torch.compile makes of a module, as far as names go."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_compiled_model_loads_in_a_plain_one(tmp_path: Path) -> None:
    whole, _ = make()
    inner, optimizer = make()
    inner[1] = Compiled(inner[1])
    for step, model in enumerate((Compiled(whole), inner)):
        path = write(tmp_path, step, model, optimizer, {})
        plain, _ = make(steps=0)
        checkpoint.read(path).load_model(plain)
        saved = list(model.state_dict().values())
        assert all(torch.equal(a, b) for a, b in zip(saved, plain.state_dict().values(), strict=True))


def test_wrong_size_names_the_keys_and_loads_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    other, _ = make(width=4)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(UserError, match=r"is of another model: .*0.bias \(3,\) is not \(4,\)") as caught:
        checkpoint.read(path).load_model(other)
    assert str(path) in str(caught.value)
    assert "0.weight (3, 3) is not (4, 4)" in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())


def test_missing_and_surplus_weights_are_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    with pytest.raises(UserError, match=r"unexpected 1\.bias.*unexpected 1\.weight"):
        checkpoint.read(path).load_model(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(UserError, match=r"missing 2\.bias.*missing 2\.weight"):
        checkpoint.read(path).load_model(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 2)))
    many = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), *(nn.Linear(2, 2) for _ in range(10)))
    with pytest.raises(UserError, match="and 16 more"):
        checkpoint.read(path).load_model(many)


def test_nothing_unpickles() -> None:
    for path in Path(fpexp.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in (
            "torch.load(",
            "torch.save(",
            "import pickle",
            "pickle.",
            "joblib.load",
            "cloudpickle",
        ):
            assert word not in text, f"{path}: {word}"
