"""Instructions, computations, modules: both sides of every edge stay true under change."""

import pytest

from mpmd.compile.hlo import (
    HloBuilder,
    HloModule,
    array,
    fingerprint,
    parse_module,
    print_module,
    verify,
)
from mpmd.compile.hlo.builder import scalar_computation
from mpmd.errors import HloError

TEXT = """HloModule m

square {
  x = f32[4]{0} parameter(0)
  ROOT y = f32[4]{0} multiply(x, x)
}

ENTRY main {
  a = f32[4]{0} parameter(0)
  b = f32[4]{0} parameter(1)
  s = f32[4]{0} add(a, b)
  c = f32[4]{0} call(s), to_apply=square
  d = f32[4]{0} subtract(s, s)
  ROOT r = f32[4]{0} maximum(c, d)
}
"""


@pytest.fixture
def module():
    return parse_module(TEXT)


def named(module, name):
    return next(i for i in module.instructions() if i.name == name)


def test_users_count_operands(module):
    s, d = named(module, "s"), named(module, "d")
    assert {u.name: n for u, n in s.users.items()} == {"c": 1, "d": 2}
    d.replace_operand(1, named(module, "a"))
    assert s.users[d] == 1 and named(module, "a").users[d] == 1
    verify(module)


def test_replace_all_uses_moves_users_and_root(module):
    entry = module.entry
    r, c = entry.root, named(module, "c")
    r.replace_all_uses_with(c)
    assert entry.root is c
    entry.remove(r)
    entry.remove(named(module, "d"))
    verify(module)
    with pytest.raises(HloError, match=r"cannot replace c of shape f32\[4\]\{0\} by n"):
        c.replace_all_uses_with(HloBuilder(entry).add("compare", c, c, direction="EQ", name="n"))


def test_removal_needs_no_users(module):
    with pytest.raises(HloError, match="cannot remove s from main: c uses it"):
        module.entry.remove(named(module, "s"))
    with pytest.raises(HloError, match="cannot remove r from main: it is the root"):
        module.entry.remove(module.entry.root)


def test_callers_are_counted(module):
    square, c = module.computation("square"), named(module, "c")
    assert square.callers == {c: 1}
    with pytest.raises(HloError, match="cannot remove computation square: c calls it"):
        module.remove_computation(square)
    module.entry.replace(c, HloBuilder(module.entry).add("negate", named(module, "s")))
    assert not square.callers and module.remove_unreached() and not module.remove_unreached()
    verify(module)


def test_control_edges_order_and_vanish(module):
    d, c = named(module, "d"), named(module, "c")
    c.add_control_predecessor(d)
    order = module.entry.post_order()
    assert order.index(d) < order.index(c)
    assert "control-predecessors={d}" in print_module(module)
    assert fingerprint(parse_module(print_module(module))) == fingerprint(module)
    made = HloBuilder(module.entry).add("negate", named(module, "s"))
    module.entry.replace(d, made)
    assert c.control_predecessors == (made,)
    verify(module)


def test_a_control_edge_never_closes_a_cycle(module):
    s, c = named(module, "s"), named(module, "c")
    with pytest.raises(HloError, match="s cannot run after c, which depends on it"):
        s.add_control_predecessor(c)
    with pytest.raises(HloError, match="s cannot run after s"):
        s.add_control_predecessor(s)
    assert not s.has_control_edges and not c.has_control_edges


TWO_COPIES = """HloModule m
ENTRY main {
  a = u32[] parameter(0)
  b = u32[] parameter(1)
  n = u32[] not(a)
  m = u32[] not(b)
  c = u32[] copy(n), control-predecessors={m}
  d = u32[] copy(m), control-predecessors={n}
  ROOT t = (u32[], u32[]) tuple(d, c)
}
"""


def test_replacing_by_an_operand_orders_what_remains():
    module = parse_module(TWO_COPIES)
    n, m, t = (named(module, name) for name in "nmt")
    module.entry.replace(named(module, "c"), n)
    assert t.control_predecessors == (m,) and not n.control_predecessors
    module.entry.replace(named(module, "d"), m)
    verify(module)


def test_removal_keeps_the_order_of_its_neighbours(module):
    d, c = named(module, "d"), named(module, "c")
    between = HloBuilder(module.entry).add("negate", named(module, "s"))
    between.add_control_predecessor(d)
    c.add_control_predecessor(between)
    module.entry.remove(between)
    assert c.control_predecessors == (d,) and d.control_successors == (c,)
    verify(module)


