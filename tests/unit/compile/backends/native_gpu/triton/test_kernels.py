"""Plans as Triton source: its text, which needs no Triton, and what it computes, by Triton's interpreter."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.triton.compile_kernels import TritonCompiler
from mpmd.compile.backends.native_gpu.triton.operations import divided, has_cell
from mpmd.compile.backends.native_gpu.triton.tiling import MAX_ROW, tiling_of
from mpmd.compile.backends.native_gpu.triton.triton_kernels import plan_kernels, refusal
from mpmd.compile.kernels.index import constant
from mpmd.compile.kernels.operations import NUMPY_DTYPE, OPERATIONS
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.errors import CompileError
from tests.support.gpu_plans import check, column_sums, long_loss, scatter, softmax, transposed

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make test-gpu"
)


def test_equal_kernels_have_equal_names_and_others_have_not():
    first, again = (plan_kernels(softmax(5, 33), 8).kernels[0] for _ in range(2))
    renamed = plan_kernels(dataclasses.replace(softmax(5, 33), name="other"), 8).kernels[0]
    assert first.source == again.source == renamed.source and first.name in first.source
    assert first.grid == 1 and first.warps == 2 and first.pointers == ("*fp32", "*fp32")
    others = (softmax(5, 34), softmax(5, 33, "bf16"))
    assert len({first.name, *(plan_kernels(p, 8).kernels[0].name for p in others)}) == 3
    assert first.with_alignment([True, False]).name != first.name
    assert first.with_alignment([True, True]) is first


def test_spaces_that_tiles_fill_have_no_masks():
    (whole,), (ragged,) = (plan_kernels(softmax(64, width), 8).kernels for width in (512, 500))
    assert "mask" not in whole.source and "mask=cm" in ragged.source


def test_tiles_follow_the_plan():
    assert (tiling_of(softmax(64, 512), 8).height, tiling_of(softmax(64, 512), 8).width) == (2, 512)
    turned = tiling_of(transposed(100, 200), 8)
    assert (turned.height, turned.width, turned.grid) == (64, 64, 8)
    flat = tiling_of(transposed(4, 200), 8)  # too few rows for a square
    assert (flat.height, flat.width) == (4, 256)
    long = tiling_of(softmax(3, MAX_ROW + 1), 8)
    assert long.looped and long.grid == 3
    shared = tiling_of(column_sums(1000, 100), 64)
    assert (shared.chunks, shared.row_steps.part, shared.grid) == (32, 32, 32)


def test_sums_over_many_rows_are_two_kernels_with_partial_sums_between():
    made = plan_kernels(column_sums(1000, 100), 64)
    first, last = made.kernels
    assert made.scratch == (0, 12800) and made.scratch_bytes == 12800 + 256  # 32 chunks of 100 and of one f32
    assert "tl.reduce" in last.source and last.grid == 1
    assert set(first.operands) == {0, 2, 3, 5, 6} and set(last.operands) == {1, 4, 5, 6}
    (alone,) = plan_kernels(column_sums(20, 100), 64).kernels
    assert not plan_kernels(column_sums(20, 100), 64).scratch_bytes and "p1" in alone.source


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (scatter("bf16", "maximum"), "GPUs do not combine values of bf16 by maximum at one place"),
        (scatter("u8"), "GPUs do not combine values of u8 by add at one place"),
    ],
)
def test_plans_without_a_kernel_are_refused_in_words(plan, reason):
    assert refusal(plan) == reason
    with pytest.raises(CompileError, match=reason):
        plan_kernels(plan, 8)


def test_long_rows_that_are_also_added_up_are_refused():
    b = PlanBuilder("both", (4, MAX_ROW + 1), row_dims=1)
    v = b.load_dense(b.operand("x", "f32", 4 * (MAX_ROW + 1)))
    b.store(b.operand("y", "f32", 1), constant(0), b.reduce_column("add", b.reduce_row("add", v)))
    assert refusal(b.finish()) == "no GPU kernel adds up rows of 16385 elements that it also reduces"


def test_every_operation_has_a_cell():
    missing = [
        (name, dtype) for name, row in OPERATIONS.items() for dtype in row.dtypes if not has_cell(name, dtype)
    ]
    assert missing == []


@needs_triton
@pytest.mark.parametrize(
    "plan",
    [
        softmax(5, 33),
        softmax(7, 70, "bf16"),
        softmax(2, MAX_ROW + 3),
        transposed(70, 130),
        transposed(33, 65, "u8"),
        column_sums(300, 100),
        column_sums(40, 290, "bf16", batch=3),
        column_sums(64, 5, "s32", "maximum", batch=2),
        column_sums(0, 5),
    ],
    ids=lambda plan: f"{plan.name} {'x'.join(map(str, plan.extents))} {plan.operands[0].dtype}",
)
def test_kernels_compute_what_their_plan_means(plan):
    for programs in (1, 8, 64):
        check(plan, programs=programs)


@needs_triton
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "s32", "u64"])
def test_values_of_one_place_are_added_up(dtype):
    ids = np.random.default_rng(1).integers(-3, 20, 50)
    check(scatter(dtype), {"ids": ids, "x": np.arange(50) % 5, "y": np.zeros(20)})


@needs_triton
def test_no_program_waits_for_what_others_add():
    """Without an order, which nothing needs, an addition has no barriers of memory around it."""
    kernels = [plan_kernels(scatter("f32", how), 264).kernels[0] for how in ("add", "maximum")]
    made = TritonCompiler().compile({kernel.name: kernel for kernel in kernels}, 90)
    for kernel in kernels:
        assert "relaxed" in made[kernel.name].ptx and "acq_rel" not in made[kernel.name].ptx


@needs_triton
@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("op", ["minimum", "maximum"])
def test_a_nan_wins_wherever_values_meet(op, dtype):
    """In memory or in an update, of any sign and order; other places have the extreme."""
    nan = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)
    updates = [
        [nan[0], 3],
        [3, nan[0]],
        [-3, nan[1]],
        [nan[1], -3],
        [3, -3],
        [-0.0, -1],
        [-2, 5],
        [1, -np.inf],
    ]
    before = [0, 1, -1, 0, nan[0], nan[1], 0, np.inf]
    x, y = np.ravel(updates), np.array(before)
    check(scatter(dtype, op, len(x), len(y)), {"ids": np.arange(len(x)) // 2, "x": x, "y": y})


def two_floats(op):
    b = PlanBuilder(op, (4,))
    x, z = (b.load_dense(b.operand(name, "f32", 4)) for name in "xz")
    b.store_dense(b.operand("y", "f32", 4), b.apply(op, *((x, z) if op == "divide" else (x,))))
    return b.finish()


@needs_triton
def test_quotients_and_roots_are_rounded_to_the_nearest_and_denormals_are_numbers():
    """Only the compiler knows: the interpreter is exact in any case."""
    names = ("divide", "sqrt", "rsqrt", "log")
    kernels = {name: plan_kernels(two_floats(name), 8).kernels[0] for name in names}
    kernels["scatter"] = plan_kernels(scatter("f32", "minimum"), 8).kernels[0]
    kernels["wide scatter"] = plan_kernels(scatter("f64", "maximum"), 8).kernels[0]
    made = TritonCompiler().compile({k.name: k for k in kernels.values()}, 90)
    text = {name: made[kernel.name].ptx for name, kernel in kernels.items()}
    assert (
        "div.rn.f32" in text["divide"]
        and "sqrt.rn.f32" in text["sqrt"]
        and "rsqrt.approx.f32" in text["rsqrt"]
    )
    assert not [name for name in names if ".ftz" in text[name]]
    for name, kinds in {"scatter": ("s32", "u32"), "wide scatter": ("s64", "u64")}.items():
        assert all(f".{kind}" in text[name] for kind in kinds)


@pytest.mark.parametrize("divisor", [768.0, 3.0, 0.25, 1e-30, -41.0, 2.0**120, np.inf, 0.0, np.nan])
def test_quotients_by_constants_are_rounded_to_the_nearest(divisor):
    """Denormals and NaN, too."""
    x = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    x *= np.float32(2) ** np.random.default_rng(1).integers(-126, 126, x.size).astype(np.float32)
    x[:5] = np.inf, -np.inf, np.nan, 0, 1e-44
    divisor = np.float32(divisor)
    text = divided("x", "f32", float(divisor))
    assert bool(text) == (np.isfinite(divisor) and divisor != 0)
    if text:
        with np.errstate(all="ignore"):
            kinds = {"tl.float64": "np.float64", "tl.float32": "np.float32", ".to(": ".astype("}
            for ours, theirs in kinds.items():
                text = text.replace(ours, theirs)
            np.testing.assert_array_equal(eval(text, {"x": x, "np": np}), x / divisor)
    assert divided("x", "f64", 3.0) == ""


def logits(rows, width, padding, seed=0):
    """Rows of each kind: plain, rising, falling, the largest first, -inf in part and as a whole, NaN, inf."""
    x = np.random.default_rng(seed).standard_normal((rows, width + padding)) * 3
    x[1], x[2] = np.linspace(-90, 90, width + padding), np.linspace(90, -90, width + padding)
    x[3, 0], x[4, : width // 2], x[5], x[6, 9], x[7, 20] = 1e3, -np.inf, -np.inf, np.nan, np.inf
    x[:, width:] = 77  # no element of a row
    return x.ravel()


LABELS = [2 * MAX_ROW + 69, 4096, 4095, 0, 1, 2, 3, 20, -1, 2 * MAX_ROW + 70]
"""Of 2 * MAX_ROW + 70 positions."""


def test_a_long_loss_is_two_iterations_over_its_row():
    """The labels' elements are read, not looked for, before the gradients take the memory of the logits."""
    (kernel,) = plan_kernels(long_loss(len(LABELS), LABELS[-1], 42), 8).kernels
    whole, rest = (kernel.source.count(f"in range({first}, ") for first in (0, 2 * MAX_ROW))
    assert (whole, rest) == (2, 2)
    assert kernel.source.index("tl.debug_barrier()") < kernel.source.index("tl.store")
    assert "other=0" not in kernel.source[: kernel.source.index(f"in range({2 * MAX_ROW}")]


