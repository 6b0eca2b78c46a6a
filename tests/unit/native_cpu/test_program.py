import ctypes
import dataclasses
import re
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu import ffi, mesh_call
from mpmd.compile.backends.native_cpu.emit.epilogue import PlanEpilogue
from mpmd.compile.backends.native_cpu.emit.kernels import plan_kernels
from mpmd.compile.backends.native_cpu.gemm.kernel import gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.problem import row_major
from mpmd.compile.backends.native_cpu.instance import CompiledProgram, ProgramInstance, compile_program
from mpmd.compile.backends.native_cpu.program import (
    Address,
    Alone,
    Choose,
    Program,
    Repeat,
    Run,
    While,
    sequence_steps,
)
from mpmd.compile.backends.native_cpu.recipes import shared_function
from mpmd.compile.backends.native_cpu.target import host_target, named_target
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import constant, dim
from mpmd.errors import CompileError, ConfigError

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
    return Program("mlp", 6, tuple(steps)), offset


def reference_mlp(x, w1, w2):
    y = x + jax.nn.gelu(x @ w1, approximate=False) @ w2
    return y, y.sum(0)


def arrays(rows=37, width=50, hidden=70):
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal(s).astype(np.float32) for s in ((rows, width), (width, hidden), (hidden, width))
    ]


@pytest.fixture(scope="module")
def pool():
    pool = WorkerPool(3)
    yield pool
    pool.close()


def addresses(*buffers):
    return [b.ctypes.data for b in buffers]


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

    program = Program(
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
    program = Program("alone", 3, steps)
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool if threads > 1 else None)
    for _ in range(30):
        data, result = np.full(size, 5, np.float32), np.zeros(size, np.float32)
        instance(addresses(data, np.zeros(8, np.uint8), result))
        assert (data == 100).all() and (result == 200).all()


def test_steps_must_have_addresses():
    run = Run(gemm_kernel("g", row_major(4, 4, 4), HOST), {"a": Address(0), "b": Address(7)})
    with pytest.raises(CompileError, match="kernel g has no address for c"):
        compile_program(Program("p", 3, (run,)), HOST)
    run = Run(run.kernel, {"a": Address(0), "b": Address(7), "c": Address(1)})
    with pytest.raises(CompileError, match="kernel g: b is at pointer 7 of 3"):
        compile_program(Program("p", 3, (run,)), HOST)


def test_a_pool_serves_many_callers_and_closes():
    program = Program(
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


def registered(threads=1, slots=1, instance=""):
    program, arena_bytes = mlp()
    compiled = ffi.compile_with_handler(program, HOST, arguments=3, results=2, arena=True)
    pools = [WorkerPool(threads) for _ in range(slots)] if threads > 1 else []
    return ffi.register(compiled, HOST, arena_bytes=arena_bytes, slots=slots, pools=pools, instance=instance)


RESULTS = [jax.ShapeDtypeStruct((37, 50), jnp.float32), jax.ShapeDtypeStruct((50,), jnp.float32)]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_is_a_custom_call(threads):
    target = registered(threads, instance=f"threads{threads}")
    call = jax.jit(lambda *a: target(*a, results=RESULTS))
    inputs = [jnp.asarray(a) for a in arrays()]
    for _ in range(5):
        for got, expected in zip(call(*inputs), reference_mlp(*inputs), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-3)
    assert registered(threads, instance=f"threads{threads}") is target, "registered once"
    assert registered(threads, instance="other").target_name != target.target_name


def test_a_large_program_counts_as_work_and_leaves_xla_nothing_to_generate():
    target = registered(instance="large")
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays()]

    def compiled(large):
        return jax.jit(lambda *a: target(*a, results=RESULTS, large=large)).lower(*shapes).compile()

    assert compiled(False).cost_analysis()["flops"] < 1000 < compiled(True).cost_analysis()["flops"]
    text = compiled(True).as_text()
    assert "kind=kLoop" not in text, "code for it would take longer than all else that XLA does"
    assert "iota(" not in text
    for got, expected in zip(compiled(True)(*arrays()), reference_mlp(*arrays()), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)


