import ctypes
import gc
import math
from pathlib import Path

import llvmlite.binding as binding
import numpy as np
import pytest

from mpmd.compile.llvm import cpu
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.llvm.engine import (
    compile_module,
    emit_assembly,
    emit_object,
    load_object,
    unmap_compiler_code,
)
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import constant, suffix, vector, vector_constant
from mpmd.errors import CompileError, ConfigError
from mpmd.runtime.run import host_memory
from tests.support.targets import runs_here

POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64


def clamp_kernel(target, name="clamp"):
    """y[i] = max(x[i], 0.5) for i < n, whole vectors with a masked tail."""
    module, lanes = Module(target), target.lanes()
    type_ = vector("float", lanes)
    with FunctionBuilder(module, name, [("x", "ptr"), ("y", "ptr"), ("n", "i64")]) as f:
        x, y, n = f.arguments.values()
        with f.loop(0, n, lanes) as loop:
            left = f.cast("trunc", f.index(f.isub(n, loop.i)), "i32")
            mask = f.compare("slt", f.lane_numbers(lanes), f.splat(left, lanes))
            value = f.masked_load(x, type_, mask, loop.i)
            f.masked_store(f.maximum(value, constant(0.5, type_)), y, mask, loop.i)
    return module


@pytest.mark.parametrize("name", ["host", "avx2", "avx512"])
def test_masked_tail_and_nan_on_every_width(name):
    cpu = host_target() if name == "host" else named_target(name)
    if not runs_here(cpu):
        pytest.skip(f"{name} does not run here")
    clamp = compile_module(clamp_kernel(cpu), ["clamp"]).function("clamp", POINTER, POINTER, INTEGER)
    x = np.random.default_rng(0).standard_normal(37).astype(np.float32)
    x[3] = np.nan
    y = np.full(64, 7, np.float32)
    clamp(x.ctypes.data, y.ctypes.data, 37)
    np.testing.assert_array_equal(y[:37], np.maximum(x, np.float32(0.5)))
    assert (y[37:] == 7).all(), "lanes past the end were written"


def test_neon_code_is_emitted_without_an_arm_machine():
    cpu = named_target("neon")
    assert cpu.lanes("float") == 4 and not runs_here(cpu)
    assembly = emit_assembly(clamp_kernel(cpu))
    assert ".4s" in assembly and "zmm" not in assembly


def test_others_in_the_process_generate_code_as_before():
    """Our code has its addresses as emitted; a pass of LLVM that changes them is disabled only meanwhile."""

    def by_llvmlite():
        machine = binding.Target.from_default_triple().create_target_machine(
            cpu=cpu.cpu, features=cpu.features, opt=2, reloc="pic", codemodel="small", jit=True
        )
        return machine.emit_object(binding.parse_assembly(kernel.text(), binding.create_context()))

    cpu = host_target()
    kernel = clamp_kernel(cpu)
    before = by_llvmlite()
    assert emit_object(kernel) != before
    assert by_llvmlite() == before


def test_objects_reload_and_code_outlives_its_handle():
    module = clamp_kernel(host_target())
    data = emit_object(module)
    assert data == emit_object(clamp_kernel(host_target())), "the same module gives the same bytes"
    function = load_object(data, ["clamp"]).function("clamp", POINTER, POINTER, INTEGER)
    gc.collect()
    x = np.zeros(3, np.float32)
    function(x.ctypes.data, x.ctypes.data, 3)
    assert (x == 0.5).all()


def test_unloaded_code_leaves_nothing_behind():
    """LLVM keeps 9 KB of each library that is unloaded, until the JIT compiler that loaded it goes."""
    if host_memory.freed_memory() is None:
        pytest.skip("this C library does not say what it has given out")
    data = emit_object(clamp_kernel(host_target()))
    first = load_object(data, ["clamp"])
    given_out = []
    for _ in range(3):
        for _ in range(32):
            load_object(data, ["clamp"])
        gc.collect()
        given_out.append(host_memory.given_out())
    assert abs(given_out[-1] - given_out[-2]) / 32 < 1000
    x = np.zeros(3, np.float32)
    first.function("clamp", POINTER, POINTER, INTEGER)(x.ctypes.data, x.ctypes.data, 3)
    assert (x == 0.5).all(), "code lives on when the compiler that loaded it is replaced"


def test_code_calls_other_loaded_code_and_libm():
    cpu = host_target()
    library = Module(cpu)
    with FunctionBuilder(library, "twice", [("x", "float")], result="float") as f:
        f.ret(f.add(f.arguments["x"], f.call("expm1f", f.arguments["x"], result="float")))
    caller = Module(cpu)
    with FunctionBuilder(caller, "caller", [("x", "float")], result="float") as f:
        f.ret(f.call("twice", f.arguments["x"], result="float"))
    code = compile_module(caller, ["caller"], {"twice": compile_module(library, ["twice"])})
    gc.collect()
    function = code.function("caller", ctypes.c_float, result=ctypes.c_float)
    assert function(1.0) == pytest.approx(math.e, rel=1e-6)


