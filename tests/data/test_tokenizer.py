"""Tokenizers: there and back, separators in text, byte lengths, and what cannot be opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpora import make_tokenizer

from fpexp.data import Tokenizer, open_tokenizer
from fpexp.data.tokenizer import describe
from fpexp.errors import FpexpError, UserError

TEXTS = ["", "the cat", "häuser 北京 🙂\n\x00", "a<|endoftext|>b", " leading and trailing "]


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return open_tokenizer("bytes" if request.param == "bytes" else str(make_tokenizer(tmp_path / "tok.json")))


def test_there_and_back(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(TEXTS)
    assert [tokenizer.decode(tokens.tolist()) for tokens in encoded] == TEXTS
    for text, tokens in zip(TEXTS, encoded, strict=True):
        assert tokenizer.encode(text).tolist() == tokens.tolist()
        assert all(0 <= token < tokenizer.vocabulary_size for token in tokens)


def test_text_never_gives_a_separator(tokenizer: Tokenizer) -> None:
    assert tokenizer.separator not in tokenizer.encode("<|endoftext|> a<|endoftext|>")
    assert tokenizer.decode([tokenizer.separator]) == "<|endoftext|>"


def test_byte_lengths_add_up_to_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    lengths = tokenizer.byte_lengths
    assert lengths.shape == (tokenizer.vocabulary_size,)
    assert lengths[tokenizer.separator] == 0
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_byte_pairs_are_fewer_than_bytes(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(make_tokenizer(tmp_path / "tok.json")))
    assert len(tokenizer.encode("the cat")) < 5


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    first = open_tokenizer(str(make_tokenizer(tmp_path / "a.json")))
    (tmp_path / "b.json").write_bytes((tmp_path / "a.json").read_bytes())
    other = open_tokenizer(str(make_tokenizer(tmp_path / "c.json", size=270)))
    assert first.identity == open_tokenizer(str(tmp_path / "b.json")).identity != other.identity
    assert describe(first)["name"] == str(tmp_path / "a.json")


def test_which_token_separates(tmp_path: Path) -> None:
    special = ("<pad>", "</s>")
    assert open_tokenizer(str(make_tokenizer(tmp_path / "a.json", special))).separator == 1
    assert open_tokenizer(str(make_tokenizer(tmp_path / "b.json", ("<stop>",)))).separator == 0
    with pytest.raises(UserError, match=r"needs a special token .* \(it has: <pad>, <x>\)"):
        open_tokenizer(str(make_tokenizer(tmp_path / "c.json", ("<pad>", "<x>"))))
    with pytest.raises(UserError, match=r"\(it has: none\)"):
        open_tokenizer(str(make_tokenizer(tmp_path / "d.json", ())))


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^unknown tokenizer 'gtp2' \(bytes, gpt2, or the path"):
        open_tokenizer("gtp2")
    with pytest.raises(UserError, match=r"^no tokenizer file '.*/none.json'; use task.tokenizer="):
        open_tokenizer(str(tmp_path / "none.json"))
    for content in (b"", b'{"a": 1}', b"\xff\xfe"):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(UserError, match=r"bad.json is no tokenizer.json: "):
            open_tokenizer(str(tmp_path / "bad.json"))


def test_nobodys_home_folder() -> None:
    with pytest.raises(UserError, match=r"^task.tokenizer=~nouser/t.json: '~nouser' is nobody's home folder"):
        open_tokenizer("~nouser/t.json")


def test_a_text_that_cannot_be_encoded(tmp_path: Path) -> None:
    """A vocabulary of words without an unknown one; half of a pair of surrogates."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    library = Library(models.WordLevel({"a": 0, "</s>": 1}))
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "words.json"))
    words = str(tmp_path / "words.json")
    for name, text, reason in (
        (words, "b", r"WordLevel error: Missing \[UNK\] token from the vocabulary"),
        (words, "a\udcff", "it is not Unicode text"),
        ("bytes", "a\udcff", "it is not Unicode text"),
    ):
        with pytest.raises(
            UserError, match=rf"^the tokenizer {name} cannot encode this text \({reason}\); use another"
        ):
            open_tokenizer(name).encode(text)


def test_gpt2_has_its_sizes_before_it_is_fetched() -> None:
    tokenizer = open_tokenizer("gpt2")
    assert (tokenizer.vocabulary_size, tokenizer.separator, tokenizer.identity) == (50257, 50256, "gpt2")


def test_gpt2_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError(f"no route to the hub for {name}\nand more")

    monkeypatch.setattr("tokenizers.Tokenizer", type("NoNetwork", (), {"from_pretrained": staticmethod(fail)}))
    with pytest.raises(
        FpexpError, match=r"^cannot fetch .*\(no route to the hub for gpt2\).*task.tokenizer=<"
    ) as error:
        open_tokenizer("gpt2").encode("a")
    assert error.value.exit_code == 1
    assert "\n" not in str(error.value)


def test_gpt2_is_not_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer as Library

    path = make_tokenizer(tmp_path / "tok.json")
    fake = type("Other", (), {"from_pretrained": staticmethod(lambda name: Library.from_file(str(path)))})
    monkeypatch.setattr("tokenizers.Tokenizer", fake)
    with pytest.raises(FpexpError, match=r"is another; use task.tokenizer="):
        open_tokenizer("gpt2").encode("a")
