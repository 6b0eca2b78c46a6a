"""What makes a group of instructions one kernel, and why others are none."""

import numpy as np

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.kernel_plan import Load
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.groups import GroupPlan
from mpmd.compile.passes.fusion.grouping import Grouping
from tests.support.directed.kernels import planned_differences
from tests.support.random_hlo.draft import Case

SUM = """
sum {
  p = f32[] parameter(0)
  q = f32[] parameter(1)
  ROOT s = f32[] add(p, q)
}
"""


def planned(entry: str, members: str) -> GroupPlan | DotPlan | str:
    """The kernel of some instructions of a program, or why they are none."""
    grouping = Grouping(parse_module(f"HloModule m\n{SUM}\nENTRY e {{\n{entry}\n}}\n").entry)
    return grouping.plan([i for i in grouping.order if i.name in members.split()])


def test_a_value_that_is_needed_at_two_places_is_not_computed_twice():
    entry = """
  x = f32[6,4] parameter(0)
  a = f32[6,4] tanh(x)
  b = f32[4,6] transpose(a), dimensions={1,0}
  c = f32[6,4] reshape(b)
  ROOT d = f32[6,4] add(a, c)"""
    assert planned(entry, "a d") == "a would be computed 2 times"


def test_results_are_written_exactly_once():
    entry = """
  x = f32[24] parameter(0)
  v = f32[4] parameter(1)
  w = f32[4] exponential(v)
  wide = f32[6,4] broadcast(w), dimensions={1}
  flat = f32[24] reshape(wide)
  y = f32[24] multiply(x, flat)
  ROOT r = (f32[4], f32[24]) tuple(w, y)"""
    assert planned(entry, "w y") == "w would not be written exactly once"


def test_results_of_a_loop_have_one_size():
    entry = """
  x = f32[6,4] parameter(0)
  v = f32[4] parameter(1)
  w = f32[4] exponential(v)
  wide = f32[6,4] broadcast(w), dimensions={1}
  y = f32[6,4] multiply(x, wide)
  ROOT r = (f32[4], f32[6,4]) tuple(w, y)"""
    assert planned(entry, "w y") == "a loop whose results have different sizes"


def test_the_largest_reduction_makes_the_space():
    entry = """
  x = f32[6,4] parameter(0)
  v = f32[4] parameter(1)
  zero = f32[] constant(0)
  small = f32[] reduce(v, zero), dimensions={0}, to_apply=sum
  wide = f32[6,4] broadcast(small), dimensions={}
  y = f32[6,4] multiply(x, wide)
  ROOT large = f32[6] reduce(y, zero), dimensions={1}, to_apply=sum"""
    made = planned(entry, "small y large")
    assert isinstance(made, GroupPlan)
    assert (made.plan.extents, made.plan.row_dims) == ((6, 4), 1)


def test_values_are_traced_once_however_often_they_are_read():
    """A chain of doublings has two to the sixty paths from its end to its begin."""
    lines = ["x0 = f32[8] parameter(0)"]
    lines += [f"{'ROOT ' * (k == 60)}x{k} = f32[8] add(x{k - 1}, x{k - 1})" for k in range(1, 61)]
    made = planned("\n".join(lines), " ".join(f"x{k}" for k in range(1, 61)))
    assert isinstance(made, GroupPlan) and len(made.plan.nodes) == 61


def test_a_mask_on_both_sides_of_a_transpose_does_not_move_the_sums():
    entry = """
  a = f32[4,4] parameter(0)
  b = f32[4,4] parameter(1)
  c = f32[4,4] parameter(2)
  k = pred[4,4] parameter(3)
  zero = f32[] constant(0)
  zeros = f32[4,4] broadcast(zero), dimensions={}
  d = f32[4,4] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  s = f32[4,4] select(k, zeros, d)
  t = f32[4,4] transpose(s), dimensions={1,0}
  m = f32[4,4] multiply(t, c)
  ROOT r = f32[4,4] select(k, zeros, m)"""
    made = planned(entry, "zeros d s t m r")
    assert isinstance(made, DotPlan)
    sums, (result,) = made.plan.sums, made.plan.epilogue.stores
    (read,) = (n for n in made.plan.epilogue.nodes if isinstance(n, Load) and n.operand == sums)
    assert str(read.index) == "d0*4 + d1"
    assert str(result.index) == "d0 + d1*4"


def test_dims_of_a_broadcast_may_be_in_any_order():
    module = parse_module("""HloModule m
fused {
  x = f32[8,17] parameter(0)
  s = f32[8,2] slice(x), slice={[0:8], [14:17:2]}
  t = f32[2,8] transpose(s), dimensions={1,0}
  b = f32[8,2,1] broadcast(t), dimensions={1,0}
  ROOT r = (f32[8,2], f32[8,2,1]) tuple(s, b)
}
ENTRY e {
  x = f32[8,17] parameter(0)
  ROOT f = (f32[8,2], f32[8,2,1]) fusion(x), kind=kLoop, calls=fused
}
""")
    case = Case("broadcast", module, [np.arange(136, dtype=np.float32).reshape(8, 17)])
    assert planned_differences(case) == ""