def test_calls_from_many_threads_share_slots():
    target = registered(slots=2, instance="busy")
    call = jax.jit(lambda *a: target(*a, results=RESULTS))
    x, w1, w2 = (jnp.asarray(a) for a in arrays())
    failures = []

    def work(scale):
        expected = reference_mlp(x * scale, w1, w2)[0]
        for _ in range(30):
            if not np.allclose(call(x * scale, w1, w2)[0], expected, atol=5e-3):
                failures.append(scale)

    callers = [threading.Thread(target=work, args=(k,)) for k in (0.5, 1.0, 2.0)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not failures


def test_donated_memory_is_updated_in_place():
    sequence = elementwise("increment_donated", 5000, "add")
    program = Program("bump_donated", 2, tuple(sequence_steps(sequence, [Address(0), Address(1)], [])))
    compiled = ffi.compile_with_handler(program, HOST, arguments=1, results=1, arena=False)
    target = ffi.register(compiled, HOST)
    shape = jax.ShapeDtypeStruct((5000,), jnp.float32)
    call = jax.jit(lambda x: target(x, results=[shape], aliases={0: 0})[0], donate_argnums=0)
    x = jnp.zeros(5000)
    pointer = x.unsafe_buffer_pointer()
    for _ in range(3):
        x = call(x)
    assert x.unsafe_buffer_pointer() == pointer and (x == 3).all()


def test_a_call_with_other_buffers_is_an_error_and_not_a_crash():
    target = registered(instance="wrong")
    inputs = [jnp.asarray(a) for a in arrays()]
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="takes 3 arguments, and the call has another number"
    ):
        jax.block_until_ready(jax.jit(lambda *a: target(*a, results=RESULTS))(*inputs[:2]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="takes 2 results, and the call has another number"):
        jax.block_until_ready(jax.jit(lambda *a: target(*a, results=RESULTS[:1]))(*inputs))
    with pytest.raises(CompileError, match="takes 6 pointers; 3 arguments, 1 results and an arena make 5"):
        ffi.compile_with_handler(mlp()[0], HOST, arguments=3, results=1, arena=True)


def test_offsets_are_those_of_the_header(monkeypatch):
    """The structs of jaxlib's header, laid out as C does."""
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    sizes = {"size_t": 8, "int64_t": 8, "int": 4, "XLA_FFI_DataType": 4, "XLA_FFI_ExecutionStage": 4}
    sizes |= {"XLA_FFI_Extension_Type": 4, "XLA_FFI_InternalExtension_Type": 4}
    sizes |= {"int32_t": 4, "XLA_FFI_Handler_Traits": 4, "XLA_FFI_Error_Code": 4}

    def layout(name):
        body = re.search(rf"struct {name} \{{(.*?)\}}", text, re.S).group(1)
        body = re.sub(r"//[^\n]*", "", body)
        offset, fields = 0, {}
        pattern = r"([\w ]+?\**)\s+(\w+);|_XLA_FFI_API_STRUCT_FIELD\((\w+)\)"
        for match in re.finditer(pattern, body):
            kind, field = match.group(1), match.group(2) or match.group(3)
            if kind is None or kind.endswith("*"):
                size = align = 8
            elif kind.strip() in sizes:
                size = align = sizes[kind.strip()]
            else:
                size, align = layout(kind.strip())["__size__"], 8
            offset = -(-offset // align) * align
            fields[field] = offset
            offset += size
        fields["__size__"] = -(-offset // 8) * 8
        return fields

    frame, args, rets = layout("XLA_FFI_CallFrame"), layout("XLA_FFI_Args"), layout("XLA_FFI_Rets")
    assert frame["extension_start"] == ffi.FRAME["extension"] and frame["api"] == ffi.FRAME["api"]
    assert frame["stage"] == ffi.FRAME["stage"]
    assert frame["args"] + args["size"] == ffi.FRAME["arg_count"]
    assert frame["args"] + args["args"] == ffi.FRAME["args"]
    assert frame["rets"] + rets["size"] == ffi.FRAME["ret_count"]
    assert frame["rets"] + rets["rets"] == ffi.FRAME["rets"]
    assert layout("XLA_FFI_Buffer")["data"] == ffi.BUFFER_DATA
    base = re.search(r"struct XLA_FFI_Metadata_Extension \{\s*(\w+) ", text).group(
        1
    )  # versions name it differently
    assert layout(base)["type"] == ffi.EXTENSION["type"]
    assert layout("XLA_FFI_Metadata_Extension")["metadata"] == ffi.EXTENSION["metadata"]
    metadata, version = layout("XLA_FFI_Metadata"), layout("XLA_FFI_Api_Version")
    assert metadata["api_version"] + version["major_version"] == ffi.METADATA["major"]
    assert metadata["api_version"] + version["minor_version"] == ffi.METADATA["minor"]
    assert metadata["traits"] == ffi.METADATA["traits"]
    api, offered = layout("XLA_FFI_Api"), ("Error_Create", "RunId_Get", "DeviceOrdinal_Get")
    assert [api[f"XLA_FFI_{name}"] for name in offered] == list(ffi.API.values())
    assert frame["ctx"] == mesh_call.CONTEXT
    assert layout("XLA_FFI_RunId_Get_Args")["run_id"] == mesh_call.ANSWER
    assert layout("XLA_FFI_DeviceOrdinal_Get_Args")["device_ordinal"] == mesh_call.ANSWER
    monkeypatch.setattr(ffi, "API_MINOR", 99)
    ffi.check_version.cache_clear()
    with pytest.raises(CompileError, match=r"native code needs 0\.99 or a later minor version"):
        ffi.check_version()
    ffi.check_version.cache_clear()


def test_workers_flush_denormals_if_their_caller_does(pool):
    """Set flush-to-zero around a job: every thread's share must come out the same."""
    if not HOST.is_x86:
        pytest.skip("sets the control register of x86")
    size = 50_000
    sequence = elementwise("halve", size, "multiply", number=0.5)
    program = Program("halve_all", 2, tuple(sequence_steps(sequence, [Address(0), Address(1)], [])))
    instance = ProgramInstance(compile_program(program, HOST), HOST, pool)
    tiny, out = np.full(size, 1e-40, np.float32), np.zeros(size, np.float32)
    instance(addresses(tiny, out))
    assert (out != 0).all()
    from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
    from mpmd.compile.backends.native_cpu.llvm.engine import compile_module
    from mpmd.compile.backends.native_cpu.llvm.module import Module

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
    steps = [
        r for k in range(12) for r in sequence_steps(kernel, [Address(0), Address(1 + k)], [], waits=False)
    ]
    assert all(step.kernel.units == 1 for step in steps)
    instance = ProgramInstance(compile_program(Program("many", 13, tuple(steps)), HOST), HOST)
    x = np.arange(64, dtype=np.float32)
    written = np.zeros((threads, 12, 64), np.float32)
    for thread in range(threads):
        table = (ctypes.c_void_p * 15)(
            x.ctypes.data,
            *(y.ctypes.data for y in written[thread]),
            instance.workspaces.ctypes.data,
            instance.barrier_address,
        )
        instance._run(thread, threads, ctypes.addressof(table))
    done = (written == x + 1).all(-1)
    assert (done.sum(0) == 1).all() and (done.sum(1) == 12 // threads).all()


def test_a_chain_of_small_kernels_stays_on_one_thread():
    """Data that one thread made is in its cache: who waits does not take turns."""
    kernel = elementwise("add_one", 64, "add")
    steps = [r for k in range(4) for r in sequence_steps(kernel, [Address(k), Address(k + 1)], [])]
    text = compile_program(Program("chain", 5, tuple(steps)), HOST).llvm
    assert "urem" not in text
    apart = [
        r for k in range(4) for r in sequence_steps(kernel, [Address(0), Address(k + 1)], [], waits=False)
    ]
    assert "urem" in compile_program(Program("apart", 5, tuple(apart)), HOST).llvm
