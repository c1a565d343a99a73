"""Every option of every solver has a row in the test that it changes what it says (CASES.md 3)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import test_anderson
import test_lagged
import test_picard
import test_sequential

from fpexp.config.schema import settings_of
from fpexp.fixed_point import Anderson, Lagged, Picard, Sequential


@pytest.mark.parametrize(
    ("solver", "module"),
    [(Anderson, test_anderson), (Lagged, test_lagged), (Picard, test_picard), (Sequential, test_sequential)],
    ids=lambda value: value.__name__,
)
def test_no_option_is_left_out(solver: type, module: ModuleType) -> None:
    """A backend computes the same."""
    (mark,) = module.test_every_option_changes_what_it_says.pytestmark
    rows: list[Any] = mark.args[1]
    tried = {name for row in rows for options in row if isinstance(options, dict) for name in options}
    assert tried - {"training"} == set(settings_of(solver)) - {"backend"}
