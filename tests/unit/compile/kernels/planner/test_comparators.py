"""Comparators: which of them give each element one place, and where NaN goes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.hlo.attributes import SliceDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.sorting import plan_sort, plan_sort_prefix
from mpmd.compile.lowering import lower
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_hlo import run_module

LESS = "ROOT r = pred[] compare(a, b), direction=LT"


def sort_of(compare, dims=(20,), dtype="f32"):
    """A sort of values with their places."""
    shape, last = f"[{','.join(map(str, dims))}]", len(dims) - 1
    return parse_module(
        f"HloModule s\nbefore {{ a = {dtype}[] parameter(0)\n b = {dtype}[] parameter(1)\n"
        f" i = s32[] parameter(2)\n j = s32[] parameter(3)\n {compare} }}\n"
        f"ENTRY main {{ x = {dtype}{shape} parameter(0)\n n = s32{shape} iota(), iota_dimension={last}\n"
        f" ROOT s = ({dtype}{shape}, s32{shape}) sort(x, n), dimensions={{{last}}}, to_apply=before }}"
    )


ORDERS = {
    "less": LESS,
    "turned": "ROOT r = pred[] compare(b, a), direction=GT",
    "of a function": "x = f32[] abs(a)\n y = f32[] abs(b)\n ROOT r = pred[] compare(x, y), direction=LT",
    "neither less nor equal": "l = pred[] compare(a, b), direction=LE\n ROOT r = pred[] not(l)",
    "then places": (
        "l = pred[] compare(a, b), direction=LT\n e = pred[] compare(a, b), direction=EQ\n"
        "k = pred[] compare(i, j), direction=GT\n t = pred[] and(k, e)\n ROOT r = pred[] or(l, t)"
    ),
    "else places": (
        "l = pred[] compare(a, b), direction=GT\n n = pred[] compare(b, a), direction=NE\n"
        "k = pred[] compare(i, j), direction=GT\n ROOT r = pred[] select(n, l, k)"
    ),
    "none": "ROOT r = pred[] constant(false)",
}

NO_ORDERS = {
    "less or equal": "ROOT r = pred[] compare(a, b), direction=LE",
    "always": "ROOT r = pred[] constant(true)",
    "different": "ROOT r = pred[] compare(a, b), direction=NE",
    "of two functions": "y = f32[] negate(b)\n ROOT r = pred[] compare(a, y), direction=LT",
    "of two arrays": "y = f32[] convert(j)\n ROOT r = pred[] compare(a, y), direction=LT",
    "one of two": (
        "l = pred[] compare(a, b), direction=LT\n k = pred[] compare(i, j), direction=LT\n"
        "ROOT r = pred[] or(l, k)"
    ),
    "both of two": (
        "l = pred[] compare(a, b), direction=LT\n k = pred[] compare(i, j), direction=LT\n"
        "ROOT r = pred[] and(l, k)"
    ),
    "with a constant": "z = f32[] constant(0)\n ROOT r = pred[] compare(a, z), direction=LT",
}


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_has_a_plan(name):
    plan_sort("s", sort_of(ORDERS[name]).entry.root)


@pytest.mark.parametrize("name", NO_ORDERS)
def test_what_may_contradict_itself_has_none(name):
    with pytest.raises(NoPlan, match="may contradict itself"):
        plan_sort("s", sort_of(NO_ORDERS[name]).entry.root)


def test_a_slice_of_the_middle_is_no_beginning():
    sort = sort_of(ORDERS["less"]).entry.root
    part = HloInstruction("get-tuple-element", sort.operands[0].shape, [sort], {"index": 0})
    for first in (0, 2):
        cut = SliceDims((first,), (first + 5,), (1,))
        taken = HloInstruction("slice", part.shape.with_dims((5,)), [part], {"slice": cut})
        if first == 0:
            plan_sort_prefix("s", [sort, part, taken], [taken])
            continue
        with pytest.raises(NoPlan, match="not the beginning"):
            plan_sort_prefix("s", [sort, part, taken], [taken])


def test_many_keys_are_an_order():
    rows = [jax.ShapeDtypeStruct((8,), np.int32)] * 41
    sort_all = jax.jit(lambda rows: jax.lax.sort(rows, num_keys=40))
    module = lower(sort_all.lower(rows).compiler_ir("stablehlo"))
    (sort,) = (i for i in module.instructions() if i.opcode == "sort")
    plan_sort("s", sort)


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"none"}))
@pytest.mark.parametrize("size", [13, 40, 300])  # counted, and merged
def test_every_element_has_one_place_whatever_is_nan(name, size):
    x = np.random.default_rng(2).standard_normal((3, size)).astype(np.float32)
    x[:, [0, 5, 9, size - 1]] = np.nan
    got, places = run_module(sort_of(ORDERS[name], x.shape), [x])
    np.testing.assert_array_equal(np.sort(places, axis=1), np.broadcast_to(np.arange(size), x.shape))
    np.testing.assert_array_equal(got, np.take_along_axis(x, places, 1))
    last = name not in ("else places", "neither less nor equal")
    assert np.isnan(got[:, -4:] if last else got[:, :4]).all(), "NaN is greater than all others"


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64"])
@pytest.mark.parametrize(("n", "k"), [(4, 2), (16, 16), (17, 16), (100, 5), (400, 64)])
def test_the_best_of_values_with_nan_are_elements(dtype, n, k):
    names = {"f32": np.float32, "bf16": jnp.bfloat16, "f16": np.float16, "f64": np.float64}

    def best(x):
        return jax.lax.approx_max_k(x, k)

    with jax.enable_x64(dtype == "f64"):
        x = np.random.default_rng(0).standard_normal((3, n)).astype(names[dtype])
        x[:, 1] = np.nan
        fragment = fragment_of(best, x)
        values, places = run(fragment, [x], compiled(fragment))
    order = np.argsort(np.where(np.isnan(x), -np.inf, -x.astype(np.float64)), axis=1, kind="stable")
    np.testing.assert_array_equal(places, order[:, :k])
    want = np.take_along_axis(x, places, 1)
    np.testing.assert_array_equal(values.view(np.uint8), want.view(np.uint8))
