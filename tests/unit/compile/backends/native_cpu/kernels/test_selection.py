"""The first elements of sorted rows: what a sort gives, for every order, dtype, dim and target."""

import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.kernels.row import RowKernel
from mpmd.compile.backends.native_cpu.kernels.sort_rows import SelectionKernel
from mpmd.compile.hlo import parse_module
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.kernels.evaluate import evaluate as evaluate_plan
from mpmd.compile.kernels.planner.planned_kernel import plan_instruction
from mpmd.compile.kernels.sort_patterns import sorting_of
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.passes.fusion.sort_prefix import SortPrefix
from tests.support.hlo_meaning import evaluate
from tests.support.native_hlo import run_module
from tests.support.targets import runs_here

TARGETS = {"host": host_target(), "avx2": named_target("avx2")}
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "f64": np.float64, "s8": np.int8}
ORDERS = {
    "greatest": "ROOT r = pred[] compare(a, b), direction=GT, type=TOTALORDER",
    "least": "ROOT r = pred[] compare(a, b), direction=LT",
    "size": "x = T[] abs(a)\n y = T[] abs(b)\n ROOT r = pred[] compare(x, y), direction=LT",
    "places": "ROOT r = pred[] compare(i, j), direction=GT",
}


def module_of(dims, along, taken, dtype="f32", order="greatest"):
    """The first elements of a sort, and where they were."""
    shape, kept = list(dims), [taken if d == along else e for d, e in enumerate(dims)]
    full, part = ",".join(map(str, shape)), ",".join(map(str, kept))
    cut = ", ".join(f"[0:{e}]" for e in kept)
    compare = ORDERS[order].replace("T[]", f"{dtype}[]")
    if not dtype.startswith(("f", "bf")):
        compare = compare.replace(", type=TOTALORDER", "")
    return parse_module(
        f"HloModule s\nbefore {{ a = {dtype}[] parameter(0)\n b = {dtype}[] parameter(1)\n"
        f" i = s32[] parameter(2)\n j = s32[] parameter(3)\n {compare} }}\n"
        f"ENTRY main {{ x = {dtype}[{full}] parameter(0)\n n = s32[{full}] iota(), iota_dimension={along}\n"
        f" s = ({dtype}[{full}], s32[{full}]) sort(x, n), dimensions={{{along}}}, to_apply=before\n"
        f" v = {dtype}[{full}] get-tuple-element(s), index=0\n"
        f" p = s32[{full}] get-tuple-element(s), index=1\n"
        f" w = {dtype}[{part}] slice(v), slice={{{cut}}}\n q = s32[{part}] slice(p), slice={{{cut}}}\n"
        f" ROOT t = ({dtype}[{part}], s32[{part}]) tuple(w, q) }}"
    )


def values(dims, dtype, how="ties"):
    rng = np.random.default_rng(5)
    if how == "ties":  # many: places tell whether their order is kept
        made = rng.integers(-4, 5, dims).astype(np.float64)
    else:
        made = rng.standard_normal(dims) * 50
    if how == "special":
        special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]
        made = np.where(rng.random(dims) < 0.5, made, rng.choice(special, dims))
    if how in ("rising", "falling"):
        made = np.sort(made, axis=-1) * (1 if how == "rising" else -1)
    return made.astype(DTYPES[dtype])


def check(module, x):
    for got, want in zip(run_module(module, [x]), evaluate(module, [x]), strict=True):
        np.testing.assert_array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


@pytest.mark.fast_cases
@pytest.mark.parametrize(
    "dims,along,taken",
    [
        ((17,), 0, 16),
        ((3, 40), 1, 1),
        ((2, 81), 1, 17),  # two vectors of best elements, and a last block that overlaps
        ((300,), 0, 130),  # more vectors than are written out
        ((5, 333, 3), 1, 8),
        ((1000, 2), 0, 5),
        ((4, 3, 9), 2, 3),  # so short that all pairs are compared
        ((4, 16), 1, 2),
    ],
)
@pytest.mark.parametrize("order", sorted(ORDERS))
def test_the_beginning_of_a_sort(dims, along, taken, order):
    check(module_of(dims, along, taken, order=order), values(dims, "f32"))


