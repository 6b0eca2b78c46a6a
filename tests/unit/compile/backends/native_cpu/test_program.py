"""Native programs without JAX: steps, threads, what is stored, and what is refused."""

import ctypes
import dataclasses
import threading
from dataclasses import replace

import numpy as np
import pytest

from examples.workloads.direct import program_array, row_major
from mpmd.compile.backends.native_cpu.ffi import program_memory
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.backends.native_cpu.loading import CompiledProgram, compile_program, shared_function
from mpmd.compile.backends.native_cpu.native_program import (
    Address,
    Alone,
    Choose,
    Repeat,
    Run,
    ThreadedProgram,
    While,
    sequence_steps,
)
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.kernels.index import constant, dim
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.errors import CompileError, ConfigError
from tests.support.native_programs import addresses, arrays, elementwise, mlp, reference_mlp
from tests.support.program_instance import ProgramInstance

HOST = host_target()


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(3)
    yield pool
    pool.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_program_runs_without_jax(threads, pool):
    program, arena_bytes = mlp()
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool if threads > 1 else None)
    inputs = arrays()
    y, sums = np.zeros((37, 50), np.float32), np.zeros(50, np.float32)
    arena = np.zeros(arena_bytes, np.uint8)
    for _ in range(20):
        y[:] = sums[:] = 0
        instance(addresses(*inputs, y, sums, arena))
        expected = reference_mlp(*inputs)
        np.testing.assert_allclose(y, expected[0], atol=2e-4)
        np.testing.assert_allclose(sums, expected[1], atol=2e-3)
    with pytest.raises(TypeError, match="program mlp takes 6 pointers, got 1"):
        instance([0])


@pytest.mark.parametrize("size", [64, 5000, 1 << 20, (1 << 20) + 1, 5 << 20])
def test_memory_of_programs_can_be_written_from_end_to_end(size):
    """Small memory, memory of a huge page in part, and of several: each its own, and all of it."""
    memory, other = program_memory(size), program_memory(size)
    assert memory.shape == (size,) and memory.ctypes.data % 64 == 0
    memory[:], other[:] = 1, 2
    assert (memory == 1).all() and (other == 2).all()


def test_more_memory_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError, match="no memory for|allocate"):
        program_memory(1 << 60)


@pytest.mark.parametrize("rows", [3, 1 << 13])
def test_arrays_in_memory_that_a_program_keeps(rows):
    array, other = (program_array((rows, 100), np.float32) for _ in range(2))
    assert array.shape == (rows, 100) and array.dtype == np.float32
    assert array.ctypes.data % 64 == 0
    array[...], other[...] = 1, 2
    assert (array == 1).all() and (other == 2).all()


def test_stored_programs_load_again_and_damaged_ones_do_not():
    compiled = compile_program(mlp()[0], HOST)
    assert compiled == compile_program(mlp()[0], HOST), "the same program gives the same bytes"
    stored = CompiledProgram(**dataclasses.asdict(compiled))
    assert stored.fingerprint == compiled.fingerprint
    assert [shared_function(name).name for name in stored.imports] == list(stored.imports)
    stored.load(HOST)
    with pytest.raises(CompileError, match="cannot load compiled code"):
        dataclasses.replace(compiled, code=compiled.code[:300]).load(HOST)
    with pytest.raises(CompileError, match="calls mpmd_gemm_f99, which this version does not have"):
        dataclasses.replace(compiled, imports=("mpmd_gemm_f99",)).load(HOST)
    with pytest.raises(CompileError, match="does not run on this machine"):
        ProgramInstance(compiled, named_target("neon"))


def test_loops_and_branches(pool):
    """x += 1 five times; x *= 2 while x[0] < 100; then one of three branches subtracts."""
    size = 1000
    one = elementwise("increment", size, "add")
    double = elementwise("double", size, "multiply", number=2.0)
    branches = [elementwise(f"minus{k}", size, "subtract", number=float(k)) for k in (1, 10, 100)]
    b = PlanBuilder("below", (1,))
    x0 = b.load(b.operand("x", "f32", size), constant(0))
    b.store(b.operand("flag", "pred", 1), dim(0), b.apply("compare-lt", x0, b.constant(100.0, "f32")))
    below = plan_kernels(b.finish(), HOST)
    x, flag, which = Address(0), Address(1, 3), Address(2)

    def on_x(sequence):
        return tuple(sequence_steps(sequence, [x, x], []))

    program = ThreadedProgram(
        "control",
        3,
        (
            Repeat(5, on_x(one)),
            While(tuple(sequence_steps(below, [x, flag], [])), flag, on_x(double)),
            Choose(which, tuple(on_x(s) for s in branches)),
        ),
    )
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool)
    for start, chosen in ((0.0, 0), (300.0, 1), (-4.5, 2), (1.0, 7), (1.0, -1)):
        data, selector = np.full(size, start, np.float32), np.array([chosen], np.int32)
        instance(addresses(data, np.zeros(8, np.uint8), selector))
        expected = start + 5
        while expected < 100:
            expected *= 2
        expected -= (1, 10, 100)[chosen if 0 <= chosen < 3 else 2]
        np.testing.assert_array_equal(data, np.float32(expected))


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_of_the_first_thread_alone(threads, pool):
    """x += 1 by all; then by the first alone, twice and in a loop while x[0] < 100; then y = 2 x by all."""
    size = 5000
    one, double = elementwise("increment", size, "add"), elementwise("double", size, "multiply", number=2.0)
    b = PlanBuilder("below", (1,))
    x0 = b.load(b.operand("x", "f32", size), constant(0))
    b.store(b.operand("flag", "pred", 1), dim(0), b.apply("compare-lt", x0, b.constant(100.0, "f32")))
    below = plan_kernels(b.finish(), HOST)
    x, flag, y = Address(0), Address(1, 3), Address(2)
    increment = tuple(sequence_steps(one, [x, x], []))
    loop = While(tuple(sequence_steps(below, [x, flag], [])), flag, increment)
    steps = (*increment, Alone((*increment, *increment, loop)), *sequence_steps(double, [x, y], []))
    program = ThreadedProgram("alone", 3, steps)
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool if threads > 1 else None)
    for _ in range(30):
        data, result = np.full(size, 5, np.float32), np.zeros(size, np.float32)
        instance(addresses(data, np.zeros(8, np.uint8), result))
        assert (data == 100).all() and (result == 200).all()


