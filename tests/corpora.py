"""Small corpora in the real file formats, a tiny tokenizer, and what streams of them have to give, by plain lists."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from fpexp.data import Corpus
from fpexp.data.tokenizer import Bytes

SEPARATOR = Bytes.separator


def documents(n: int, first: int = 0) -> list[str]:
    """Return texts that all differ, of unequal length, a few of them empty or beyond ASCII."""
    return ["" if i % 97 == 50 else f"{i} " + "äb" * (i * 7 % 23) for i in range(first, first + n)]


def write_jsonl(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(texts)))
    return path


def write_parquet(path: Path, texts: Sequence[str | None], column: str = "text", row_group_size: int = 100) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def write_files(folder: Path, texts: Sequence[str], files: int) -> list[list[str]]:
    """Write the texts into JSON lines files of unequal size and return what each holds."""
    edges = [0, *(len(texts) * i // files + i % 3 for i in range(1, files)), len(texts)]
    parts = [list(texts[a:b]) for a, b in itertools.pairwise(edges)]
    for i, part in enumerate(parts):
        write_jsonl(folder / f"part_{i:03}.jsonl", part)
    return parts


def local(pattern: Path | str, **settings: object) -> Corpus:
    """Return a corpus of local files by bytes, small in all that costs time."""
    defaults = {"source": "local", "tokenizer": "bytes", "validation_tokens": 0, "shuffle_buffer": 64, "workers": 0}
    return Corpus(files=str(pattern), **{**defaults, **settings})  # type: ignore[arg-type]


def flat(texts: Sequence[str]) -> list[int]:
    """Return doc1 sep doc2 sep ... in bytes."""
    return [token for text in texts for token in (*text.encode(), SEPARATOR)]


def windows(tokens: Sequence[int], context: int) -> list[list[int]]:
    """Return the windows of context + 1 tokens, each beginning with the last token of the one before."""
    return [list(tokens[i : i + context + 1]) for i in range(0, len(tokens) - context, context)]


def split_documents(tokens: Sequence[int]) -> list[str]:
    """Return the whole documents of a stream of bytes that begins with one."""
    found, current = [], bytearray()
    for token in tokens:
        if token == SEPARATOR:
            found.append(current.decode())
            current = bytearray()
        else:
            current.append(token)
    return found


def joined(rows: torch.Tensor) -> list[int]:
    """Return the tokens of windows, each once, and check that the windows overlap by one."""
    assert torch.equal(rows[1:, 0], rows[:-1, -1])
    return [*rows[0, :1].tolist(), *rows[:, 1:].flatten().tolist()]


def make_gpt2(path: Path, size: int = 50257) -> Path:
    """Write a tokenizer.json of GPT-2's sizes: bytes, tokens that no text gives, and the separator."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"unused{i}" for i in range(50256 - len(alphabet))), "<|endoftext|>"]
    tokens += [f"more{i}" for i in range(size - len(tokens))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path


def make_tokenizer(path: Path, special: Sequence[str] = ("<|endoftext|>",), size: int = 320) -> Path:
    """Train byte-level byte pairs on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat with the other cat", "häuser und höfe"] * 20, trainer)
    tokenizer.save(str(path))
    return path
