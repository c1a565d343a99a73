"""Finite groups for word problems: read 'A4 x Z5', multiply element indices, follow running products.

An element is its index in range(order), and the identity is always 0. All tensors live on the CPU.

>>> group = parse_group("a4xz5")
>>> group.name, group.order
('A4 x Z5', 60)
>>> group.running_products(torch.tensor([[7, 19, 58]]))  # (1, 2), (3, 4), (11, 3): A4 multiplies, Z5 adds
tensor([[ 7, 31, 54]])
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fpexp.errors import UserError

MAX_ORDER = 100_000  # the vocabulary of a word problem has one entry per element
TABLE_BLOCK = 2**18  # products computed at once while a table is filled; bounds memory at any table_limit

_SEPARATOR = re.compile(r"[xX*×]")
_FACTOR = re.compile(r"([SAZsaz])([0-9]{1,18})")


class Group(ABC):
    """A finite group on the indices range(order).

    Arguments and results are long tensors of indices. An index outside range(order) is a mistake of the
    caller and not looked for.
    """

    name: str
    order: int

    @abstractmethod
    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a b; any two shapes that broadcast."""

    @abstractmethod
    def inverse(self, a: Tensor) -> Tensor:
        """Return the b with a b = b a = 0 (the identity); any shape."""

    def running_products(self, x: Tensor) -> Tensor:
        """Return y_t = y_{t-1} x_t, starting from the identity; x, y: (B, T)."""
        y = torch.empty_like(x, dtype=torch.long)
        product = torch.zeros(len(x), dtype=torch.long)
        for t, element in enumerate(x.unbind(1)):
            product = self.multiply(product, element)
            y[:, t] = product
        return y


class Cyclic(Group):
    """Z_n: addition modulo n."""

    def __init__(self, n: int) -> None:
        self.name, self.order = f"Z{n}", n

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return (a + b) % self.order

    def inverse(self, a: Tensor) -> Tensor:
        return -a % self.order


class Symmetric(Group):
    """S_n: the permutations of range(n) in lexicographic order, with (p q)(k) = p[q[k]].

    Read as numbers in base n, p[0] the most significant digit, permutations keep their lexicographic order:
    a binary search among these sorted keys is the rank.
    """

    def __init__(self, n: int) -> None:
        self.name, self.n = f"S{n}", n
        self.permutations = self._list(n)
        self.order = len(self.permutations)
        self._radix = n ** torch.arange(n - 1, -1, -1)
        self._keys = self.permutations @ self._radix

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        p_starts, q = a[..., None] * self.n, self.permutations[b]
        return self._rank(self.permutations.take(p_starts + q))

    def inverse(self, a: Tensor) -> Tensor:
        return self._rank(self.permutations[a].argsort(-1))

    def _list(self, n: int) -> Tensor:
        """Return the elements in order, shape (order, n)."""
        return torch.tensor(list(itertools.permutations(range(n))))

    def _rank(self, p: Tensor) -> Tensor:
        """Return the index of each permutation; p: (..., n), result (...)."""
        return torch.searchsorted(self._keys, (p * self._radix).sum(-1))


