"""A reduction runs over all of its dims, whatever part of its result is used, and never over its reader's."""

from unittest import mock

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.evaluate import evaluate as evaluate_plan
from mpmd.compile.kernels.planner import NoPlan
from mpmd.compile.kernels.planner.elements import Trace
from mpmd.compile.kernels.planner.groups import plan_group
from mpmd.compile.kernels.planner.planned_kernel import plan_members
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.reference_runs import run_module as run_reference

COMPUTATIONS = "".join(
    f"{op} {{ p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT o = f32[] {op}(p, q) }}\n"
    for op in ("add", "maximum")
)


def module_of(body: str):
    return parse_module(f"HloModule m\n{COMPUTATIONS}ENTRY e {{\n{body}\n}}")


ROWS = """
  x = f32[6,32] parameter(0)
  zero = f32[] constant(0)
  s = f32[6] reduce(x, zero), dimensions={1}, to_apply=add
"""
PARTS = {
    "pad": ROWS + """
  wide = f32[6,29] broadcast(s), dimensions={0}
  part = f32[6,32] pad(wide, zero), padding=0_0x1_2
  ROOT y = f32[6,32] subtract(x, part)""",
    "interior-pad": ROWS + """
  wide = f32[6,16] broadcast(s), dimensions={0}
  part = f32[6,32] pad(wide, zero), padding=0_0x1_0_1
  ROOT y = f32[6,32] subtract(x, part)""",
    "concatenate": ROWS + """
  wide = f32[6,16] broadcast(s), dimensions={0}
  half = f32[6,16] slice(x), slice={[0:6], [16:32]}
  part = f32[6,32] concatenate(wide, half), dimensions={1}
  ROOT y = f32[6,32] subtract(x, part)""",
    "update": ROWS + """
  at = s32[] parameter(1)
  none = s32[] constant(0)
  wide = f32[6,5] broadcast(s), dimensions={0}
  part = f32[6,32] dynamic-update-slice(x, wide, none, at)
  ROOT y = f32[6,32] add(x, part)""",
    "rows-of-a-pad": ROWS + """
  wide = f32[6,32] broadcast(s), dimensions={0}
  top = f32[4,32] slice(wide), slice={[1:5], [0:32]}
  part = f32[6,32] pad(top, zero), padding=1_1x0_0
  ROOT y = f32[6,32] subtract(x, part)""",
    "columns": """
  x = f32[6,32] parameter(0)
  low = f32[] constant(-inf)
  zero = f32[] constant(0)
  m = f32[32] reduce(x, low), dimensions={0}, to_apply=maximum
  n = f32[32] negate(m)
  r = f32[30] slice(n), slice={[1:31]}
  p = f32[32] pad(r, zero), padding=1_1
  ROOT y = (f32[32], f32[32]) tuple(m, p)""",
    "product": """
  a = s32[4,8] parameter(0)
  b = s32[8,8] parameter(1)
  d = s32[4,8] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  zero = s32[] constant(0)
  half = s32[4,6] slice(d), slice={[0:4], [1:7]}
  ROOT y = s32[4,8] pad(half, zero), padding=0_0x1_1""",
}  # fmt: skip


def arguments_of(module):
    rng = np.random.default_rng(0)
    return [
        np.asarray(rng.integers(-4, 5, p.shape.dims), p.shape.numpy_dtype) for p in module.entry.parameters
    ]


def check(module):
    arguments = arguments_of(module)
    wanted = evaluate(module, arguments)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for found in (run_module(module, arguments), run_reference(module, [arguments])[0]):
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def whole(module):
    """The kernel of all instructions of a program."""
    root = module.entry.root
    group = [i for i in module.entry.post_order() if i.opcode not in ("parameter", "tuple")]
    return plan_members("all", group, root.operands if root.opcode == "tuple" else [root])


@pytest.mark.parametrize("part", PARTS)
def test_a_reduction_whose_result_is_used_in_a_part_is_over_the_whole(part):
    check(module_of(PARTS[part]))


@pytest.mark.parametrize("part", [p for p in PARTS if p not in ("columns", "product")])
def test_such_a_reduction_is_one_kernel_with_its_reader(part):
    assert "reduce" in whole(module_of(PARTS[part])).plan.text()


@pytest.mark.parametrize("part", ["pad", "interior-pad", "concatenate", "update"])
def test_no_plan_reduces_what_its_guard_leaves_out(part):
    """Should a rule hand its reader's guard to what it reduces, then there is no such plan."""
    with (
        mock.patch.object(Trace, "reduced", lambda trace, at, where, dims: where),
        pytest.raises(NoPlan, match=r"of p0 is needed where its guard %[0-9]+ is false"),
    ):
        whole(module_of(PARTS[part]))


