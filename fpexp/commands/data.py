"""fpexp data: tokens prepared on disk."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fpexp.commands.arguments import parse
from fpexp.config.run import RunConfig
from fpexp.config.schema import Checker, did_you_mean, settings_of
from fpexp.errors import Interrupted, UserError
from fpexp.ranges import Range

if TYPE_CHECKING:
    from fpexp.data import Corpus
    from fpexp.data.shards import Manifest

ACTIONS = ("prepare",)

OPTIONS = {
    "data.tokens": Annotated[int, Range(1)],
    "data.output": str,
    "data.shard_tokens": Annotated[int, Range(1)],
}
SHARD_TOKENS = 100_000_000  # 200 MB; what a stop can cost, some minutes
PREFIX = "data."
UNUSED_MODEL = "model=lstm"  # a config has to name one
REPORT_EVERY = 10.0  # seconds, where there is no terminal


def run(arguments: list[str]) -> int:
    """Do what the first word says."""
    if not arguments or arguments[0] not in ACTIONS:
        word = arguments[0] if arguments else ""
        raise UserError(f"which action? write fpexp data prepare{did_you_mean(word, ACTIONS)} ({', '.join(ACTIONS)})")
    return _prepare(arguments[1:])


def _prepare(arguments: list[str]) -> int:
    """Write the tokens of a task's documents into shards, or go on where an earlier call stopped."""
    options = parse([word for word in arguments if word.startswith(PREFIX)], OPTIONS)
    if "data.tokens" not in options:
        raise UserError("how many tokens? write data.tokens=<number>, such as data.tokens=1e6")
    words = [word for word in arguments if not word.startswith(PREFIX)]

    from fpexp.config.compose import compose
    from fpexp.config.quoting import override_word, shell_word
    from fpexp.data.paths import expand

    named = any(word.startswith(("model=", "experiment=")) for word in words)
    config = compose(words if named else [*words, UNUSED_MODEL])
    corpus = _corpus(config)
    tokens, shard_tokens = options["data.tokens"], options.get("data.shard_tokens", SHARD_TOKENS)
    given = options.get("data.output")
    output = expand(given, "data.output") if given else _default_output(config, corpus)
    manifest = _write(corpus, Path(output), config.seed, tokens, shard_tokens)
    if manifest.tokens < tokens:
        print(f"the documents end after {manifest.tokens:,} tokens, fewer than data.tokens={tokens}")
    print(f"{manifest.tokens:,} tokens in {len(manifest.shards)} shards: {output}")
    settings = {
        "task": str(config.choices.task),
        "task.source": "shards",
        "task.files": output,
        "task.tokenizer": corpus.tokenizer,
    }
    words = [shell_word(override_word(key, value)) for key, value in settings.items()]
    words.append(f"task.validation_tokens={corpus.validation_tokens}")
    print(f"train on them with: fpexp train model=<model> {' '.join(words)}")
    return 0


def _corpus(config: RunConfig) -> Corpus:
    """Return the corpus of the task's settings."""
    from fpexp.data import Corpus

    fields = {field.name for field in dataclasses.fields(Corpus)}
    known = settings_of(config.task.resolve())
    if not {"source", "tokenizer"} <= known.keys():
        raise UserError(f"task={config.choices.task} has no documents to prepare; use task=fineweb")
    given = config.task.settings
    settings = {name: given.get(name, known[name].default) for name in fields & known.keys()}
    corpus: Corpus = Checker({}).check(Corpus, settings, "task")
    if corpus.source == "shards":
        raise UserError("task.source=shards is prepared already; use task.source=local task.files='<pattern>' or hub")
    return corpus


def _default_output(config: RunConfig, corpus: Corpus) -> str:
    names = (config.choices.task, Path(corpus.tokenizer).stem)
    folder = str(Path(config.results_dir) / "data" / "-".join(re.sub(r"[^\w.]+", "_", name) for name in names))
    return f"./{folder}" if folder.startswith("~") else folder  # results_dir is taken as it is


def _write(corpus: Corpus, output: Path, seed: int, tokens: int, shard_tokens: int) -> Manifest:
    from fpexp.data.prepare import prepare
    from fpexp.data.shards import Manifest
    from fpexp.training.interruption import Interruption

    with Interruption() as interruption:
        try:
            with interruption.at_once(), _progress(tokens) as progress:
                stream = corpus.token_stream(seed=seed, epochs=1)
                try:
                    return prepare(
                        stream,
                        corpus.held_out(),
                        output,
                        corpus=corpus.describe(),
                        order={"seed": seed, "shuffle_buffer": corpus.shuffle_buffer},
                        tokenizer=corpus.open_tokenizer(),
                        tokens=tokens,
                        shard_tokens=shard_tokens,
                        progress=progress,
                    )
                finally:
                    stream.close()
        except Interrupted as error:
            manifest = Manifest.read(output)
            shards, whole = (len(manifest.shards), manifest.tokens) if manifest else (0, 0)
            raise Interrupted(
                error.signum, f"{error}; {shards} whole shards ({whole:,} tokens) are kept, go on with the same command"
            ) from None


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that shows how many tokens are done: a bar on a terminal, now and then a line elsewhere."""
    from fpexp.tracking.console import has_rich_terminal, note

    if has_rich_terminal():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(TextColumn("tokens"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
        return
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_EVERY:
            last = time.monotonic()
            note(f"{done:,} of {total:,} tokens")

    yield report
