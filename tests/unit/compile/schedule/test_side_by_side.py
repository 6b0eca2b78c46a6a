"""What is put side by side, and what stays where it is."""

import pytest

from mpmd.compile.hlo import parse_module, verify
from mpmd.compile.schedule.side_by_side import SideBySide

PROGRAM = """HloModule m, is_scheduled=true
ENTRY e {{
  p = f32[8] parameter(0)
  q = f32[8] parameter(1)
  u = f32[2] parameter(2)
  k = s32[] constant(3)
  a = f32[8] add(p, p)
  {first}
  x = f32[8] cosine(q)
  {between}
  {second}
  ROOT t = (f32[8], f32[8], f32[8]) tuple(n, c, {third})
}}"""


def order(**lines: str) -> tuple[list[str], bool]:
    """Names in the new order, and whether something moved."""
    module = parse_module(PROGRAM.format(**{"third": "b", **lines}))
    verify(module)
    changed = SideBySide().run(module)
    verify(module)
    return [i.name for i in module.entry], changed


ALIKE = {"first": "n = f32[8] negate(a)", "second": "c = f32[8] negate(x)"}
CALL = 'custom-call({}), custom_call_target="f"'
BITCAST = "b = f32[8] bitcast(a)"


def test_alike_work_is_put_together():
    names, changed = order(**ALIKE, between=BITCAST)
    assert changed and names.index("c") == names.index("n") + 1


@pytest.mark.parametrize(
    "between",
    [
        "b = f32[8] bitcast(a), control-predecessors={x}",
        "b = f32[8] constant({1, 2, 3, 4, 5, 6, 7, 8}), control-predecessors={x}",
    ],
    ids=["a view", "a constant"],
)
def test_an_order_is_kept(between):
    names, _ = order(**ALIKE, between=between)
    assert names.index("x") < names.index("b")


def test_a_reader_of_a_view_whose_place_is_fixed_stays_behind_it():
    names, _ = order(
        first="c = f32[8] negate(a)",
        between="b = f32[8] bitcast(a), control-predecessors={x}",
        second="n = f32[8] negate(b)",
    )
    assert names.index("b") < names.index("n")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("n = f32[8] negate(a), control-predecessors={p}", ALIKE["second"]),
        (ALIKE["first"], "c = f32[8] negate(x), control-predecessors={q}"),
        ("n = f32[8] sine(a)", ALIKE["second"]),
        ("n = f32[8] dynamic-update-slice(a, u, k)", "c = f32[8] dynamic-update-slice(x, u, k)"),
        (
            'n = f32[8] custom-call(a), custom_call_target="f"',
            'c = f32[8] custom-call(x), custom_call_target="f"',
        ),
    ],
    ids=["an order", "another order", "other work", "changes in place", "calls"],
)
def test_what_stays_where_it_is(first, second):
    _, changed = order(first=first, between=BITCAST, second=second)
    assert not changed


def test_what_needs_the_other_stays_behind_it():
    names, _ = order(
        first="n = f32[8] negate(a)", between="b = f32[8] bitcast(n)", second="c = f32[8] negate(b)"
    )
    assert names.index("n") < names.index("b") < names.index("c")