def test_a_condition_on_reduced_and_other_dims_has_no_kernel():
    """Element (i, j) of the result is one of the sums where 8 i + j is below 20."""
    module = module_of("""
  x = f32[4,8] parameter(0)
  zero = f32[] constant(0)
  s = f32[4] reduce(x, zero), dimensions={1}, to_apply=add
  wide = f32[4,8] broadcast(s), dimensions={0}
  flat = f32[32] reshape(wide)
  begin = f32[20] slice(flat), slice={[0:20]}
  long = f32[32] pad(begin, zero), padding=0_12
  part = f32[4,8] reshape(long)
  ROOT y = f32[4,8] subtract(x, part)""")
    with pytest.raises(NoPlan, match="a reduction that exists in a part of its own dims"):
        whole(module)
    check(module)


WINDOWS = {
    "strides": ("f32[7]", "f32[4]", "{size=4}", "f32[]", "{0}"),
    "apart": ("f32[4]", "f32[2]", "{size=2 stride=2}", "f32[]", "{0}"),
    "between-ones": ("f32[1,9,1]", "f32[1,3,1]", "{size=1x3x1 stride=1x3x1}", "f32[]", "{0,1,2}"),
    "padded": ("f32[4]", "f32[4]", "{size=4 pad=3_0}", "f32[]", "{0}"),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_as_many_as_one_is_long_are_not_its_elements(window):
    x, y, sizes, z, gone = WINDOWS[window]
    module = module_of(f"""
  x = {x} parameter(0)
  low = f32[] constant(-inf)
  zero = f32[] constant(0)
  y = {y} reduce-window(x, low), window={sizes}, to_apply=maximum
  ROOT z = {z} reduce(y, zero), dimensions={gone}, to_apply=add""")
    check(module)
    with pytest.raises(NoPlan, match="a reduction inside of another one over the same dims"):
        whole(module)


def test_products_as_many_as_one_has_terms_are_not_its_terms():
    module = module_of("""
  a = f32[5,8] parameter(0)
  b = f32[8,8] parameter(1)
  low = f32[] constant(-inf)
  d = f32[5,8] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT m = f32[5] reduce(d, low), dimensions={1}, to_apply=maximum""")
    check(module)
    group = [i for i in module.entry.post_order() if i.opcode != "parameter"]
    with pytest.raises(NoPlan, match="a reduction inside of another one over the same dims"):
        plan_group("all", group, [module.entry.root])


def test_a_place_that_is_the_sum_of_as_many_numbers_as_an_update_has_is_known_before_it():
    """One loop over four elements cannot add up where the first of them goes."""
    check(
        module_of("""
  x = f32[16] parameter(0)
  u = f32[4] parameter(1)
  i = f32[4] parameter(2)
  zero = f32[] constant(0)
  s = f32[] reduce(i, zero), dimensions={0}, to_apply=add
  n = f32[4] negate(u)
  at = s32[] convert(s)
  ROOT d = f32[16] dynamic-update-slice(x, n, at)""")
    )


def test_products_of_f16_are_not_infinite_inside_of_a_sum():
    """Sums over dims that are not contiguous are a reduction."""
    module = module_of("""
  a = f16[2,3,4] parameter(0)
  b = f16[4,2,5] parameter(1)
  ROOT d = f16[3,5] dot(a, b), lhs_contracting_dims={0,2}, rhs_contracting_dims={1,0}""")
    made = whole(module)
    a, b, d = np.full((2, 12), 300, np.float16), np.full(40, 300, np.float16), np.empty(15, np.float16)
    a[1] = -300
    evaluate_plan(made.plan, [a, b, d])
    np.testing.assert_array_equal(d, 0)


def test_one_element_of_a_piece_is_read():
    """The last one of the first piece, the first one of the third; nothing where no position is."""
    made = whole(
        module_of("""
  x = f32[5] parameter(0)
  y = f32[4] parameter(1)
  z = f32[6] parameter(2)
  w = f32[7] parameter(3)
  c = f32[22] concatenate(x, y, z, w), dimensions={0}
  s = f32[6] slice(c), slice={[4:10]}
  ROOT n = f32[6] negate(s)""")
    )
    arrays = [np.arange(5), np.arange(10, 14), np.arange(20, 26), np.zeros(6)]
    assert len(made.plan.operands) == len(arrays)
    found = [a.astype(np.float32) for a in arrays]
    evaluate_plan(made.plan, [*(found["xyz".index(a.name)] for a in made.arrays), found[3]])
    np.testing.assert_array_equal(found[3], [-4, -10, -11, -12, -13, -20])
