"""Kernels that write one place several times: threads divide what never meets, and the order is kept."""

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.kernels.scatter import ScatterKernel
from mpmd.compile.kernels.evaluate import evaluate
from mpmd.compile.kernels.index import constant, dim, value
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from tests.support.targets import runs_here

TARGETS = {"host": host_target(), "avx2": named_target("avx2")}


def embedding_gradient(tokens, width, vocabulary, pitch=None, op="add"):
    """table[place[t] * pitch + d] op= x[t, d]"""
    pitch = width if pitch is None else pitch
    b = PlanBuilder("scatter", (tokens, width))
    place = b.load(b.operand("places", "s32", tokens), dim(0))
    x = b.load_dense(b.operand("x", "f32", tokens * width))
    table = b.operand("table", "f32", (vocabulary - 1) * pitch + width)
    b.store(table, value(place) * pitch + dim(1), x, combine=op)
    return b.finish()


@pytest.mark.parametrize("target", sorted(TARGETS))
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "width,pitch,units", [(768, 768, 5), (100, 100, 2), (100, 128, 2), (64, 7, 1), (1, 1, 1)]
)
def test_rows_are_added_in_order_whoever_adds_them(target, threads, width, pitch, units):
    if not runs_here(TARGETS[target]):
        pytest.skip(f"{target} does not run here")
    plan = embedding_gradient(60, width, 9, pitch)
    sequence = plan_kernels(plan, TARGETS[target])
    (kernel,) = sequence.kernels
    assert isinstance(kernel, ScatterKernel) and kernel.units >= units
    assert kernel.units == 1 or pitch >= width, "pieces of overlapping rows meet"
    rng = np.random.default_rng(0)
    places = rng.integers(0, 9, 60).astype(np.int32)
    x, table = (rng.standard_normal(n).astype(np.float32) for n in (60 * width, 8 * pitch + width))
    named = {"places": places, "x": x, "table": table}
    native = [named[o.name].copy() for o in plan.operands]
    expected = [named[o.name].copy() for o in plan.operands]
    evaluate(plan, expected)
    DirectSequence(sequence, TARGETS[target], threads=threads)(*native)
    for one, wanted in zip(native, expected, strict=True):
        np.testing.assert_array_equal(one, wanted)  # the same additions in the same order


def test_what_cannot_be_divided_is_one_unit():
    def units(plan, in_place=()):
        return plan_kernels(plan, host_target(), in_place).kernels[0].units

    assert units(embedding_gradient(4, 768, 5)) > 1
    assert units(embedding_gradient(4, 768, 5), in_place=(2,)) == 1, "what is read may change"
    assert units(embedding_gradient(4, 0, 5, pitch=1)) == 0
    b = PlanBuilder("histogram", (1000,))
    place = b.load_dense(b.operand("places", "s32", 1000))
    b.store(b.operand("counts", "f32", 10), value(place), b.constant(1.0, "f32"), combine="add")
    histogram = b.finish()
    assert units(histogram) == 1, "any two may meet"
    b = PlanBuilder("total", (3, 100))
    x = b.load_dense(b.operand("x", "f32", 300))
    b.store(b.operand("y", "f32", 1), constant(0), x, combine="add")
    assert units(b.finish()) == 1
    b = PlanBuilder("twice", (3, 100))
    x, y = b.load_dense(b.operand("x", "f32", 300)), b.operand("y", "f32", 400)
    b.store(y, dim(0) * 100 + dim(1), x, combine="add")
    b.store(y, dim(0) * 100 + dim(1) + constant(1), x, combine="add")
    assert units(b.finish()) == 1, "two stores of one result may meet each other"
