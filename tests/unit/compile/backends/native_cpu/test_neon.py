"""Everything compiles for a machine that is not here, and runs there: no x86 instruction, no missing case."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.workloads.direct import row_major
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.loading import shared_function
from mpmd.compile.backends.native_cpu.native_program import Address, Run, ThreadedProgram, sequence_steps
from mpmd.compile.backends.native_cpu.threads import PoolRun, PoolWorker
from mpmd.compile.hlo import parse_module
from mpmd.compile.kernels.index import dim, value
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.planner.sorting import plan_sort_prefix
from mpmd.compile.llvm.cpu import named_target
from mpmd.compile.llvm.engine import emit_assembly
from mpmd.compile.llvm.function_builder import Module
from tests.support.emulated_arm import needs_emulator, run

NEON = named_target("neon")


def kernel_plans():
    b = PlanBuilder("softmax", (6, 37), row_dims=1)
    v = b.convert(b.load_dense(b.operand("x", "bf16", 222)), "f32")
    e = b.apply("exponential", b.apply("subtract", v, b.reduce_row("maximum", v)))
    b.store_dense(
        b.operand("y", "bf16", 222), b.convert(b.apply("divide", e, b.reduce_row("add", e)), "bf16")
    )
    b.store_dense(b.operand("s", "f32", 37), b.reduce_column("add", e), (1,))
    yield b.finish()
    b = PlanBuilder("turn", (40, 30))
    b.store_dense(b.operand("y", "f16", 1200), b.load(b.operand("x", "f16", 1200), dim(1) * 40 + dim(0)))
    yield b.finish()
    b = PlanBuilder("pick", (50,))
    at = b.load_dense(b.operand("i", "s32", 50))
    b.store_dense(b.operand("y", "f64", 50), b.load(b.operand("x", "f64", 9), value(at)))
    yield b.finish()
    yield plan_sort_prefix("best", *first_of_sorted("f32[3,90]", "f32[3,5]"))[0]


def first_of_sorted(full, part):
    """The members and the results of the beginning of a sort."""
    module = parse_module(
        "HloModule s\nless { a = f32[] parameter(0)\n b = f32[] parameter(1)\n"
        " ROOT r = pred[] compare(a, b), direction=LT }\n"
        f"ENTRY main {{ x = {full} parameter(0)\n s = {full} sort(x), dimensions={{1}}, to_apply=less\n"
        f" ROOT w = {part} slice(s), slice={{[0:3], [0:5]}} }}"
    )
    root = module.entry.root
    return [root.operands[0], root], [root]


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_a_program_with_everything_compiles_for_neon(dtype):
    program_steps = [
        Run(gemm_kernel("product", row_major(37, 45, 70, dtype), NEON), {p: Address(0) for p in "abc"})
    ]
    for plan in kernel_plans():
        sequence = plan_kernels(plan, NEON)
        operands = [Address(0)] * len(plan.operands)
        program_steps += sequence_steps(sequence, operands, [Address(0)] * len(sequence.temporaries))
    module = Module(NEON)
    shared = ThreadedProgram("everything", 1, tuple(program_steps)).emit(module)
    assembly = emit_assembly(module)
    for name in sorted({s.name for s in shared} | module.imports()):
        part = Module(NEON)
        shared_function(name).emit(part)
        assembly += emit_assembly(part)
    assert "fmla" in assembly and "x86" not in assembly and "%zmm" not in assembly


def test_threads_compile_for_neon():
    module = Module(NEON)
    PoolRun().emit(module)
    PoolWorker().emit(module)
    assembly = emit_assembly(module)
    assert "yield" in assembly and "fpcr" in assembly.lower()


def layer(x, w1, w2, scale):
    """A normalised layer with two products, a softmax and a residual."""
    mean = x.mean(-1, keepdims=True)
    normal = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    return x + jax.nn.softmax(jax.nn.gelu(normal @ w1), axis=-1) @ w2, normal.sum(0)


def attention(q, k, v):
    """One head, causal."""
    scores = jnp.where(jnp.tri(q.shape[0], dtype=bool), q @ k.T / 4, -1e9)
    return (jax.nn.softmax(scores, axis=-1) @ v,)


def integers(numbers, table):
    """Rows by index, a sort, and a transpose, of integers."""
    return table[numbers % table.shape[0]].T, jnp.sort(numbers)[:5], jnp.cumsum(numbers)


def floats(*shapes, dtype="float32"):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape) / 3).astype(dtype) for shape in shapes]


@needs_emulator
@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arguments", "tolerance"),
    [
        (layer, floats((37, 50), (50, 70), (70, 50), (50,)), 2e-5),
        (layer, floats((16, 64), (64, 64), (64, 64), (64,), dtype=jnp.bfloat16), 2e-2),
        (attention, floats((33, 16), (33, 16), (33, 16)), 2e-5),
        (integers, [np.arange(60, dtype=np.int32)[::-1] * 7, np.arange(40, dtype=np.int32).reshape(8, 5)], 0),
    ],
    ids=["f32", "bf16", "attention", "integers"],
)
def test_programs_run_in_an_emulator(function, arguments, tolerance, tmp_path):
    wanted = jax.jit(function)(*arguments)
    for got, expected in zip(run(function, arguments, tmp_path), wanted, strict=True):
        np.testing.assert_allclose(got.astype("f8"), np.asarray(expected).astype("f8"), tolerance, tolerance)
