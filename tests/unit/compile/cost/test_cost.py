import dataclasses

import numpy as np
import pytest

from examples.workloads.direct import DirectSequence
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.cost.kernel_work import plan_workload, product_workloads
from mpmd.compile.kernels.index import dim, linear
from mpmd.compile.kernels.kernel_plan import may_share
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from mpmd.compile.llvm.cpu import host_target
from mpmd.cost.device import H200, cpu_device
from mpmd.cost.roofline import projected, speed_of_light

CPU = cpu_device(
    "test",
    cores=2,
    vector_bytes=64,
    registers=32,
    f32_flops=100e9,
    bf16_flops=200e9,
    memory_bandwidth=10e9,
    caches=(32 << 10, 1 << 20, 32 << 20),
)


def elementwise(size, ops=1, dtype="f32"):
    b = PlanBuilder("elementwise", (size,))
    v = b.convert(b.load_dense(b.operand("x", dtype, size)), "f32")
    for _ in range(ops):
        v = b.apply("tanh", b.apply("add", v, b.constant(1.0, "f32")))
    b.store_dense(b.operand("y", dtype, size), b.convert(v, dtype))
    return b.finish()


def softmax(rows, width):
    b = PlanBuilder("softmax", (rows, width), row_dims=1)
    v = b.load_dense(b.operand("x", "f32", rows * width))
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    b.store_dense(b.operand("y", "f32", rows * width), b.apply("divide", e, b.reduce_row("add", e)))
    return b.finish()


def product(m, n, k, dtype="f32"):
    a, b, c = View(dtype, 0, k, 1), View(dtype, 0, n, 1), View(dtype, 0, n, 1)
    (work,) = product_workloads(MatmulPlan("product", (), m, n, k, a, b, c))
    return work


def test_workloads_count_what_is_there():
    work = plan_workload(elementwise(1000))
    assert (work.read_bytes, work.written_bytes, work.again_bytes, work.flops) == (4000, 4000, 0, 2000)
    half = plan_workload(elementwise(1000, dtype="bf16"))
    assert half.memory_bytes == 4000
    b = PlanBuilder("bias", (10, 100))
    v = b.apply(
        "add", b.load_dense(b.operand("x", "f32", 1000)), b.load_dense(b.operand("b", "f32", 100), (1,))
    )
    b.store_dense(b.operand("y", "f32", 1000), v)
    bias = plan_workload(b.finish())
    assert (bias.read_bytes, bias.again_bytes) == (4400, 3600), "the bias is read once and then again"
    rows = plan_workload(softmax(8, 50))
    assert rows.kind == "row" and rows.rows == 16 and rows.parts == 8
    assert rows.again_bytes == 8 * 50 * 4, "the row is read by two passes"
    b = PlanBuilder("across", (100, 100))
    b.store_dense(
        b.operand("y", "f32", 10_000),
        b.load(b.operand("x", "f32", 10_000), linear([dim(1), dim(0)], (100, 1))),
    )
    assert plan_workload(b.finish()).scattered_elements == 10_000


def test_models_order_kernels_as_hardware_does():
    light, heavy = (plan_workload(elementwise(1 << 22, ops=k)) for k in (1, 12))
    assert projected(light, CPU).limiter == "memory" and projected(heavy, CPU).limiter == "compute"
    assert projected(heavy, CPU).seconds > 3 * projected(light, CPU).seconds
    small, large = (plan_workload(elementwise(k)) for k in (1 << 12, 1 << 22))
    per_byte = [projected(w, CPU).memory_seconds / w.memory_bytes for w in (small, large)]
    assert per_byte[0] < per_byte[1], "caches are faster than memory"
    one_row, many_rows = plan_workload(softmax(1, 1 << 16)), plan_workload(softmax(64, 1 << 10))
    assert projected(one_row, CPU).seconds > 1.5 * projected(many_rows, CPU).seconds, "one row is one thread"
    for work in (light, heavy, small, one_row, product(512, 512, 512)):
        for device in (CPU, H200):
            assert 0 < speed_of_light(work, device).seconds <= projected(work, device).seconds * 1.0001


@pytest.mark.parametrize(
    ("fewer", "more", "limit"),
    [
        ({"live_values": CPU.registers - 4}, {"live_values": CPU.registers}, "compute_seconds"),
        ({"rows": 0}, {"rows": 1000}, "compute_seconds"),
        ({"scattered_elements": 0.0}, {"scattered_elements": 1e6}, "compute_seconds"),
        ({"scattered_elements": 0.0}, {"scattered_elements": 1e6, "scattered_bytes": 4e6}, "memory_seconds"),
        ({"again_bytes": 0.0}, {"again_bytes": 1e6}, "memory_seconds"),
        ({"parts": 2}, {"parts": 1}, "compute_seconds"),
    ],
)
def test_everything_that_costs_is_priced(fewer, more, limit):
    work = plan_workload(elementwise(1 << 20))
    cheap, dear = (projected(dataclasses.replace(work, **change), CPU) for change in (fewer, more))
    assert getattr(cheap, limit) < getattr(dear, limit)
    assert cheap.seconds < dear.seconds


def test_matmul_prices_follow_dtype_and_shape():
    big = product(1024, 1024, 1024)
    assert projected(big, CPU).limiter == "compute"
    assert projected(big, CPU).seconds == pytest.approx(big.flops / (200e9 * 0.92), rel=0.1)
    half = product(1024, 1024, 1024, "bf16")
    assert 1.8 < projected(big, CPU).seconds / projected(half, CPU).seconds < 2.2
    assert speed_of_light(product(1, 4096, 4096), CPU).limiter == "memory"


def test_sharing_is_allowed_exactly_when_running_in_place_gives_the_same():
    """What may_share allows is run with one array for both; what it must refuse has a reason each."""

    def softmax_from(place):
        b = PlanBuilder("softmax", (6, 40), row_dims=1)
        v = b.load(b.operand("x", "f32", 240), place)
        e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
        b.store_dense(b.operand("y", "f32", 240), b.apply("divide", e, b.reduce_row("add", e)))
        return b.finish()

    dense = linear([dim(0), dim(1)], (40, 1))
    allowed = softmax_from(dense)
    assert may_share(allowed, 0, 1)
    x = np.random.default_rng(0).standard_normal(240).astype(np.float32)
    kernel = DirectSequence(plan_kernels(allowed, host_target()), host_target())
    apart, shared = np.zeros(240, np.float32), x.copy()
    kernel(x, apart)
    kernel(shared, shared)
    np.testing.assert_array_equal(apart, shared)

    assert not may_share(softmax_from(linear([dim(0), dim(1) * -1 + 39], (40, 1))), 0, 1), "read elsewhere"
    b = PlanBuilder(
        "early", (6, 40), row_dims=1
    )  # y is written in the first pass, x read again in the second
    v = b.load_dense(b.operand("x", "f32", 240))
    b.store_dense(b.operand("y", "f32", 240), b.apply("negate", v))
    b.store_dense(b.operand("z", "f32", 240), b.apply("subtract", v, b.reduce_row("add", v)))
    early = b.finish()
    assert not may_share(early, 0, 1) and may_share(early, 0, 2)
    assert may_share(elementwise(100), 0, 1)
    b = PlanBuilder("wider", (50,))
    b.store_dense(b.operand("y", "f32", 50), b.convert(b.load_dense(b.operand("x", "s32", 50)), "f32"))
    assert not may_share(b.finish(), 1, 0), "another dtype"
