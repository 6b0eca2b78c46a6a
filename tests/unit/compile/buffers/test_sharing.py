"""Which values take each other's memory: changes in place, loops and branches, and what is read last."""

from mpmd.compile.buffers.assignment import assign_buffers
from mpmd.compile.buffers.sharing import pair_donations
from mpmd.compile.hlo import parse_module
from tests.support.assignment_check import check_assignment
from tests.support.scheduled_loop import LOOP


def placed(text, shares=False):
    """Each instruction's memory, by name; kernels say whether results may be written over operands."""
    module = parse_module(f"HloModule m, is_scheduled=true\n{text}")
    assignment = assign_buffers(module, lambda instruction, operand, result: shares)
    check_assignment(assignment, lambda instruction, operand, result: shares)
    return lambda name, index=(): assignment.at(
        next(i for c in module.computations for i in c if i.name == name), index
    )


UPDATE = """
ENTRY main {
  x = f32[1000] parameter(0)
  u = f32[10] parameter(1)
  i = s32[] parameter(2)
  a = f32[1000] negate(x)
  b = f32[1000] dynamic-update-slice(a, u, i)
  c = f32[1000] cosine(LAST)
  ROOT r = f32[1000] sine(c)
}
"""


def test_what_is_changed_lies_where_it_lay_unless_it_is_read_again():
    at = placed(UPDATE.replace("LAST", "b"))
    assert at("a") == at("b")
    at = placed(UPDATE.replace("cosine(LAST)", "add(a, b)"))
    assert not at("a").overlaps(at("b"))


def test_a_loops_state_begins_goes_on_and_ends_in_one_place():
    at = placed(LOOP.replace("BODY", "sine(a)"))
    assert at("q") == at("l", (1,)) == at("b")
    assert not at("a").overlaps(at("b"))


def test_a_state_that_is_read_while_the_next_is_made_is_another_array():
    at = placed(LOOP.replace("BODY", "add(a, x)"))
    assert at("q") == at("l", (1,)) and not at("l", (1,)).overlaps(at("b"))


def test_branches_write_where_their_result_is():
    at = placed(
        """
one {
  a = f32[1000] parameter(0)
  s = f32[1000] sine(a)
  ROOT t = f32[1000] tanh(s)
}
other {
  b = f32[1000] parameter(0)
  ROOT v = f32[1000] cosine(b)
}
ENTRY main {
  which = s32[] parameter(0)
  p = f32[1000] parameter(1)
  q = f32[1000] exponential(p)
  c = f32[1000] conditional(which, q, q), branch_computations={one, other}
  ROOT r = f32[1000] negate(c)
}
"""
    )
    assert at("t") == at("c") == at("v")


LAST_READ = """
ENTRY main {
  x = f32[1000] parameter(0)
  a = f32[1000] negate(x)
  b = f32[1000] cosine(a)
  c = f32[1000] sine(b)
  ROOT r = f32[1000] tanh(c)
}
"""


def test_a_result_is_written_over_what_is_read_last_if_its_kernel_may():
    at = placed(LAST_READ, shares=True)
    assert at("a") == at("b") == at("c")
    at = placed(LAST_READ)
    assert not at("a").overlaps(at("b")) and not at("b").overlaps(at("c"))


def test_a_donated_parameter_becomes_the_result_that_is_computed_over_it():
    module = parse_module(
        "HloModule m\nENTRY e {\n  a = f32[4]{0} parameter(0)\n  b = f32[4]{0} parameter(1)\n"
        "  x = f32[4]{0} negate(b)\n  y = f32[4]{0} negate(a)\n  ROOT t = tuple(x, y)\n}\n"
    )
    over = pair_donations(module, (0, 1), lambda made, operand, number: True)
    in_order = pair_donations(module, (0, 1), lambda made, operand, number: False)
    assert [(pair.output_index, pair.parameter) for pair in over] == [((0,), 1), ((1,), 0)]
    assert [(pair.output_index, pair.parameter) for pair in in_order] == [((0,), 0), ((1,), 1)]


def test_a_result_is_written_where_it_must_end_rather_than_over_another_array():
    module = parse_module(
        "HloModule m, is_scheduled=true\nENTRY e {\n"
        "  a = f32[4]{0} parameter(0)\n  b = f32[4]{0} parameter(1)\n"
        "  t = f32[4]{0} negate(b)\n  x = f32[4]{0} add(t, a)\n  ROOT r = tuple(x)\n}\n"
    )
    shares = lambda made, operand, number: made.name == "x"  # noqa: E731
    module.input_output_alias = pair_donations(module, (0,), shares)
    assignment = assign_buffers(module, shares)
    check_assignment(assignment, shares)
    assert assignment.at(module.entry.root.operands[0]) == assignment.results[0]


def test_a_change_that_nothing_reads_leaves_an_array_that_is_read_later():
    at = placed(UPDATE.replace("LAST", "a"))
    assert not at("a").overlaps(at("b"))


UNREAD = """
ENTRY main {
  x = f32[1000] parameter(0)
  a = f32[1000] negate(x)
  b = f32[1000] cosine(a)
  c = f32[1000] add(a, a)
  ROOT r = f32[1000] sine(c)
}
"""


def test_a_result_that_nothing_reads_lies_over_no_operand_that_is_read_later():
    at = placed(UNREAD, shares=True)
    assert not at("a").overlaps(at("b"))


SELF = """
ENTRY main {
  x = f32[10] parameter(0)
  i = s32[] parameter(1)
  a = f32[10] negate(x)
  b = f32[10] dynamic-update-slice(a, a, i)
  ROOT r = f32[10] sine(b)
}
"""


def test_what_is_changed_by_itself_is_changed_in_a_copy():
    at = placed(SELF)
    assert not at("a").overlaps(at("b"))


BRANCHES = """
one {
  p = f32[1000] parameter(0)
  q = f32[1000] negate(p)
  ROOT s = (f32[1000], f32[1000]) tuple(q, p)
}

two {
  p = f32[1000] parameter(0)
  q = f32[1000] cosine(p)
  ROOT s = (f32[1000], f32[1000]) tuple(p, q)
}

ENTRY main {
  x = f32[1000] parameter(0)
  k = s32[] parameter(1)
  a = f32[1000] negate(x)
  c = (f32[1000], f32[1000]) conditional(k, a, a), branch_computations={one, two}
  u = f32[1000] get-tuple-element(c), index=0
  v = f32[1000] get-tuple-element(c), index=1
  ROOT r = f32[1000] add(u, v)
}
"""


def test_results_of_a_branch_are_copied_to_places_that_are_free_at_its_end():
    at = placed(BRANCHES)
    assert not at("c", (0,)).overlaps(at("c", (1,)))
