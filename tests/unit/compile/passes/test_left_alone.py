"""Programs that a pass must leave as they are: each lacks one thing that the rewrite needs."""

from __future__ import annotations

import pytest

from mpmd.compile.hlo import parse_module, print_module, verify
from mpmd.compile.passes import make_pass
from tests.support.left_alone import LEFT


@pytest.mark.parametrize("name", LEFT)
def test_a_pass_leaves_it_alone(name):
    pass_, text = LEFT[name]
    module = parse_module(text)
    verify(module)
    before = print_module(module)
    assert not make_pass(*pass_.split(" ", 1)).run(module), print_module(module)
    assert print_module(module) == before
