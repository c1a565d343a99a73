"""Finite groups: the axioms, both ways to multiply, and a reference on tuples in plain Python."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import Tensor

from fpexp.errors import UserError
from fpexp.tasks.groups import MAX_ORDER, Group, Tabulated, parse_group

SMALL = ["S3", "A4", "Z6", "Z2 x S3", "Z1 x A3"]
LARGE = ["A5", "S5", "S6", "S7", "A5 x Z7"]
TABLE_LIMITS = [0, 1024]

Element = tuple[tuple[int, ...], ...]


def is_even(p: tuple[int, ...]) -> bool:
    return sum(p[i] > p[j] for i, j in itertools.combinations(range(len(p)), 2)) % 2 == 0


class TupleGroup:
    """The reference: an element has one tuple per factor, a permutation, or (k,) for k in Z_n."""

    def __init__(self, name: str) -> None:
        self.factors = name.split(" x ")
        self.elements: list[Element] = list(itertools.product(*map(self.list_factor, self.factors)))
        self.index = {element: i for i, element in enumerate(self.elements)}

    @staticmethod
    def list_factor(factor: str) -> list[tuple[int, ...]]:
        kind, n = factor[0], int(factor[1:])
        if kind == "Z":
            return [(k,) for k in range(n)]
        return [p for p in itertools.permutations(range(n)) if kind == "S" or is_even(p)]

    def multiply(self, a: int, b: int) -> int:
        return self.index[
            tuple(
                ((x[0] + y[0]) % int(factor[1:]),) if factor[0] == "Z" else tuple(x[k] for k in y)
                for factor, x, y in zip(self.factors, self.elements[a], self.elements[b], strict=True)
            )
        ]


def random_elements(group: Group, *shape: int) -> Tensor:
    return torch.randint(group.order, shape, generator=torch.Generator().manual_seed(0))


def assert_axioms(group: Group, a: Tensor, b: Tensor, c: Tensor) -> None:
    """Closure, associativity, identity 0 and inverses, on broadcastable a, b, c."""
    product = group.multiply(a, b)
    identity = torch.tensor(0)
    assert product.dtype == torch.long
    assert ((product >= 0) & (product < group.order)).all()
    assert torch.equal(group.multiply(product, c), group.multiply(a, group.multiply(b, c)))
    assert torch.equal(group.multiply(a, identity), a)
    assert torch.equal(group.multiply(identity, a), a)
    assert torch.equal(group.multiply(a, group.inverse(a)), torch.zeros_like(a))
    assert torch.equal(group.multiply(group.inverse(a), a), torch.zeros_like(a))


def order_of(group: Group, a: int) -> int:
    """The least k >= 1 with a^k = 1."""
    powers = group.running_products(torch.full((1, group.order), a))[0]
    return int((powers == 0).nonzero()[0]) + 1


def is_abelian(group: Group) -> bool:
    a = torch.arange(group.order)
    return torch.equal(group.multiply(a[:, None], a), group.multiply(a, a[:, None]))


@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
@pytest.mark.parametrize("name", SMALL)
def test_axioms_hold_for_every_triple(name: str, table_limit: int) -> None:
    group = parse_group(name, table_limit)
    a = torch.arange(group.order)
    assert_axioms(group, a[:, None, None], a[:, None], a)


@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
@pytest.mark.parametrize("name", LARGE)
def test_axioms_hold_for_random_triples(name: str, table_limit: int) -> None:
    group = parse_group(name, table_limit)
    assert_axioms(group, *random_elements(group, 3, 1000))


@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
@pytest.mark.parametrize("name", SMALL)
def test_every_product_equals_the_reference(name: str, table_limit: int) -> None:
    group, reference = parse_group(name, table_limit), TupleGroup(name)
    a = torch.arange(group.order)
    expected = [[reference.multiply(i, j) for j in range(group.order)] for i in range(group.order)]
    assert group.order == len(reference.elements)
    assert group.multiply(a[:, None], a).tolist() == expected


@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
@pytest.mark.parametrize("name", [*SMALL, *LARGE, "A4 x Z5", "A7", "Z2 x A4 x S3", "Z60"])
def test_running_products_equal_a_plain_loop(name: str, table_limit: int) -> None:
    group, reference = parse_group(name, table_limit), TupleGroup(name)
    x = random_elements(group, 4, 63)
    expected = [list(itertools.accumulate(row, reference.multiply)) for row in x.tolist()]
    y = group.running_products(x)
    assert y.dtype == torch.long
    assert y.tolist() == expected


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
def test_running_products_of_short_rows(table_limit: int, length: int) -> None:
    group = parse_group("S4", table_limit)
    x = random_elements(group, 3, length)
    y = group.running_products(x)
    assert torch.equal(y, x)
    assert y is not x


@pytest.mark.parametrize("name", [*SMALL, "A5", "S5", "A5 x Z7", "Z256", "Z257"])
def test_table_and_composition_agree_everywhere(name: str) -> None:
    table, composed = parse_group(name), parse_group(name, table_limit=0)
    assert isinstance(table, Tabulated)
    assert not isinstance(composed, Tabulated)
    a = torch.arange(table.order)
    assert torch.equal(table.multiply(a[:, None], a), composed.multiply(a[:, None], a))
    assert torch.equal(table.inverse(a), composed.inverse(a))


@pytest.mark.parametrize("name", ["S6 x Z2", "S5 x A4", "S6 x S5"])
def test_factor_tables_agree_with_composition(name: str) -> None:
    factor_tables, composed = parse_group(name), parse_group(name, table_limit=0)
    assert not isinstance(factor_tables, Tabulated)
    a, b = random_elements(composed, 2, 5000)
    assert torch.equal(factor_tables.multiply(a, b), composed.multiply(a, b))
    assert torch.equal(factor_tables.inverse(a), composed.inverse(a))


@pytest.mark.parametrize(("name", "dtype"), [("Z256", torch.uint8), ("Z257", torch.int16), ("A4 x Z5", torch.uint8)])
def test_the_table_takes_the_smallest_integers_that_fit(name: str, dtype: torch.dtype) -> None:
    group = parse_group(name)
    assert isinstance(group, Tabulated)
    assert group.table.dtype == dtype
    assert group.table.shape == (group.order, group.order)


def test_the_table_limit_is_inclusive() -> None:
    assert isinstance(parse_group("A5", table_limit=60), Tabulated)
    assert not isinstance(parse_group("A5", table_limit=59), Tabulated)


@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
@pytest.mark.parametrize(
    ("left", "right", "result"),
    [((), (), ()), ((3, 1), (4,), (3, 4)), ((2, 1, 1), (5, 4), (2, 5, 4)), ((0, 4), (0, 4), (0, 4))],
)
def test_operands_broadcast(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], table_limit: int
) -> None:
    group = parse_group("A4 x Z5", table_limit)
    assert group.multiply(random_elements(group, *left), random_elements(group, *right)).shape == result


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("A5", 60),
        ("S5", 120),
        ("A4 x Z5", 60),
        ("Z60", 60),
        ("S8", 40320),
        ("A8", 20160),
        ("A2 x Z3", 3),
        ("S1 x Z2", 2),
        ("Z100000", MAX_ORDER),
    ],
)
def test_orders(name: str, order: int) -> None:
    assert parse_group(name).order == order


@pytest.mark.parametrize(
    ("name", "abelian"), [("Z60", True), ("Z2 x Z3", True), ("A3", True), ("S3", False), ("A4 x Z5", False)]
)
def test_which_groups_are_abelian(name: str, abelian: bool) -> None:
    assert is_abelian(parse_group(name)) == abelian


@pytest.mark.parametrize(
    ("name", "orders"),
    [
        ("S5", {1, 2, 3, 4, 5, 6}),
        ("A5", {1, 2, 3, 5}),
        ("A4 x Z5", {1, 2, 3, 5, 10, 15}),
        ("Z60", {1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60}),
    ],
)
def test_orders_of_elements(name: str, orders: set[int]) -> None:
    group = parse_group(name)
    assert {order_of(group, a) for a in range(group.order)} == orders


@pytest.mark.parametrize("name", ["S2", "S3", "S4", "S8", "A3", "A4", "A6", "A8", "S8 x Z2"])
def test_multiplication_by_an_element_permutes_the_group(name: str) -> None:
    group = parse_group(name, table_limit=0)
    last, all_elements = torch.tensor(group.order - 1), torch.arange(group.order)
    shifted = group.multiply(last, all_elements)
    assert torch.equal(shifted.sort().values, all_elements)
    assert torch.equal(group.multiply(group.inverse(last), shifted), all_elements)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("s5", "S5"),
        ("Z60", "Z60"),
        ("A4 x Z5", "A4 x Z5"),
        ("A4xZ5", "A4 x Z5"),
        ("a4Xz5", "A4 x Z5"),
        ("  A4*z5 ", "A4 x Z5"),
        ("A4 × Z5", "A4 x Z5"),
        ("Z2 x s3*Z05", "Z2 x S3 x Z5"),
        ("Z1 x S3", "Z1 x S3"),
    ],
)
@pytest.mark.parametrize("table_limit", TABLE_LIMITS)
def test_names_are_canonical(text: str, name: str, table_limit: int) -> None:
    assert parse_group(text, table_limit).name == name


FORM = "write S<n>, A<n> or Z<n> with n >= 1, joined by 'x'"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("A", "'A' is not a factor"),
        ("S0", "'S0' is not a factor"),
        ("Q8", "'Q8' is not a factor"),
        ("Z-3", "'Z-3' is not a factor"),
        ("S 5", "'S 5' is not a factor"),
        ("A4 Z5", "'A4 Z5' is not a factor"),
        ("A4\nZ5", r"'A4\nZ5' is not a factor"),
        ("Z2.5", "'Z2.5' is not a factor"),
        ("Z٣", "'Z٣' is not a factor"),
        ("ſ5", "'ſ5' is not a factor"),
        pytest.param("Z" + "9" * 5000, "is not a factor", id="too many digits for int()"),
        ("", "a factor is missing"),
        ("  ", "a factor is missing"),
        ("A4 x", "a factor is missing"),
        ("x Z5", "a factor is missing"),
        ("A4 x x Z5", "a factor is missing"),
    ],
)
def test_a_text_outside_the_grammar_is_refused_with_the_alternatives(text: str, problem: str) -> None:
    message = refusal(text)
    assert message.startswith(f"cannot read the group {text!r}: ")
    assert problem in message
    assert FORM in message


@pytest.mark.parametrize(
    ("text", "name"),
    [("S1", "S1"), ("a1", "A1"), ("A2", "A2"), ("Z1", "Z1"), ("Z1 x S1", "Z1 x S1"), ("A2xA2", "A2 x A2")],
)
def test_a_trivial_group_is_refused(text: str, name: str) -> None:
    assert f"the group {name!r} has one element; there is nothing to track" in refusal(text)


@pytest.mark.parametrize(
    ("text", "order"),
    [
        ("S9", "362880"),
        ("A9", "181440"),
        ("Z100001", "100001"),
        ("S8 x Z3", "120960"),
        ("S7 x S7", "25401600"),
        ("S50", "about 10^64"),
        ("Z2 x A50", "about 10^64"),
        ("S999999999999", "about 10^"),
        ("Z999999999999999999", "about 10^18"),
        pytest.param(" x ".join(["Z99999"] * 200), "about 10^1000", id="many factors"),
    ],
)
def test_a_group_too_large_is_refused_at_once(text: str, order: str) -> None:
    start = time.perf_counter()
    message = refusal(text)
    assert time.perf_counter() - start < 0.1
    assert f"has {order}" in message
    assert f"above the limit of {MAX_ORDER}" in message


def refusal(text: str) -> str:
    """The message of the UserError, which is one line."""
    with pytest.raises(UserError) as caught:
        parse_group(text)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
