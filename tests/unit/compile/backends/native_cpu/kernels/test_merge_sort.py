"""Rows sorted by merging: every comparator, every dim, and always stable."""

import jax
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.kernels import plan_kernels
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.planned_kernel import plan_instruction
from mpmd.compile.kernels.planner.sorting import plan_sort
from mpmd.compile.kernels.sort_patterns import sorting_of
from mpmd.compile.lowering import lower
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module

RNG = np.random.default_rng(3)
ABS = "x = f32[] abs(a)\n y = f32[] abs(b)\n ROOT r = pred[] compare(x, y), direction=LT"
LESS = "ROOT r = pred[] compare(a, b), direction=LT"


def program(dims, along, compare=LESS):
    shape = f"f32[{','.join(map(str, dims))}]"
    places = shape.replace("f32", "s32")
    return parse_module(
        f"HloModule s\nbefore {{ a = f32[] parameter(0)\n b = f32[] parameter(1)\n i = s32[] parameter(2)\n"
        f" j = s32[] parameter(3)\n {compare} }}\n"
        f"ENTRY main {{ x = {shape} parameter(0)\n n = {places} parameter(1)\n"
        f" ROOT s = ({shape}, {places}) sort(x, n), dimensions={{{along}}}, to_apply=before }}"
    )


@pytest.mark.parametrize("compare", [LESS, ABS])
@pytest.mark.parametrize(
    "dims,along", [((1,), 0), ((7,), 0), ((8,), 0), ((9,), 0), ((300,), 0), ((5, 33, 3), 1), ((130, 2), 0)]
)
def test_merging_sorts_as_the_evaluator_does(dims, along, compare, monkeypatch):
    monkeypatch.setattr(plan_kernels, "_MIN_MERGED", 0)
    module = program(dims, along, compare)
    keys = RNG.integers(-4, 5, dims).astype(np.float32)  # many ties: places tell whether their order is kept
    places = np.arange(keys.size, dtype=np.int32).reshape(dims)
    got, want = run_module(module, [keys, places]), evaluate(module, [keys, places])
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def test_a_plan_that_sorts_is_known():
    plan, _ = plan_sort("s", program((4, 20, 3), 1).entry.root)
    found = sorting_of(plan)
    assert found is not None
    assert found.along == 2
    assert [(a.source, a.target) for a in found.arrays] == [(0, 2), (1, 3)]
    assert found.arrays[0].other >= 0 > found.arrays[1].other  # places are not compared


def test_a_sort_of_very_many_arrays_is_refused():
    rows = [jax.ShapeDtypeStruct((8,), np.int32)] * 81
    sort_all = jax.jit(lambda rows: jax.lax.sort(rows, num_keys=80))
    module = lower(sort_all.lower(rows).compiler_ir("stablehlo"))
    (sort,) = (i for i in module.instructions() if i.opcode == "sort")
    with pytest.raises(NoPlan, match="it sorts 81 arrays at once"):
        plan_sort("s", sort)


def test_other_sums_do_not_sort():
    text = (
        "HloModule r\nsum { a = s32[] parameter(0)\n b = s32[] parameter(1)\n ROOT s = s32[] add(a, b) }\n"
        "ENTRY main { x = s32[4,5] parameter(0)\n z = s32[] constant(0)\n"
        " ROOT r = s32[4] reduce(x, z), dimensions={1}, to_apply=sum }"
    )
    assert sorting_of(plan_instruction("r", parse_module(text).entry.root).plan) is None
