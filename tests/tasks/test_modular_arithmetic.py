"""Modular arithmetic against Python's own expressions, and its draws against all strings that there are."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import torch

from fpexp.errors import UserError
from fpexp.randomness import generator
from fpexp.tasks import IGNORE, ModularArithmetic
from fpexp.tasks.lengths import LengthPolicy, Lengths
from fpexp.training.batches import Batches


def arithmetic(**settings: Any) -> ModularArithmetic:
    defaults = {
        "modulus": 5,
        "operators": "+-*",
        "brackets": True,
        "unary_minus": True,
        "lengths": LengthPolicy("uniform", 1, 21, 0.5),
        "context": 256,
    }
    return ModularArithmetic(**{**defaults, **settings})


SETTINGS = [
    {},
    {"brackets": False},
    {"unary_minus": False},
    {"brackets": False, "unary_minus": False},
    {"operators": "*", "modulus": 3},
    {"operators": "+", "unary_minus": False, "modulus": 2},
    {"operators": "*-", "modulus": 7},
]


class Grammar:
    """All strings of n tokens, straight from the rules; a digit is a character."""

    def __init__(self, modulus: int, operators: str, brackets: bool, unary_minus: bool) -> None:
        self.modulus, self.operators, self.brackets, self.unary_minus = modulus, operators, brackets, unary_minus
        self.sums, self.products, self.factors = (
            functools.cache(rule) for rule in (self._sums, self._products, self._factors)
        )

    def _sums(self, n: int) -> list[str]:
        signs = [sign for sign in "+-" if sign in self.operators]
        return self.products(n) + [
            f"{a}{sign}{b}" for i in range(1, n - 1) for a in self.sums(i) for b in self.products(n - 1 - i)
            for sign in signs
        ]  # fmt: skip

    def _products(self, n: int) -> list[str]:
        if "*" not in self.operators:
            return self.factors(n)
        return self.factors(n) + [
            f"{a}*{b}" for i in range(1, n - 1) for a in self.products(i) for b in self.factors(n - 1 - i)
        ]

    def _factors(self, n: int) -> list[str]:
        plain = self._plain(n)
        return plain + ["-" + factor for factor in self._plain(n - 1)] if self.unary_minus else plain

    def _plain(self, n: int) -> list[str]:
        if n == 1:
            return [str(digit) for digit in range(self.modulus)]
        return [f"({inner})" for inner in self.sums(n - 2)] if self.brackets and n > 2 else []


def grammar_of(task: ModularArithmetic) -> Grammar:
    of = task.expressions
    return Grammar(of.modulus, of.operators, of.brackets, of.unary_minus)


@pytest.mark.parametrize("modulus", [5, 2, 13])
def test_ten_thousand_values_are_pythons(modulus: int) -> None:
    """The evaluator is Python's: its precedence and grouping are those of the grammar."""
    task = arithmetic(modulus=modulus)
    checked = 0
    for length in (*range(1, 21), 40, 64, 127, 255):
        batch = task.sample(417, length, generator(0, "train", length))
        assert batch.inputs.shape == (417, task.input_length(length))
        assert (batch.targets[:, :-1] == IGNORE).all()
        for row, target in zip(batch.inputs, batch.targets[:, -1].tolist(), strict=True):
            text = task.write(row)
            assert text[-1] == "="
            assert eval(text[:-1]) % modulus == target, text
            checked += 1
    assert checked >= 10_000


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_every_string_of_the_grammar_is_counted_read_and_valued(settings: dict[str, Any]) -> None:
    task = arithmetic(**settings)
    grammar = grammar_of(task)
    for n in range(1, 7):
        strings = grammar.sums(n)
        assert len(set(strings)) == len(strings)  # the grammar is unambiguous
        assert task.has_length(n) == bool(strings)
        if strings:
            assert task.expressions.log_count(n) == pytest.approx(math.log(len(strings)), abs=1e-9)
            few = strings[:: len(strings) // 500 + 1]
            prompts = torch.stack([task.read_prompt(f"{text}=") for text in few])
            assert [task.write(prompt) for prompt in prompts] == [f"{text}=" for text in few]
            values = task.expressions.evaluate(prompts[:, :-1]).tolist()
            assert values == [eval(text) % task.expressions.modulus for text in few]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_the_grammar_lacks_is_not_read(settings: dict[str, Any]) -> None:
    """Of all strings of up to four tokens."""
    task = arithmetic(**settings, modulus=2) if "modulus" not in settings else arithmetic(**settings)
    strings = {text for n in range(1, 5) for text in grammar_of(task).sums(n)}
    symbols = "01+-*()"
    for n in range(5):
        for parts in itertools.product(symbols, repeat=n):
            text = "".join(parts)
            try:
                task.read_prompt(f"{text}=")
                read = True
            except UserError:
                read = False
            # "01" is read as a number, which is no residue: digits never stand side by side
            assert read == (text in strings), text


@pytest.mark.parametrize(
    ("length", "settings"),
    [(3, {"modulus": 3}), (4, {"modulus": 2}), (5, {"modulus": 2, "brackets": False}), (6, {"modulus": 2})],
)
def test_draws_are_uniform_over_all_strings(length: int, settings: dict[str, Any]) -> None:
    """Chi squared; its mean is the degrees of freedom d, its deviation sqrt(2 d)."""
    task = arithmetic(**settings)
    strings = {text: number for number, text in enumerate(grammar_of(task).sums(length))}
    inputs = task.sample(40 * len(strings), length, generator(0, "train")).inputs[:, :-1]
    counts = torch.bincount(torch.tensor([strings[task.write(row)] for row in inputs]), minlength=len(strings)).double()
    statistic, freedom = float(((counts - 40) ** 2 / 40).sum()), len(strings) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


def test_counts_of_long_expressions_are_exact_integers() -> None:
    """The same sums with Python's integers, one token and one bracket at a time."""
    task = arithmetic()

    @functools.cache
    def ways(n: int, state: str, depth: int) -> int:
        if n == 0:
            return int(state == "after" and depth == 0)
        if state == "after":
            closing = ways(n - 1, "after", depth - 1) if depth else 0
            return 3 * ways(n - 1, "factor", depth) + closing
        sign = ways(n - 1, "unsigned", depth) if state == "factor" else 0
        return 5 * ways(n - 1, "after", depth) + ways(n - 1, "factor", depth + 1) + sign

    for n in range(1, 256):
        assert task.expressions.log_count(n) == pytest.approx(math.log(ways(n, "factor", 0)), rel=1e-12)


def test_no_length_is_drawn_that_has_no_expression() -> None:
    task = arithmetic(unary_minus=False)
    assert [n for n in range(1, 12) if task.has_length(n)] == [1, 3, 5, 7, 9, 11]
    with pytest.raises(ValueError, match="no expression of 4 tokens"):
        task.sample(2, 4, generator(0, "train"))
    batches = Batches(task, 2, seed=0)
    lengths = {batches.next(step)[1] for step in range(200)}
    assert lengths == set(range(1, 22, 2))
    with pytest.raises(UserError, match=r"task.lengths.max=20: no expression has 20 tokens.*task.unary_minus=true"):
        arithmetic(unary_minus=False, lengths=LengthPolicy("grow", 1, 20, 0.5))
    with pytest.raises(UserError, match=r"evaluation.lengths\[2\]=8: no expression has 8 tokens"):
        task.check_length(8, "evaluation.lengths[2]")


def test_growth_passes_over_lengths_without_expressions() -> None:
    lengths = Lengths(LengthPolicy("grow", 2, 8, 0.5), arithmetic(unary_minus=False).has_length)
    seen = []
    for _ in range(5):
        seen.append(lengths.next(generator(0, "train")))
        lengths.observe(1.0)
    assert seen == [3, 5, 7, 7, 7]
    with pytest.raises(ValueError, match="no length from 4 to 4"):
        Lengths(LengthPolicy("grow", 4, 4, 0.5), arithmetic(unary_minus=False).has_length)


def test_vocabulary() -> None:
    assert arithmetic().vocabulary_size == 12
    assert arithmetic(brackets=False).vocabulary_size == 10
    assert arithmetic(operators="+*", unary_minus=False).vocabulary_size == 11
    assert arithmetic(operators="+*").vocabulary_size == 12
    assert arithmetic().chance == 0.2
    symbols = {
        symbol for n in (9, 10) for row in arithmetic().sample(300, n, generator(0, "x")).inputs for symbol in row
    }
    assert max(int(symbol) for symbol in symbols) == 10  # `=`; padding never comes


def test_the_answer_to_a_prompt() -> None:
    task = arithmetic()
    prompt = task.read_prompt(" (1 + 2)*3 =")
    assert task.write(prompt) == "(1+2)*3="
    assert task.answer(prompt).tolist() == [4]
    large = arithmetic(modulus=113)
    assert large.answer(large.read_prompt("100*100-(-7)=")).tolist() == [(100 * 100 + 7) % 113]


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ("", "the prompt is empty; write an expression and '=', such as '(1+-1)='"),
        ("1+2", "ends too early: after it may come '+', '-', '*', '='"),
        ("(1+2=", "has '=' after '(1+2'; there it may have '+', '-', '*', ')'"),
        ("1+=", "has '=' after '1+'; there it may have a digit, '(', '-'"),
        ("--1=", "has '-' after '-'; there it may have a digit, '('"),
        ("=", "has '=' at its beginning"),
        ("1)=", "has ')' after '1'"),
        ("1=2", "goes on after '=' with '2'"),
        ("7=", "has '7', which is no residue; they are 0 to 4"),
        ("9" * 5000, "which is no residue"),
        ("1/2=", "has '/' after '1'"),
        ("²=", "has '²'"),
        ("1 2=", "has '2' after '1'"),
        ("1+" * 200 + "1=", "has 402 tokens, more than task.context=256"),
    ],
)
def test_a_prompt_that_cannot_be_read(prompt: str, part: str) -> None:
    with pytest.raises(UserError) as caught:
        arithmetic().read_prompt(prompt)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("operators", ["", "++", "/", "+ -", "plus"])
def test_operators_are_some_of_three(operators: str) -> None:
    with pytest.raises(UserError, match=r"task.operators='.*' must be some of '\+-\*', each once"):
        arithmetic(operators=operators)


def test_a_length_that_does_not_fit_the_context() -> None:
    arithmetic().check_length(255, "lengths")
    with pytest.raises(
        UserError, match=r"lengths=256 needs 257 tokens, more than task.context=256; at most 255 here, or raise"
    ):
        arithmetic().check_length(256, "lengths")


def test_draws_come_from_the_generator_alone() -> None:
    task = arithmetic()
    before = torch.get_rng_state()
    first, second = (task.sample(4, 30, generator(5, "train", 9)).inputs for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, task.sample(4, 30, generator(5, "train", 10)).inputs)
    assert torch.equal(torch.get_rng_state(), before)


def test_expected_overlap_is_by_the_number_of_expressions() -> None:
    task = arithmetic()
    assert task.expected_overlap(3, 10) == pytest.approx(1 - (1 - 1 / 80) ** 10, rel=1e-9)
    assert task.expected_overlap(3, 0) == 0
    assert task.expected_overlap(255, 10**9) < 1e-100