def test_steps_must_have_addresses():
    run = Run(gemm_kernel("g", row_major(4, 4, 4), HOST), {"a": Address(0), "b": Address(7)})
    with pytest.raises(CompileError, match="kernel g has no address for c"):
        compile_program(ThreadedProgram("p", 3, (run,)), HOST)
    run = Run(run.kernel, {"a": Address(0), "b": Address(7), "c": Address(1)})
    with pytest.raises(CompileError, match="kernel g: b is at pointer 7 of 3"):
        compile_program(ThreadedProgram("p", 3, (run,)), HOST)


def test_a_pool_serves_many_callers_and_closes():
    program = ThreadedProgram(
        "bump", 1, tuple(sequence_steps(elementwise("increment", 3000, "add"), [Address(0)] * 2, []))
    )
    pool = WorkerPool(2)
    compiled = compile_program(program, HOST)
    instances = [ProgramInstance(compiled, HOST, pool) for _ in range(3)]
    data = [np.zeros(3000, np.float32) for _ in instances]

    def work(instance, array):
        for _ in range(200):
            instance(addresses(array))

    callers = [threading.Thread(target=work, args=pair) for pair in zip(instances, data, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for array in data:
        assert (array == 200).all()
    pool.close()
    pool.close()
    with pytest.raises(ConfigError, match="the pool of native threads is closed"):
        instances[0](addresses(data[0]))
    with pytest.raises(ConfigError, match="at least one thread, got 0"):
        WorkerPool(0)


def test_workers_flush_denormals_if_their_caller_does(pool):
    """Set flush-to-zero around a job: every thread's share must come out the same."""
    if not HOST.is_x86:
        pytest.skip("sets the control register of x86")
    size = 50_000
    sequence = elementwise("halve", size, "multiply", number=0.5)
    program = ThreadedProgram("halve_all", 2, tuple(sequence_steps(sequence, [Address(0), Address(1)], [])))
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool)
    tiny, out = np.full(size, 1e-40, np.float32), np.zeros(size, np.float32)
    instance(addresses(tiny, out))
    assert (out != 0).all()
    module = Module(HOST)
    with FunctionBuilder(module, "set_mode", [("mode", "ptr")]) as f:
        module.declare("llvm.x86.sse.ldmxcsr", "void", ("ptr",))
        f.emit(f"call void @llvm.x86.sse.ldmxcsr(ptr {f.arguments['mode']})")
    set_mode = compile_module(module, ["set_mode"]).function("set_mode", ctypes.c_void_p)
    normal, flushing = np.array([0x1F80], np.uint32), np.array([0x9FC0], np.uint32)
    set_mode(flushing.ctypes.data)
    try:
        instance(addresses(tiny, out))
    finally:
        set_mode(normal.ctypes.data)
    assert (out == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_kernels_that_cannot_be_divided_are_divided_among_the_threads(threads):
    """Twelve kernels of one unit that do not wait: each thread does as many, and all together each once."""
    kernel = elementwise("add_one", 64, "add")
    steps = [r for k in range(12) for r in sequence_steps(kernel, [Address(0), Address(1 + k)], [])]
    steps = [replace(step, waits=False) for step in steps]
    assert all(step.kernel.units == 1 for step in steps)
    instance = ProgramInstance(compile_program(ThreadedProgram("many", 13, tuple(steps)), HOST), HOST)
    x = np.arange(64, dtype=np.float32)
    written = np.zeros((threads, 12, 64), np.float32)
    for thread in range(threads):
        table = (ctypes.c_void_p * 15)(
            x.ctypes.data,
            *(y.ctypes.data for y in written[thread]),
            instance.workspaces.ctypes.data,
            instance.barrier_address,
        )
        instance.run(thread, threads, ctypes.addressof(table))
    done = (written == x + 1).all(-1)
    assert (done.sum(0) == 1).all() and (done.sum(1) == 12 // threads).all()


def test_a_chain_of_small_kernels_stays_on_one_thread():
    """Data that one thread made is in its cache: who waits does not take turns."""
    kernel = elementwise("add_one", 64, "add")
    steps = [r for k in range(4) for r in sequence_steps(kernel, [Address(k), Address(k + 1)], [])]
    text = compile_program(ThreadedProgram("chain", 5, tuple(steps)), HOST).llvm
    assert "urem" not in text
    apart = [r for k in range(4) for r in sequence_steps(kernel, [Address(0), Address(k + 1)], [])]
    apart = [replace(step, waits=False) for step in apart]
    assert "urem" in compile_program(ThreadedProgram("apart", 5, tuple(apart)), HOST).llvm
