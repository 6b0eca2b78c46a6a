"""What each device gets in a collective, and which collectives have no plan."""

from __future__ import annotations

import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.planner import NoPlan
from mpmd.compile.kernels.planner.collectives import plan_collective

_CALLED = "".join(
    f"{name} {{\n p = {dtype}[] parameter(0)\n q = {dtype}[] parameter(1)\n ROOT o = {dtype}[] {root}\n}}\n"
    for name, dtype, root in (
        ("sum", "bf16", "add(p, q)"),
        ("largest", "bf16", "maximum(p, q)"),
    )
)


def plan(root: str, header: str = "replica_count=4", dtype: str = "bf16"):
    text = f"HloModule m, {header}\n{_CALLED}ENTRY e {{\n x = {dtype}[4,6] parameter(0)\n ROOT r = {root}\n}}"
    return plan_collective("kernel", parse_module(text).entry.root)


def test_a_part_of_a_sum_goes_to_its_place_in_the_group():
    made = plan("bf16[2,6] reduce-scatter(x), replica_groups={{2,0},{1,3}}, dimensions={0}, to_apply=sum")
    assert made.sources == (((2, 1), (0, 1)), ((1, 0), (3, 0)), ((2, 0), (0, 0)), ((1, 1), (3, 1)))
    assert not made.may_share(0, 0)


def test_a_sum_of_narrow_floats_is_kept_in_wide_ones_and_a_maximum_is_not():
    for name, dtype in (("sum", "f32"), ("largest", "bf16")):
        (array,) = plan(f"bf16[4,6] all-reduce(x), replica_groups={{}}, to_apply={name}").arrays
        assert {operand.dtype for operand in array.reduction.operands} == {dtype}


def test_who_is_sent_nothing_has_zeros():
    made = plan("bf16[4,6] collective-permute(x), source_target_pairs={{0,1},{1,2}}")
    assert made.sources == ((), ((0, 0),), ((1, 0),), ())


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        ("bf16[4,6] all-reduce(x), replica_groups={{0,1}}, to_apply=sum", "leave out some of 4 devices"),
        ("(bf16[4,6]) all-to-all(x), replica_groups={{0},{1},{2},{3}}", "exchanges the elements of tuples"),
    ],
    ids=["some devices", "tuples"],
)
def test_no_plan(root, reason):
    with pytest.raises(NoPlan, match=reason):
        plan(root)


def test_elements_that_kernels_do_not_have_are_refused():
    with pytest.raises(NoPlan):
        plan("c64[4,6] collective-permute(x), source_target_pairs={{0,1}}", dtype="c64")