class Alternating(Symmetric):
    """A_n: the even permutations of range(n) in lexicographic order, multiplied as in S_n."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.name = f"A{n}"

    def _list(self, n: int) -> Tensor:
        p = super()._list(n)
        inversions = (p[:, :, None] > p[:, None, :]).triu(1).sum((1, 2))
        return p[inversions % 2 == 0]


class DirectProduct(Group):
    """G_1 x ... x G_m, factor by factor; the index is in mixed radix, G_1 the most significant digit."""

    def __init__(self, factors: Sequence[Group]) -> None:
        self.factors = tuple(factors)
        self.name = " x ".join(factor.name for factor in factors)
        self.order = math.prod(factor.order for factor in factors)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        pairs = zip(self.factors, self._digits(a), self._digits(b), strict=True)
        return self._index(factor.multiply(x, y) for factor, x, y in pairs)

    def inverse(self, a: Tensor) -> Tensor:
        return self._index(factor.inverse(x) for factor, x in zip(self.factors, self._digits(a), strict=True))

    def _digits(self, index: Tensor) -> list[Tensor]:
        digits = []
        for factor in reversed(self.factors):
            digits.append(index % factor.order)
            index = index // factor.order
        return digits[::-1]

    def _index(self, digits: Iterable[Tensor]) -> Tensor:
        index = torch.zeros((), dtype=torch.long)
        for factor, digit in zip(self.factors, digits, strict=True):
            index = index * factor.order + digit
        return index


class Tabulated(Group):
    """The same group read from its composition table; `table` (order, order) in the smallest integer type."""

    def __init__(self, group: Group) -> None:
        self.name, self.order = group.name, group.order
        elements = torch.arange(group.order)
        dtype = _smallest_integer(group.order - 1)
        blocks = elements[:, None].chunk(math.ceil(group.order**2 / TABLE_BLOCK))
        self.table = torch.cat([group.multiply(rows, elements).to(dtype) for rows in blocks])
        self.inverses = group.inverse(elements)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        return self.table[a, b].long()

    def inverse(self, a: Tensor) -> Tensor:
        return self.inverses[a]


def parse_group(text: str, table_limit: int = 1024) -> Group:
    """Read a direct product of S<n>, A<n> and Z<n>, e.g. 'S5', 'Z60', 'A4 x Z5'.

    Factors are joined by 'x', '*' or '×'; neither case nor the spaces around factors matter. The product, and
    each of its factors, multiplies through a table if it has at most `table_limit` elements; otherwise it
    composes them.

    Raises UserError when the text is not of this form, or the order is 1 or above MAX_ORDER; the order is
    known before anything is built.
    """
    factors = [_parse_factor(part.strip(), text) for part in _SEPARATOR.split(text)]
    _check_order(factors)
    groups = [_tabulated(factor.build(), table_limit) for factor in factors]
    return groups[0] if len(groups) == 1 else _tabulated(DirectProduct(groups), table_limit)


class _Factor(NamedTuple):
    """A factor as it was written, not yet built: `kind` is 'S', 'A' or 'Z'."""

    kind: str
    n: int

    @property
    def order(self) -> int:
        if self.kind == "Z":
            return self.n
        return math.factorial(self.n) if self.kind == "S" else max(1, math.factorial(self.n) // 2)

    @property
    def log10_order(self) -> float:
        """Roughly log10 of the order, at no cost even where n! is out of reach."""
        if self.kind == "Z":
            return math.log10(self.n)
        return (math.lgamma(self.n + 1) - math.log(2) * (self.kind == "A")) / math.log(10)

    def build(self) -> Group:
        return {"S": Symmetric, "A": Alternating, "Z": Cyclic}[self.kind](self.n)


def _parse_factor(part: str, text: str) -> _Factor:
    match = _FACTOR.fullmatch(part)
    if match is None or int(match[2]) == 0:
        problem = f"{part!r} is not a factor" if part else "a factor is missing"
        raise UserError(
            f"cannot read the group {text!r}: {problem}; "
            "write S<n>, A<n> or Z<n> with n >= 1, joined by 'x', for example 'S5', 'Z60' or 'A4 x Z5'"
        )
    return _Factor(match[1].upper(), int(match[2]))


def _check_order(factors: Sequence[_Factor]) -> None:
    """Raise UserError unless 1 < order <= MAX_ORDER."""
    name = " x ".join(f"{factor.kind}{factor.n}" for factor in factors)
    magnitude = sum(factor.log10_order for factor in factors)
    if magnitude > 15:
        raise _too_large(name, f"about 10^{magnitude:.0f}")
    order = math.prod(factor.order for factor in factors)
    if order > MAX_ORDER:
        raise _too_large(name, str(order))
    if order == 1:
        raise UserError(
            f"the group {name!r} has one element; there is nothing to track; "
            "choose one with at least two, for example 'Z2', 'A4 x Z5' or 'S5'"
        )


def _too_large(name: str, order: str) -> UserError:
    return UserError(
        f"the group {name!r} has {order} elements, above the limit of {MAX_ORDER}; "
        "each is a vocabulary entry, so choose a smaller group, for example 'A5', 'S5' or 'A4 x Z5'"
    )


def _tabulated(group: Group, table_limit: int) -> Group:
    return Tabulated(group) if group.order <= table_limit else group


def _smallest_integer(largest: int) -> torch.dtype:
    return next(t for t in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(t).max)
