"""Held-out documents: exactly so many tokens, and never in training."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from corpora import documents, flat, local, make_tokenizer, split_documents, write_files, write_jsonl

from fpexp.errors import UserError

TEXTS = [text for text in documents(300) if text]


@pytest.mark.parametrize("tokens", [1, 50, 777, 2000])
def test_held_out_documents_are_the_first_and_training_never_sees_them(tmp_path: Path, tokens: int) -> None:
    """Whole documents are taken, and cut to `tokens`; the split falls inside a file too."""
    write_files(tmp_path, TEXTS, 4)
    corpus = local(tmp_path / "*.jsonl", validation_tokens=tokens)
    held_out = corpus.held_out()
    first, expected = 0, []
    for _ in range(2):
        last = next(n for n in range(first, len(TEXTS)) if len(flat(TEXTS[first:n])) >= tokens)
        expected.append(flat(TEXTS[first:last])[:tokens])
        first = last
    assert [held_out.validation.tolist(), held_out.test.tolist()] == expected
    for seed in (0, 1):
        seen = split_documents(corpus.token_stream(seed=seed, epochs=3).take(10**6).tolist())
        assert Counter(seen) == Counter(TEXTS[first:] * 3)


def test_held_out_tokens_do_not_depend_on_the_shuffling(tmp_path: Path) -> None:
    write_files(tmp_path, TEXTS, 4)
    found = [local(tmp_path / "*.jsonl", validation_tokens=99, shuffle_buffer=n).held_out() for n in (0, 64)]
    assert found[0].validation.tolist() == found[1].validation.tolist()


def test_their_bytes_can_be_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["the cat sat", "on the mat", "and more"])
    corpus = local(tmp_path / "a.jsonl", tokenizer=str(make_tokenizer(tmp_path / "tok.json")), validation_tokens=2)
    tokenizer, validation = corpus.open_tokenizer(), corpus.held_out().validation
    assert len(validation) == 2
    written = tokenizer.decode(validation.tolist()).removesuffix("<|endoftext|>")
    assert tokenizer.byte_lengths[validation].sum() == len(written.encode())


def test_too_few_documents(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["abc", "de", "f"])
    assert local(path, validation_tokens=3).held_out().test.tolist() == [100, 101, 256]
    for tokens in (4, 5, 100):
        if tokens == 4:
            write_jsonl(path, ["abc", "dez"])
        with pytest.raises(
            UserError, match=r"too few to leave any for training after \d+ tokens .*lower task.validation"
        ):
            local(path, validation_tokens=tokens).stream(8, seed=0)


def test_no_document_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n\n")
    for tokens in (0, 1):
        with pytest.raises(UserError, match=r"^there is no document at all; give files that hold some"):
            local(path, validation_tokens=tokens).held_out()