@needs_triton
def test_a_long_loss_is_its_plan_s():
    plan = long_loss(len(LABELS), LABELS[-1], 42)
    check(plan, {"labels": np.array(LABELS), "logits": logits(len(LABELS), LABELS[-1], 42)})


@needs_triton
def test_sums_of_long_rows_have_the_digits_of_f64():
    width, labels = MAX_ROW + 900, np.arange(10)
    plan = long_loss(len(labels), width)
    values = logits(len(labels), width, 47).astype(NUMPY_DTYPE["bf16"]).reshape(len(labels), -1)
    found = [np.zeros(o.size, NUMPY_DTYPE[o.dtype]) for o in plan.operands]
    from tests.support.triton_interpreter import run_plan  # needs Triton

    found[0][:], found[1][:] = labels, values.ravel()
    run_plan(plan, found)
    x = values[:5, :width].astype(np.float64)
    total = np.exp(x - x.max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(found[3][:5], total, rtol=1e-6)
    picked = x[np.arange(5), labels[:5]] - x.max(-1) - np.log(total)
    np.testing.assert_allclose(found[2][:5], picked, rtol=1e-5)


def test_reductions_that_need_no_maximum_are_made_beside_it():
    """One iteration over a row, and one that stores."""
    b = PlanBuilder("beside", (3, MAX_ROW + 1), row_dims=1)
    v = b.load_dense(b.operand("x", "f32", 3 * (MAX_ROW + 1)))
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    weight = b.apply("divide", b.reduce_row("add", v), b.reduce_row("add", e))
    b.store_dense(b.operand("y", "f32", 3 * (MAX_ROW + 1)), b.apply("multiply", e, weight))
    plan = b.finish()
    (kernel,) = plan_kernels(plan, 8).kernels
    assert kernel.source.count("in range(0, ") == 2
    if importlib.util.find_spec("triton") is not None:
        check(plan)