def test_circles_are_found(module):
    s, d = named(module, "s"), named(module, "d")
    s.replace_operand(0, d)
    with pytest.raises(HloError, match="computation main: instructions depend on each other in a cycle"):
        module.entry.post_order()


def test_clone_is_independent(module):
    copy = module.clone()
    assert print_module(copy) == print_module(module)
    copy.entry.replace(copy.entry.root, next(i for i in copy.instructions() if i.name == "d"))
    verify(copy)
    assert print_module(module) == print_module(parse_module(TEXT))


def test_fingerprint_ignores_names_but_nothing_else(module):
    renamed = (
        TEXT.replace("square", "other").replace(" s ", " t ").replace("(s", "(t").replace(", s)", ", t)")
    )
    dead = TEXT.replace("ENTRY", "unused {\n  ROOT z = f32[] constant(1)\n}\n\nENTRY")
    assert fingerprint(parse_module(renamed)) == fingerprint(module) == fingerprint(parse_module(dead))
    for old, new in (
        ("subtract", "add"),
        ("maximum(c, d)", "maximum(d, c)"),
        ("multiply(x, x)", "add(x, x)"),
    ):
        assert fingerprint(parse_module(TEXT.replace(old, new))) != fingerprint(module)
    transposed = TEXT.replace("f32[4]", "f32[4,4]").replace("{0}", "{1,0}")
    other = transposed.replace("s = f32[4,4]{1,0}", "s = f32[4,4]{0,1}")
    assert fingerprint(parse_module(transposed)) != fingerprint(parse_module(other))


def test_inlining_by_copy_into(module):
    c = named(module, "c")
    callee = c.to_apply
    copies = callee.copy_into(module.entry, {callee.parameters[0]: c.operands[0]})
    module.entry.replace(c, copies[callee.root])
    module.remove_unreached()
    verify(module)
    assert [x.opcode for x in module.entry.post_order()].count("multiply") == 1


def test_reorder_takes_each_instruction_once(module):
    order = module.entry.post_order()
    module.entry.reorder(order[::-1])
    assert list(module.entry) == order[::-1]
    with pytest.raises(
        HloError, match="an order of computation main must name its 6 instructions once each; got 5"
    ):
        module.entry.reorder(order[1:])


def test_remove_parameter_renumbers():
    module = HloModule("m")
    builder = HloBuilder.create(module, "main")
    _, kept = builder.parameter(array("f32")), builder.parameter(array("s32"))
    module.set_entry(builder.build(kept))
    module.entry.remove_parameter(0)
    assert kept.parameter_number == 0 and len(module.entry.parameters) == 1


def test_call_order_finds_recursion():
    module = HloModule("m")
    first, second = HloBuilder.create(module, "first"), HloBuilder.create(module, "second")
    for builder in (first, second):
        builder.build(builder.parameter(array("f32")))
    first.build(first.call(second.computation, [first.computation.root]))
    second.build(second.call(first.computation, [second.computation.root]))
    module.set_entry(first.computation)
    with pytest.raises(HloError, match="computations call each other in a cycle through first"):
        module.call_order()


def test_side_effects_reach_through_calls():
    text = """HloModule m
f {
  ROOT t = f32[] custom-call(), custom_call_target="print", custom_call_has_side_effect=true
}
ENTRY e {
  c = f32[] call(), to_apply=f
  ROOT n = f32[] negate(c)
}"""
    module = parse_module(text)
    assert named(module, "c").has_side_effect and not module.entry.root.has_side_effect


def test_names_are_unique_across_computations_of_one_name():
    module = HloModule("m")
    made = [scalar_computation(module, "add", "f32").name for _ in range(3)]
    assert made == ["add_f32", "add_f32.1", "add_f32.2"]


def test_known_trip_count():
    text = """HloModule m
c {
  p = s32[] parameter(0)
  z = s32[] constant(4)
  ROOT l = pred[] compare(p, z), direction=LT
}
b {
  p = s32[] parameter(0)
  o = s32[] constant(1)
  ROOT n = s32[] add(p, o)
}
ENTRY e {
  i = s32[] constant(0)
  ROOT w = s32[] while(i), condition=c, body=b, backend_config={"known_trip_count":{"n":"4"}}
}"""
    module = parse_module(text)
    assert module.entry.root.known_trip_count == 4
    assert fingerprint(parse_module(print_module(module))) == fingerprint(module)
