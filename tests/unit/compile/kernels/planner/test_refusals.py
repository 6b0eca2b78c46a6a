"""What no kernel computes, because its plan would compute something else."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.evaluate import evaluate as evaluate_plan
from mpmd.compile.kernels.planner import NoPlan
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.planned_kernel import plan_members
from mpmd.compile.kernels.planner.sorting import plan_sort_prefix

COMPUTATIONS = """
add { p = f32[] parameter(0)
 q = f32[] parameter(1)
 ROOT o = f32[] add(p, q) }
twice { p = f32[] parameter(0)
 q = f32[] parameter(1)
 ROOT o = f32[] add(q, q) }
less { p = f32[] parameter(0)
 q = f32[] parameter(1)
 n = f32[] negate(q)
 ROOT o = f32[] add(p, n) }
old { p = f32[] parameter(0)
 ROOT q = f32[] parameter(1) }
kept { q = f32[] parameter(1)
 ROOT p = f32[] parameter(0) }
lower { p = f32[] parameter(0)
 q = f32[] parameter(1)
 ROOT o = pred[] compare(p, q), direction=LT }
add_f16 { p = f16[] parameter(0)
 q = f16[] parameter(1)
 ROOT o = f16[] add(p, q) }
add_s4 { p = s4[] parameter(0)
 q = s4[] parameter(1)
 ROOT o = s4[] add(p, q) }
