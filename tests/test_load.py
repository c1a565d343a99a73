"""`fpexp.load`: a recorded run as a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import Recorder, tiny

import fpexp
from fpexp.build import build
from fpexp.errors import UserError
from fpexp.fixed_point import Cap
from fpexp.randomness import generator
from fpexp.run import start_run
from fpexp.training import checkpoint
from fpexp.training.loop import Trainer


@pytest.mark.parametrize("model", ["lstm", "fp_mamba_h", "fp_mamba_k"])
def test_by_id_and_by_folder_it_is_the_trained_model(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained: list[Trainer] = []
    save = Trainer.save
    monkeypatch.setattr(Trainer, "save", lambda self: (trained.append(self), save(self))[1])
    run = start_run(tiny(Path("results"), "model.dropout=0.5", model=model), Recorder())
    tokens = trained[-1].experiment.task.sample(3, 7, generator(0, "test")).inputs
    expected = trained[-1].model.eval()(tokens, Cap(1000)).logits

    state = torch.get_rng_state()
    for given, more in ((run.id, {}), (run.path, {}), (str(run.path), {}), (run.id, {"results_dir": "results"})):
        loaded = fpexp.load(given, **more)
        assert not loaded.training
        assert torch.equal(loaded(tokens, Cap(1000)).logits, expected)
        assert loaded.config == run.config()
        assert loaded.config.choices.model == model
    assert torch.equal(torch.get_rng_state(), state)


def test_the_weights_are_those_that_the_curve_shows(tmp_path: Path) -> None:
    """The newest checkpoint, also where an earlier one did better in validation."""
    words = ["training.evaluate_every=2", "training.steps=6", "training.keep_checkpoints=5"]
    run = start_run(tiny(tmp_path, *words), Recorder())
    checkpoint.mark_best(run.checkpoints, 2, 1.0, 0.0)
    newest = checkpoint.load_newest(run.checkpoints, []).tensors["model.head.weight"]
    assert torch.equal(fpexp.load(run.path).head.weight, newest)


def test_a_run_that_does_not_exist_or_has_no_checkpoint(tmp_path: Path) -> None:
    from fpexp.run_folder import RunFolder

    with pytest.raises(UserError, match="no run 'nowhere' under"):
        fpexp.load("nowhere", results_dir=tmp_path)
    recorded = tmp_path / "reference/runs/kept-run/config.yaml"
    recorded.parent.mkdir(parents=True)
    recorded.touch()
    with pytest.raises(UserError, match=f"recorded without weights; fpexp train config={recorded}"):
        fpexp.load("kept-run", results_dir=tmp_path)
    run = RunFolder.create(tiny(tmp_path))
    with pytest.raises(UserError, match="no whole checkpoint"):
        fpexp.load(run.path)


def test_the_package_imports_without_torch_and_says_its_version() -> None:
    from runs import run_python

    answer = run_python("import sys, fpexp; assert 'torch' not in sys.modules; print(fpexp.__version__)", Path.cwd())
    assert answer.out.strip() == fpexp.__version__


def test_an_untrained_run_is_not_taken_for_a_trained_one(tmp_path: Path) -> None:
    """Loading changes the drawn weights: the model is not the initialised one."""
    run = start_run(tiny(tmp_path), Recorder())
    assert not torch.equal(fpexp.load(run.path).head.weight, build(run.config()).model.head.weight)