@pytest.mark.fast_cases
@pytest.mark.parametrize("how", ["random", "special", "rising", "falling"])
@pytest.mark.parametrize("taken", [1, 8, 9, 64, 100])
def test_every_order_of_what_comes(how, taken):
    check(module_of((3, 700), 1, taken), values((3, 700), "f32", how))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(dtype):
    how = "ties" if dtype == "s8" else "special"
    for taken in (3, 20):
        check(module_of((4, 150), 1, taken, dtype), values((4, 150), dtype, how))


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("threads", [1, 3])
def test_targets_and_threads_agree(target, threads):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    plan = planned(module_of((7, 200), 1, 11, order="size"))
    sequence = plan_kernels(plan, TARGETS[target])
    assert isinstance(sequence.kernels[0], SelectionKernel)
    x = values((7, 200), "f32")
    native, wanted = ([x.copy(), np.zeros(77, np.float32), np.zeros(77, np.int32)] for _ in range(2))
    evaluate_plan(plan, wanted)
    DirectSequence(sequence, TARGETS[target], threads=threads)(*native)
    for one, other in zip(native, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def planned(module):
    """The plan of the one kernel that a module becomes; positions are not read from memory."""
    assert SortPrefix().run(module)
    (fusion,) = [i for i in module.entry if i.opcode == "fusion"]
    assert [o.opcode for o in fusion.operands] == ["parameter"]
    return plan_instruction("selection", fusion).plan


def test_a_plan_knows_how_much_it_keeps():
    plan = planned(module_of((4, 300), 1, 10, order="size"))
    found = sorting_of(plan)
    assert found is not None and found.kept == 10
    assert [a.source for a in found.arrays] == [0, -1]
    assert isinstance(
        plan_kernels(planned(module_of((4, 9), 1, 2, order="size")), host_target()).kernels[0], RowKernel
    )


def test_only_what_is_read_of_the_beginning():
    """A threshold: the last of the best, without the places, while another reader takes three of them."""
    text = (
        "HloModule s\nbefore { a = f32[] parameter(0)\n b = f32[] parameter(1)\n"
        " ROOT r = pred[] compare(a, b), direction=GT }\n"
        "ENTRY main { x = f32[2,90] parameter(0)\n"
        " s = f32[2,90] sort(x), dimensions={1}, to_apply=before\n"
        " k = f32[2,1] slice(s), slice={[0:2], [7:8]}\n"
        " l = f32[1,3] slice(s), slice={[1:2], [0:6:2]}\n"
        " ROOT t = (f32[2,1], f32[1,3]) tuple(k, l) }"
    )
    x = values((2, 90), "f32", "random")
    got = run_module(parse_module(text), [x])
    best = -np.sort(-x, axis=1)
    np.testing.assert_array_equal(got[0], best[:, 7:8])
    np.testing.assert_array_equal(got[1], best[1:, 0:6:2])
    module = parse_module(text)
    assert SortPrefix().run(module) and not SortPrefix(most=7).run(parse_module(text))
    assert [i.shape.dims for i in module.entry if i.opcode == "fusion"] == [(2, 8)]


def test_what_is_read_as_a_whole_is_sorted_as_a_whole():
    module = module_of((4, 90), 1, 3)
    values_ = next(i for i in module.entry if i.opcode == "get-tuple-element" and i.tuple_index == 0)
    whole = module.entry.add(HloInstruction("negate", values_.shape, [values_]))
    root = module.entry.root
    shape = tuple_of([*(o.shape for o in root.operands), whole.shape])
    module.entry.set_root(module.entry.add(HloInstruction("tuple", shape, [*root.operands, whole])))
    SortPrefix().run(module)
    assert [i.opcode for i in module.entry].count("fusion") == 0


def test_what_control_edges_order_stays():
    module = module_of((4, 90), 1, 3)
    sort = next(i for i in module.entry if i.opcode == "sort")
    other = module.entry.add(HloInstruction("negate", sort.operands[0].shape, [sort.operands[0]]))
    sort.add_control_predecessor(other)
    SortPrefix().run(module)
    assert [i.opcode for i in module.entry].count("fusion") == 0
