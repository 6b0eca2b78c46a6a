"""Groups share a plan only if a planner sees no difference between them."""

from __future__ import annotations

import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.plan_cache import cached_plan, caching_plans, structure_of

GROUPS = {
    "operations": ("ROOT r = f32[4] add(x, y)", "ROOT r = f32[4] subtract(x, y)"),
    "edges": (
        "a = f32[4] add(x, y)\n ROOT r = f32[4] subtract(a, x)",
        "a = f32[4] add(x, y)\n ROOT r = f32[4] subtract(a, y)",
    ),
    "attributes": (
        "ROOT r = f32[2] slice(x), slice={[0:2]}",
        "ROOT r = f32[2] slice(x), slice={[1:3]}",
    ),
    "shapes": ("ROOT r = f32[4] negate(x)", "ROOT r = f32[8] negate(w)"),
    "called computations": (
        "z = f32[] constant(0)\n ROOT r = f32[] reduce(x, z), dimensions={0}, to_apply=total",
        "z = f32[] constant(0)\n ROOT r = f32[] reduce(x, z), dimensions={0}, to_apply=largest",
    ),
    "signs of zeros": (
        "z = f32[] constant(0)\n ROOT r = f32[4] broadcast(z), dimensions={}",
        "z = f32[] constant(-0)\n ROOT r = f32[4] broadcast(z), dimensions={}",
    ),
}
_CALLED = "".join(
    f"{name} {{\n p = f32[] parameter(0)\n q = f32[] parameter(1)\n ROOT o = f32[] {opcode}(p, q)\n}}\n"
    for name, opcode in (("total", "add"), ("largest", "maximum"))
)


def group_of(body: str):
    """The group of all work of a program, and its results."""
    entry = parse_module(
        f"HloModule m\n{_CALLED}ENTRY e {{\n x = f32[4] parameter(0)\n y = f32[4] parameter(1)\n"
        f" w = f32[8] parameter(2)\n {body}\n}}"
    ).entry
    return [i for i in entry.post_order() if i.opcode != "parameter"], [entry.root]


@pytest.mark.parametrize("what", GROUPS)
def test_groups_differ(what):
    first, second = (structure_of(*group_of(body))[0] for body in GROUPS[what])
    assert first != second
    assert first == structure_of(*group_of(GROUPS[what][0]))[0]


def test_results_differ():
    body = "a = f32[4] negate(x)\n ROOT r = f32[4] add(a, y)"
    group, (root,) = group_of(body)
    assert structure_of(group, [root])[0] != structure_of(group, [group[0], root])[0]


def test_views_of_one_array_are_not_those_of_two():
    """An update in place of one view changes what the other one reads."""
    work = "c = f32[4] subtract(a, b)\n d = f32[4] add(x, y)\n ROOT r = f32[4] subtract(c, d)"
    one, _ = group_of(f"a = f32[4] bitcast(x)\n b = f32[4] bitcast(x)\n {work}")
    two, _ = group_of(f"a = f32[4] bitcast(x)\n b = f32[4] bitcast(y)\n {work}")
    assert structure_of(one[2:], one[-1:])[0] != structure_of(two[2:], two[-1:])[0]


def test_a_plan_and_a_refusal_are_about_the_group_that_asks():
    calls = []

    @cached_plan
    def planner(name, group, results):
        calls.append(name)
        raise NoPlan("{0} has no kernel", results[0])

    names = []
    with caching_plans():
        for _ in range(2):
            group, results = group_of("ROOT r = f32[4] negate(x)")
            with pytest.raises(NoPlan) as found:
                planner("k", group, results)
            names.append(found.value.about == tuple(results))
    assert calls == ["k"] and names == [True, True]