def test_loop_carries_values_and_branches_join():
    module = Module(host_target())
    with FunctionBuilder(module, "odd_sum", [("n", "i64")], result="i64") as f:
        with f.loop(0, f.arguments["n"], carried=[constant(0, "i64")]) as loop:
            odd = f.compare("ne", f.index(f.irem(loop.i, 2)), constant(0, "i64"))
            with f.branch_value(odd, loop.carried[0]) as branch:
                branch.value = f.add(loop.carried[0], loop.i)
            loop.carry([branch.result()])
        f.ret(loop.carried[0])
    code = compile_module(module, ["odd_sum"])
    assert code.function("odd_sum", INTEGER, result=INTEGER)(10) == 1 + 3 + 5 + 7 + 9


def test_wrong_code_is_a_compile_error_and_not_a_crash():
    module = clamp_kernel(host_target())
    module.add_function("bad", "define i32 @bad() { ret void }")
    with pytest.raises(CompileError, match="LLVM refused the generated code"):
        emit_object(module)
    data = emit_object(clamp_kernel(host_target()))
    with pytest.raises(CompileError, match="cannot load compiled code"):
        load_object(data[:200], ["clamp"])
    with pytest.raises(CompileError, match="does not define all of missing"):
        load_object(data, ["missing"])
    with pytest.raises(ConfigError, match="no CPU target is named 'sse9'"):
        named_target("sse9")


def test_constants_are_exact():
    assert str(constant(0.1, "float")) == "0x3FB99999A0000000"
    assert str(constant(-0.0, "double")) == "0x8000000000000000"
    assert str(constant(1.0, "bfloat")) == "0xR3F80"
    assert str(constant(65519.0, "half")) == "0xH7BFF"
    assert str(constant(1e40, "float")) == "0x7FF0000000000000"
    assert str(constant(255, "i8")) == "-1"
    assert str(constant(True, vector("i1", 4))) == "splat (i1 true)"
    assert suffix("<16 x bfloat>") == "v16bf16"
    assert vector_constant([1, 2], "i32").typed == "<2 x i32> <i32 1, i32 2>"


AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}


@pytest.mark.parametrize(
    ("triple", "features", "row"),
    [
        ("x86_64-unknown-linux-gnu", AVX512 | {"avx512bf16"}, "avx512_bf16"),
        ("x86_64-unknown-linux-gnu", AVX512, "avx512"),
        ("x86_64-unknown-linux-gnu", {"avx2", "fma", "avx512f"}, "avx2"),
        ("aarch64-unknown-linux-gnu", {"sve"}, "neon"),
    ],
)
def test_a_machine_is_the_widest_row_that_it_has(triple, features, row, monkeypatch):
    monkeypatch.setattr(cpu.binding, "get_process_triple", lambda: triple)
    monkeypatch.setattr(cpu.binding, "get_host_cpu_name", lambda: "this")
    monkeypatch.setattr(cpu.binding, "get_host_cpu_features", lambda: dict.fromkeys(features, True))
    found, generic = host_target.__wrapped__(), named_target(row)
    assert (found.triple, found.cpu) == (triple, "this")
    for field in ("vector_bytes", "vector_registers", "mask_registers", "bf16_dot"):
        assert getattr(found, field) == getattr(generic, field)


def test_a_machine_without_vectors_is_refused(monkeypatch):
    monkeypatch.setattr(cpu.binding, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(cpu.binding, "get_host_cpu_features", lambda: {"sse4.2": True, "avx2": False})
    with pytest.raises(ConfigError, match="the native backend needs AVX2 with FMA, AVX-512 or NEON"):
        host_target.__wrapped__()


def resident_code():
    """Resident KiB of the code of LLVM's library; each of them was read from its file."""
    sizes, of_code = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *rest = line.split()
        if "-" in key:
            of_code = rest[0] == "r-xp" and "libllvmlite" in line
        elif of_code and key == "Rss:":
            sizes.append(int(rest[0]))
        elif of_code and key == "Anonymous:":
            assert int(rest[0]) == 0
    return sum(sizes)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_the_code_of_llvm_is_not_resident_between_compilations():
    assert unmap_compiler_code() > 10 << 20 and resident_code() < 1 << 10
    x, y = np.zeros(8, np.float32), np.zeros(8, np.float32)
    compile_module(clamp_kernel(host_target()), ["clamp"]).function("clamp", POINTER, POINTER, INTEGER)(
        x.ctypes.data, y.ctypes.data, 8
    )
    assert (y == 0.5).all() and resident_code() > 4 << 10
