"""Programs of which random ones found that kernels read wrong places, or had none though their parts had."""

import numpy as np
import pytest

from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.evaluate import apply
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import Apply
from mpmd.compile.passes.fusion.grouping import FusionGroup, Grouping
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module


def module_of(body: str):
    computations = "".join(
        f"{op}_{t} {{ a = {t}[] parameter(0)\n b = {t}[] parameter(1)\n ROOT o = {t}[] {op}(a, b) }}\n"
        for op, t in (("or", "s16"), ("add", "s16"))
    )
    return parse_module(f"HloModule m\n{computations}ENTRY main {{\n {body}\n}}")


def check(body: str, *arguments):
    module = module_of(body)
    wanted = evaluate(module, list(arguments))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for ours, theirs in zip(run_module(module, list(arguments)), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("start", range(3))
def test_a_reshape_that_is_turned_over_and_cut(start):
    """Indices count down inside of quotients."""
    x = np.arange(6138, dtype=np.float32).reshape(31, 33, 6)
    check(
        "x = f32[31,33,6] parameter(0)\n r = f32[11,6,3,31] reshape(x)\n n = f32[11,6,3,31] negate(r)\n"
        " v = f32[11,6,3,31] reverse(n), dimensions={0,1,2}\n"
        f" s = f32[11,6,1,31] slice(v), slice={{[0:11], [0:6], [{start}:{start + 1}], [0:31]}}\n"
        " ROOT e = f32[11,6,1,31] abs(s)",
        x,
    )


@pytest.mark.parametrize("start", [-1, 0, 2, 9])
def test_a_position_at_run_time_inside_of_quotients(start):
    x = np.arange(6138, dtype=np.float32).reshape(11, 6, 3, 31)
    check(
        "x = f32[11,6,3,31] parameter(0)\n i = s32[] parameter(1)\n z = s32[] constant(0)\n"
        " v = f32[11,6,3,31] reverse(x), dimensions={0,2,3}\n r = f32[31,33,6] reshape(v)\n"
        " n = f32[31,33,6] negate(r)\n"
        " d = f32[31,30,5] dynamic-slice(n, z, i, i), dynamic_slice_sizes={31,30,5}\n"
        " t = f32[4650] reshape(d)\n w = f32[4650] reverse(t), dimensions={0}\n ROOT e = f32[4650] abs(w)",
        x,
        np.int32(start),
    )


def test_quotients_of_what_counts_down_are_divided_without_a_sign():
    extents = (11, 6, 31)
    index = dim(0) * -558 + dim(1) * -93 + dim(2) + 5000
    for divisor in (7, 31, 198, 600):
        for found in (index.divided(divisor, extents), index.modulo(divisor, extents)):
            for atom, _ in found.terms:
                assert atom.inner is None or atom.inner.bounds(extents)[0] >= 0


def test_a_result_of_columns_is_not_written_over_what_the_next_row_reads():
    x = np.random.default_rng(0).integers(-4, 5, (10, 99)).astype(np.int16)
    check(
        "x = s16[10,99] parameter(0)\n z = s16[] constant(0)\n lo = s16[] constant(-4)\n"
        " hi = s16[] constant(4)\n r = s16[99] reduce(x, z), dimensions={0}, to_apply=or_s16\n"
        " c = s16[99] clamp(lo, r, hi)\n n = s16[99] negate(c)\n d = s16[99] clamp(lo, n, hi)\n"
        " b = s16[10,99] broadcast(c), dimensions={1}\n s = s16[10,99] add(x, b)\n"
        " s2 = s16[10,99] clamp(lo, s, hi)\n"
        " t = s16[99] reduce(s2, z), dimensions={0}, to_apply=add_s16\n"
        " ROOT o = (s16[99], s16[99]) tuple(d, t)",
        x,
    )


def test_work_that_only_an_array_joins_by_movement_is_no_plain_group():
    """Two halves of an array, each with work of its own, fuse or not: both have kernels."""
    x = np.arange(4096, dtype=np.float32)
    check(
        "x = f32[4096] parameter(0)\n a = f32[2048] slice(x), slice={[0:2048]}\n"
        " b = f32[2048] slice(x), slice={[2048:4096]}\n na = f32[2048] negate(a)\n"
        " nb = f32[2048] abs(b)\n ROOT t = (f32[2048], f32[2048]) tuple(na, nb)",
        x,
    )


@pytest.mark.filterwarnings("error")
def test_infinities_of_a_plan_are_no_news():
    """Masks are told apart by evaluating plans: whoever compiles sees no warning of NumPy's."""
    found = apply(Apply("f32", "exponential", (0,)), [np.asarray([1e9, -1e9], np.float32)])
    np.testing.assert_array_equal(found, np.asarray([np.inf, 0], np.float32))
    assert np.isnan(apply(Apply("f32", "log", (0,)), [np.asarray([-1], np.float32)])).all()


def test_a_group_that_lies_across_two_others_leads_back():
    """a feeds g behind all, g feeds the late member of h, and h's early member feeds b."""
    module = module_of(
        "x = f32[8] parameter(0)\n a = f32[8] negate(x)\n early = f32[8] abs(x)\n b = f32[8] cosine(early)\n"
        " g = f32[8] sine(a)\n late = f32[8] exponential(g)\n"
        " ROOT t = (f32[8], f32[8], f32[8]) tuple(b, late, a)"
    )
    grouping = Grouping(module.entry)
    by_name = {i.name: grouping.group_of[i] for i in grouping.order if i in grouping.group_of}
    across: FusionGroup = grouping.join(by_name["early"], by_name["late"])
    assert len(across.members) == 2
    assert grouping.would_create_cycle(by_name["a"], by_name["b"])
    assert not grouping.would_create_cycle(by_name["a"], by_name["g"])
