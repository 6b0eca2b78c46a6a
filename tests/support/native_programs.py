"""Native programs written by hand: one kernel, and a small network of products and kernels."""

import jax
import numpy as np

from examples.workloads.direct import row_major
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.kernels.loop import PlanEpilogue
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.native_program import Address, Run, ThreadedProgram, sequence_steps
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target

HOST = host_target()


def elementwise(name, size, op, dtype="f32", number=1.0):
    """y = op(x, number)"""
    b = PlanBuilder(name, (size,))
    x = b.load_dense(b.operand("x", dtype, size))
    b.store_dense(b.operand("y", dtype, size), b.apply(op, x, b.constant(number, dtype)))
    return plan_kernels(b.finish(), HOST)


def mlp(rows=37, width=50, hidden=70):
    """y = x + gelu(x @ w1) @ w2 with the hidden layer in the arena; column sums of y beside it.

    Table: x, w1, w2 | y, sums | arena.
    """
    b = PlanBuilder("gelu", (rows, hidden))
    u = b.load_dense(b.operand("u", "f32", rows * hidden))
    half = b.apply("multiply", u, b.constant(0.5, "f32"))
    erf = b.apply("erf", b.apply("multiply", u, b.constant(0.5**0.5, "f32")))
    b.store_dense(
        b.operand("h", "f32", rows * hidden),
        b.apply("multiply", half, b.apply("add", erf, b.constant(1.0, "f32"))),
    )
    first = gemm_kernel("up", row_major(rows, hidden, width), HOST, PlanEpilogue(b.finish(), 0))
    b = PlanBuilder("residual", (rows, width))
    total = b.apply(
        "add",
        b.load_dense(b.operand("u", "f32", rows * width)),
        b.load_dense(b.operand("x", "f32", rows * width)),
    )
    b.store_dense(b.operand("y", "f32", rows * width), total)
    second = gemm_kernel("down", row_major(rows, width, hidden), HOST, PlanEpilogue(b.finish(), 0))
    b = PlanBuilder("sums", (rows, width), row_dims=1)
    b.store_dense(
        b.operand("s", "f32", width),
        b.reduce_column("add", b.load_dense(b.operand("y", "f32", rows * width))),
        (1,),
    )
    sums = plan_kernels(b.finish(), HOST)
    x, w1, w2, y, s, arena = (Address(k) for k in range(6))
    temporaries, offset = [], rows * hidden * 4
    for temporary in sums.temporaries:
        offset = -(-offset // 64) * 64
        temporaries.append(Address(5, offset))
        offset += temporary.bytes
    steps = [
        Run(first, {"a": x, "b": w1, "p1": arena}),
        Run(second, {"a": arena, "b": w2, "p1": x, "p2": y}),
        *sequence_steps(sums, [s, y] if sums.plan.operands[0].name == "s" else [y, s], temporaries),
    ]
    return ThreadedProgram("mlp", 6, tuple(steps)), offset


def reference_mlp(x, w1, w2):
    y = x + jax.nn.gelu(x @ w1, approximate=False) @ w2
    return y, y.sum(0)


def arrays(rows=37, width=50, hidden=70):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (width, hidden), (hidden, width))
    ]


def addresses(*buffers):
    return [b.ctypes.data for b in buffers]