"""


def parts(body: str):
    """All instructions of a program, and its results."""
    entry = parse_module(f"HloModule m\n{COMPUTATIONS}ENTRY e {{\n{body}\n}}").entry
    group = [i for i in entry.post_order() if i.opcode not in ("parameter", "tuple")]
    return group, entry.root.operands if entry.root.opcode == "tuple" else [entry.root]


def whole(body: str):
    return plan_members("all", *parts(body))


X = "x = f32[6,4] parameter(0)\n zero = f32[] constant(0)\n"
REFUSED = {
    "a reducer of one of its values": (
        X + "ROOT r = f32[6] reduce(x, zero), dimensions={1}, to_apply=twice",
        "no kernel reduces by twice",
    ),
    "a reducer that does more": (
        X + "ROOT r = f32[6] reduce(x, zero), dimensions={1}, to_apply=less",
        "no kernel reduces by less",
    ),
    "a scatter that keeps the old value": (
        X + "i = s32[2,1] parameter(1)\n u = f32[2,4] parameter(2)\n ROOT r = f32[6,4] scatter(x, i, u), "
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, "
        "index_vector_dim=1, to_apply=kept",
        "no kernel reduces by kept",
    ),
    "a scatter that adds up four bits": (
        "x = s4[6] parameter(0)\n i = s32[2,1] parameter(1)\n u = s4[2] parameter(2)\n"
        "ROOT r = s4[6] scatter(x, i, u), update_window_dims={}, inserted_window_dims={0}, "
        "scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=add_s4",
        "no kernel combines s4 by add",
    ),
    "an order of all floats": (
        X + "ROOT c = pred[6,4] compare(x, x), direction=LT, type=TOTALORDER",
        "no kernel compares floats in total order",
    ),
    "a count of truths": ("ROOT i = pred[6] iota(), iota_dimension=0", "no kernel counts in pred"),
    "half of an element": (
        "x = s32[6] parameter(0)\n ROOT b = s16[6,2] bitcast-convert(x)",
        r"no kernel reinterprets s32\[6\]",
    ),
    "another type of the same memory": (
        "x = s32[6] parameter(0)\n ROOT b = f32[6] bitcast(x)",
        "b changes the element type without converting",
    ),
    "an update of a computed array": (
        X + "u = f32[2,4] parameter(1)\n i = s32[] parameter(2)\n n = f32[6,4] negate(x)\n"
        "ROOT d = f32[6,4] dynamic-update-slice(n, u, i, i)",
        "d changes n, which is computed in the same group",
    ),
    "an update with what lies elsewhere": (
        X + "i = s32[] parameter(1)\n s = f32[2,4] slice(x), slice={[3:5], [0:4]}\n"
        "ROOT d = f32[6,4] dynamic-update-slice(x, s, i, i)",
        "d reads elsewhere in the array that it changes",
    ),
    "an update beside another result": (
        X + "u = f32[2,4] parameter(1)\n i = s32[] parameter(2)\n n = f32[6,4] negate(x)\n"
        "d = f32[6,4] dynamic-update-slice(x, u, i, i)\n ROOT t = (f32[6,4], f32[6,4]) tuple(d, n)",
        "d changes an array beside other results",
    ),
    "a product and its factor": (
        "x = f32[4,4] parameter(0)\n y = f32[4,4] parameter(1)\n"
        "t = f32[4,4] transpose(x), dimensions={1,0}\n "
        "d = f32[4,4] dot(t, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "ROOT r = f32[4,4] add(d, t)",
        "the epilogue of d reads inner values of its factors",
    ),
    "a product and its transpose": (
        "x = f32[4,4] parameter(0)\n y = f32[4,4] parameter(1)\n"
        "d = f32[4,4] dot(x, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "t = f32[4,4] transpose(d), dimensions={1,0}\n ROOT r = f32[4,4] add(d, t)",
        "d is read at another place than the one where it is summed",
    ),
    "a factor in steps that differ": (
        "x = f32[4,6] parameter(0)\n y = f32[3,5] parameter(1)\n"
        "t = f32[6,4] transpose(x), dimensions={1,0}\n f = f32[8,3] reshape(t)\n"
        "n = f32[8,5] dot(f, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "ROOT r = f32[8,5] negate(n)",
        "which are not equal steps",
    ),
    "a factor that is rounded": (
        "x = f32[4,6] parameter(0)\n y = bf16[6,5] parameter(1)\n c = bf16[4,6] convert(x)\n"
        "d = bf16[4,5] dot(c, y), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "ROOT r = bf16[4,5] negate(d)",
        "factor c is computed by convert",
    ),
    "products whose sums differ": (
        "a = s32[4,8] parameter(0)\n b = s32[8,3] parameter(1)\n c = s32[4,8,2] parameter(2)\n"
        "e = s32[8,2,3] parameter(3)\n"
        "d = s32[4,3] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
        "f = s32[4,3] dot(c, e), lhs_contracting_dims={1,2}, rhs_contracting_dims={0,1}\n"
        "ROOT r = s32[4,3] add(d, f)",
        "a product summed over other dims than the kernel's row",
    ),
    "rows of other lengths": (
        X + "y = f32[6,2] parameter(1)\n r = f32[6] reduce(x, zero), dimensions={1}, to_apply=add\n"
        "s = f32[6] reduce(y, zero), dimensions={1}, to_apply=add\n ROOT t = f32[6] add(r, s)",
        "a reduction over other dims than those of the kernel",
    ),
    "windows of other sizes": (
        "x = f32[7] parameter(0)\n zero = f32[] constant(0)\n"
        "a = f32[4] reduce-window(x, zero), window={size=4}, to_apply=add\n"
        "b = f32[4] reduce-window(x, zero), window={size=2 stride=2 pad=0_1}, to_apply=add\n"
        "ROOT c = f32[4] add(a, b)",
        "a window other than the kernel's row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_no_kernel_computes(what):
    body, reason = REFUSED[what]
    with pytest.raises(NoPlan, match=reason):
        whole(body)


@pytest.mark.parametrize("start, taken", [(0, 3), (1, 3)])
def test_the_beginning_of_a_sorted_array_is_a_kernel_and_no_other_part(start, taken):
    group, results = parts(f"""
  x = f32[8] parameter(0)
  s = f32[8] sort(x), dimensions={{0}}, to_apply=lower
  ROOT r = f32[{taken}] slice(s), slice={{[{start}:{start + taken}]}}""")
    if start:
        with pytest.raises(NoPlan, match="r is not the beginning of a sorted array"):
            plan_sort_prefix("s", group, results)
        return
    plan, _ = plan_sort_prefix("s", group, results)
    found = np.zeros(taken, np.float32)
    evaluate_plan(plan, [np.array([5, 1, 4, 8, 2, 7, 3, 6], np.float32), found])
    np.testing.assert_array_equal(found, [1, 2, 3])


def test_an_initial_value_that_changes_the_result_is_joined_with_it():
    made = whole(
        "x = f32[2,4] parameter(0)\n five = f32[] constant(5)\n"
        "ROOT r = f32[2] reduce(x, five), dimensions={1}, to_apply=add"
    )
    found = np.zeros(2, np.float32)
    evaluate_plan(made.plan, [np.ones(8, np.float32), found])
    np.testing.assert_array_equal(found, [9, 9])


def test_a_sum_of_f16_over_rows_and_columns_is_rounded_once():
    made = whole(
        "x = f16[3,2049] parameter(0)\n zero = f16[] constant(0)\n"
        "ROOT r = f16[] reduce(x, zero), dimensions={0,1}, to_apply=add_f16"
    )
    found = np.zeros(1, np.float16)
    evaluate_plan(made.plan, [np.ones(3 * 2049, np.float16), found])
    assert found[0] == np.float16(3 * 2049)


@pytest.mark.parametrize("dtype", ["s8", "u8"])
@pytest.mark.parametrize("start", [-3, 100, 127])
def test_the_last_place_of_a_slice_may_be_larger_than_its_type(dtype, start):
    if dtype == "u8" and start < 0:
        start = 253
    made = whole(
        f"x = f32[300] parameter(0)\n i = {dtype}[] parameter(1)\n"
        "d = f32[4] dynamic-slice(x, i), dynamic_slice_sizes={4}\n ROOT n = f32[4] negate(d)"
    )
    at = np.array([start], np.int8 if dtype == "s8" else np.uint8)
    given, found = {"x": np.arange(300, dtype=np.float32), "i": at}, np.zeros(4, np.float32)
    evaluate_plan(made.plan, [*(given[a.name] for a in made.arrays), found])
    np.testing.assert_array_equal(found, -(np.arange(4) + max(start, 0)))


@pytest.mark.parametrize("k", ["{0,2}", "{1,2}"])
def test_sums_are_one_loop_only_where_both_factors_move_as_one(k):
    shape, free = ("f32[2,3,4]", 3) if k == "{0,2}" else ("f32[3,2,4]", 3)
    made = whole(
        f"a = {shape} parameter(0)\n b = f32[2,4,5] parameter(1)\n"
        f"ROOT d = f32[{free},5] dot(a, b), lhs_contracting_dims={k}, rhs_contracting_dims={{0,1}}"
    )
    assert isinstance(made, DotPlan) == (k == "{1,2}")
