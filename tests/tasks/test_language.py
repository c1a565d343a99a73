"""Language: windows and their shift, held-out text, what is scored, prompts, and runs on files."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from runs import CommandLine, Recorder, assert_same_weights, sit, stop_at, weights, without_time

from fpexp.build import Experiment, build
from fpexp.config.compose import compose
from fpexp.errors import FpexpError, Interrupted, UserError
from fpexp.evaluation.length_curve import evaluate_length
from fpexp.evaluation.metrics import summed_loss
from fpexp.randomness import generator
from fpexp.run_folder import RunFolder, read_rows
from fpexp.tasks import IGNORE, Language
from fpexp.training.checkpoint import best_step

SEPARATOR = 256
WORDS = ["one", "two", "three", "four", "five", "six", "seven"]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Sixty text files; the pattern that finds them."""
    for i in range(60):
        text = " ".join(WORDS[(i * j + j // 3) % len(WORDS)] for j in range(i % 9 + 2))
        (tmp_path / f"{i:03}.txt").write_text(f"{i} {text} é")
    return str(tmp_path / "*.txt")


def words(files: str, *more: str) -> list[str]:
    return [
        "task=fineweb",
        "task.source=local",
        f"task.files={files}",
        "task.context=16",
        "task.validation_tokens=100",
        "task.shuffle_buffer=8",
        "model.d_model=16",
        "device=cpu",
        "training.steps=8",
        "training.batch_size=3",
        "training.log_every=1",
        "training.checkpoint_every=100",
        "training.evaluate_every=100",
        "evaluation.lengths=[7,16]",
        "evaluation.batch_size=4",
        *more,
    ]


def experiment(files: str, *more: str, model: str = "lstm") -> Experiment:
    return build(compose([f"model={model}", *words(files, *more)]))


def language(files: str, *more: str) -> Language:
    task = experiment(files, *more).task
    assert isinstance(task, Language)
    return task


def test_targets_are_the_inputs_shifted_by_one_across_documents(corpus: str) -> None:
    """CASES.md 22: exactly one shift. Batches join to the text, no token lost or repeated."""
    stream = language(corpus).open_stream(0)
    batches = [stream.read(3) for _ in range(5)]
    stream.close()
    inputs = torch.cat([batch.inputs.flatten() for batch in batches])
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    assert batches[0].inputs.shape == (3, 16)
    assert torch.equal(inputs[1:], targets[:-1])
    assert SEPARATOR in inputs


@pytest.mark.parametrize("length", [1, 7, 16, 99])
@pytest.mark.parametrize("split", ["validation", "test"])
def test_the_held_out_text_is_scored_once_at_every_length(corpus: str, length: int, split: str) -> None:
    """All but its first token, whatever the length, padding never."""
    task = language(corpus)
    batches = list(task.held_out(split, length, 4))
    targets = torch.cat([batch.targets[batch.targets != IGNORE] for batch in batches])
    assert len(targets) == 99
    reference = torch.cat([batch.targets[batch.targets != IGNORE] for batch in task.held_out(split, 99, 1)])
    assert torch.equal(targets, reference)
    inputs = torch.cat([batch.inputs[batch.targets != IGNORE] for batch in batches])
    assert torch.equal(inputs[1:], targets[:-1]), "CASES.md 22: exactly one shift, within windows and across them"
    for batch in batches:
        padded = batch.targets == IGNORE
        assert torch.equal(padded, torch.zeros_like(padded) if batch.mask is None else ~batch.mask)


def test_held_out_texts_are_of_other_documents_than_training(corpus: str) -> None:
    """Each document begins with its number, so the numbers tell which documents were read."""
    task = language(corpus)

    def numbers(tokens: torch.Tensor) -> set[str]:
        return {piece.split(" ")[0] for piece in task.write(tokens).split("<|endoftext|>")[1:-1]}

    held = [torch.cat([b.targets.flatten() for b in task.held_out(split, 99, 1)]) for split in ("validation", "test")]
    stream = task.open_stream(3)
    read = torch.cat([stream.read(3).targets.flatten() for _ in range(100)])
    stream.close()
    seen = numbers(read)
    assert len(seen) > 40
    assert not seen & {"0", "1"}
    for tokens in held:
        assert not numbers(tokens) & seen


def test_perplexity_of_a_token_and_of_a_byte(corpus: str) -> None:
    """Against a plain loop; é is two bytes in two tokens, a separator is a token of no byte."""
    found = experiment(corpus)
    row = evaluate_length(found, 16, 5, "test")
    nats, tokens, text_bytes, seen = 0.0, 0, 0, []
    with torch.no_grad():
        for batch in found.task.held_out("test", 16, 1):  # type: ignore[attr-defined]
            nats += float(summed_loss(found.model.eval()(batch.inputs, mask=batch.mask).logits, batch.targets))
            scored = batch.targets[batch.targets != IGNORE].tolist()
            tokens += len(scored)
            seen += scored
            text_bytes += sum(token < 256 for token in scored)
    assert row["tokens"] == tokens == 99
    assert row["bytes"] == text_bytes < tokens
    entropy = -sum(n / tokens * math.log(n / tokens) for n in Counter(seen).values())
    assert row["unigram_perplexity"] == pytest.approx(math.exp(entropy), rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert row["byte_perplexity"] == pytest.approx(math.exp(nats / text_bytes), rel=1e-5)


@pytest.mark.parametrize("size", [1, 3, 64])
def test_perplexity_does_not_depend_on_the_batch_size(corpus: str, size: int) -> None:
    """CASES.md 21."""
    found = experiment(corpus)
    alone = evaluate_length(found, 16, 5, "validation")
    config = found.config.replace(evaluation=dataclasses.replace(found.config.evaluation, batch_size=size))
    again = evaluate_length(dataclasses.replace(found, config=config), 16, 5, "validation")
    for name in ("perplexity", "byte_perplexity", "token_accuracy"):
        assert again[name] == pytest.approx(alone[name], rel=1e-5)


def test_samples_are_windows_of_the_validation_text(corpus: str) -> None:
    task = language(corpus)
    text = "".join(map(chr, next(task.held_out("validation", 99, 1)).inputs[0].tolist()))
    batch = task.sample(20, 10, generator(0, "bench"))
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    for row in batch.inputs.tolist():
        assert "".join(map(chr, row)) in text
    assert len({tuple(row) for row in batch.inputs.tolist()}) > 10


def test_a_prompt_is_read_behind_a_separator_and_written_without_it(corpus: str) -> None:
    task = language(corpus)
    tokens = task.read_prompt("né!")
    assert tokens.tolist() == [SEPARATOR, *"né!".encode()]
    assert task.write(tokens) == "né!"
    assert task.read_prompt("").tolist() == [SEPARATOR]


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("task.vocabulary_size=256", ["task.vocabulary_size=256", "257", "task.tokenizer=bytes"]),
        ("task.context=100", ["task.context=100", "task.validation_tokens=100"]),
        ("task.tokenizer=bites", ["bites", "bytes"]),
        ("task.source=locl", ["task.source", "local"]),
        ("evaluation.lengths=[100]", ["evaluation.lengths[0]=100", "task.validation_tokens"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(corpus: str, setting: str, names: list[str]) -> None:
    """CASES.md 36: before the first step."""
    with pytest.raises(UserError) as caught:
        experiment(corpus, setting)
    assert all(name in str(caught.value) for name in names), caught.value


def test_a_larger_vocabulary_pads_the_embedding(corpus: str) -> None:
    found = experiment(corpus, "task.vocabulary_size=320")
    assert found.model.embedding.weight.shape[0] == 320
    assert evaluate_length(found, 16, 5, "test")["bytes"] > 0


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_twice_is_the_unbroken_run_to_the_bit(corpus: str, tmp_path: Path, workers: int) -> None:
    """CASES.md 26 and 34: losses, weights and the data's position."""
    settings = [f"results_dir={tmp_path}/results", f"task.workers={workers}", "model.dropout=0.1"]
    config = compose(["model=lstm", *words(corpus, *settings, "training.lr_schedule=constant")])
    broken, pieces = RunFolder.create(config), []
    for steps in (3, 5, 8):
        part = config.replace(training=dataclasses.replace(config.training, steps=steps))
        recorder = Recorder()
        trainer = sit(broken, build(part), recorder, resume=steps > 3)
        pieces += recorder.of("train")
    rows = Recorder()
    unbroken = sit(RunFolder.create(config), build(config), rows)
    assert without_time(pieces) == without_time(rows.of("train"))
    assert_same_weights(weights(trainer.model), weights(unbroken.model))
    assert trainer.batches.state_dict() == unbroken.batches.state_dict()


def test_data_that_cannot_be_had_leave_a_checkpoint(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES.md 36."""
    config = compose(["model=lstm", *words(corpus, f"results_dir={tmp_path}/results")])
    found = build(config)
    run = RunFolder.create(config)
    reads = iter(range(10))
    stream_class = type(found.task.open_stream(0))  # type: ignore[attr-defined]
    plain = stream_class.read

    def read(self: object, size: int) -> object:
        if next(reads) == 4:
            raise FpexpError("cannot fetch")
        return plain(self, size)

    monkeypatch.setattr(stream_class, "read", read)
    with pytest.raises(FpexpError, match="cannot fetch"):
        sit(run, found, Recorder())
    assert [path.name for path in run.checkpoints.glob("step_*")] == ["step_00000004.safetensors"]
    recorder = Recorder()
    sit(run, build(config), recorder, resume=True)
    assert [row["step"] for row in recorder.of("train")] == [5, 6, 7, 8]


@pytest.mark.parametrize("model", ["mamba", "fp_mamba_h"])
def test_the_command_line_trains_measures_and_writes(corpus: str, cli: CommandLine, model: str) -> None:
    answer = cli("train", f"model={model}", *words(corpus))
    assert answer.code == 0, answer.err
    rows = answer.out
    assert "perplexity" in rows
    run = cli.runs()[-1]
    assert cli("evaluate", f"run={run.id}", "lengths=[5]").code == 0
    written = cli("generate", f"run={run.id}", "prompt=three f", "limit=5")
    assert written.code == 0, written.err
    assert written.out.startswith("three f")


def test_a_length_that_the_held_out_text_does_not_fill(corpus: str, cli: CommandLine) -> None:
    """Told so that `evaluate`, which has no task.validation_tokens, can act on it."""
    assert cli("train", "model=lstm", *words(corpus)).code == 0
    cli("evaluate", f"run={cli.runs()[-1].id}", "lengths=[256]").refused(
        "lengths=256", "at most 99 here, or raise task.validation_tokens for a new run"
    )


def test_missing_files_leave_no_run(cli: CommandLine) -> None:
    cli("train", "model=lstm", *words("nowhere/*.txt")).refused("nowhere/*.txt")
    assert not cli.runs()


def test_a_prompt_that_is_not_text_is_refused(corpus: str) -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        language(corpus).read_prompt("h\udcff")


def test_a_prompt_that_the_tokenizer_has_no_tokens_for_is_refused(corpus: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words_of_files = {word: i for i, word in enumerate([*WORDS, *map(str, range(60)), "é", "</s>"])}
    library = Tokenizer(models.WordLevel(words_of_files))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "words.json"))
    task = language(corpus, f"task.tokenizer={tmp_path}/words.json")
    for prompt, message in (("eight", "cannot encode this text"), ("h\udcff", "not UTF-8")):
        with pytest.raises(UserError, match=message):
            task.read_prompt(prompt)


def test_what_only_pads_the_vocabulary_is_not_written(corpus: str) -> None:
    task = language(corpus, "task.vocabulary_size=320")
    assert task.write(torch.tensor([SEPARATOR, 104, 300, 105])) == "hi"


def test_the_best_checkpoint_is_that_of_the_least_loss(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No window is right as a whole, or by chance; later losses are lower, but for the last."""
    losses = iter([(5.0, 0.0), (4.0, 0.0), (3.0, 0.0), (3.5, 0.1)])

    def evaluate(*arguments: object) -> dict[str, object]:
        loss, accuracy = next(losses)
        return {"length": 16, "loss": loss, "sequence_accuracy": accuracy}

    monkeypatch.setattr("fpexp.training.loop.evaluate_length", evaluate)
    config = compose(["model=lstm", *words(corpus, f"results_dir={tmp_path}/results", "training.evaluate_every=2")])
    run = RunFolder.create(config)
    sit(run, build(config), Recorder())
    assert best_step(run.checkpoints) == 6


def test_shorter_windows_are_in_what_training_has_read(corpus: str, cli: CommandLine) -> None:
    """CASES.md 23."""
    assert cli("train", "model=lstm", *words(corpus, "evaluation.lengths=[7,16,17]")).code == 0
    rows = read_rows(cli.runs()[-1].curve)
    assert [row["seen_in_training"] for row in rows] == [True, True, False]
    assert all(row["expected_overlap"] is None for row in rows)


def test_held_out_text_is_measured_whole(corpus: str, cli: CommandLine) -> None:
    assert cli("train", "model=lstm", *words(corpus)).code == 0
    cli("evaluate", f"run={cli.runs()[-1].id}", "samples=1").refused("samples", "held-out")


def test_text_that_has_changed_is_not_measured(corpus: str, cli: CommandLine) -> None:
    """What is now held out may have been trained on."""
    assert cli("train", "model=lstm", *words(corpus)).code == 0
    Path(corpus).with_name("000.txt").unlink()
    cli("evaluate", f"run={cli.runs()[-1].id}", "lengths=[5]").refused("other data", "give back the files")


def test_a_refused_resume_leaves_the_status(corpus: str, cli: CommandLine) -> None:
    config = compose(["model=lstm", *words(corpus, "results_dir=results")])
    run = RunFolder.create(config)
    run.write_status("interrupted", resume="as it was")
    with pytest.raises(Interrupted):
        sit(run, build(config), Recorder(at_step=stop_at(3)))
    before = run.status()
    Path(corpus).with_name("061.txt").write_text("more")
    cli("train", f"resume={run.id}").refused("other data")
    assert run.status() == before


def test_perplexity_is_listed_and_drawn(corpus: str, cli: CommandLine) -> None:
    answer = cli("train", "-m", "model=lstm", *words(corpus, "seed=0,1", "training.steps=2"))
    assert answer.code == 0, answer.err
    assert "perplexity by length" in answer.out
    listed = cli("runs").out
    assert "perplexity" in listed
    perplexity = read_rows(cli.runs()[-1].curve)[-1]["perplexity"]
    assert f"{perplexity:.4g} @16" in listed
