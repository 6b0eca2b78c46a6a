"""Native programs as custom calls of JAX: registered once, called by many, errors instead of crashes."""

import functools
import gc
import re
import threading
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.ffi import custom_call
from mpmd.compile.backends.ffi import frame as ffi_frame
from mpmd.compile.backends.native_cpu import ffi, handler
from mpmd.compile.backends.native_cpu.native_program import Address, ThreadedProgram, sequence_steps
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.llvm.cpu import host_target
from mpmd.errors import CompileError
from tests.support.native_programs import arrays, elementwise, mlp, reference_mlp

HOST = host_target()
RESULTS = [jax.ShapeDtypeStruct((37, 50), jnp.float32), jax.ShapeDtypeStruct((50,), jnp.float32)]


def registered(threads=1, slots=1, instance=""):
    program, arena_bytes = mlp()
    compiled = handler.compile_with_handler(program, HOST, arguments=3, results=2, arena=True)
    pools = [WorkerPool(threads) for _ in range(slots)] if threads > 1 else []
    return ffi.register(compiled, HOST, arena_bytes=arena_bytes, slots=slots, pools=pools, instance=instance)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_is_a_custom_call(threads):
    target = registered(threads, instance=f"threads{threads}")
    call = jax.jit(lambda *a: target(*a, results=RESULTS))
    inputs = [jnp.asarray(a) for a in arrays()]
    for _ in range(5):
        for got, expected in zip(call(*inputs), reference_mlp(*inputs), strict=True):
            np.testing.assert_allclose(got, expected, atol=2e-3)
    assert registered(threads, instance=f"threads{threads}") is target, "registered once"
    assert registered(threads, instance="other").index != target.index


def test_a_program_is_unloaded_after_the_last_executable_that_calls_it():
    target = registered(instance="unloaded")
    inputs = [jnp.asarray(a) for a in arrays()]
    call = jax.jit(functools.partial(target, results=RESULTS)).lower(*inputs).compile()
    index, program, memory = target.index, weakref.ref(target), weakref.ref(target.memory)
    del target
    jax.clear_caches()  # JAX holds the traced function, and that the program
    assert program() is None and memory() is not None and custom_call.is_called(index)
    for got, expected in zip(call(*inputs), reference_mlp(*inputs), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-3)
    del call
    gc.collect()
    assert not custom_call.is_called(index)
    registered(instance="loading another unloads it")
    assert memory() is None


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
    assert not any(caller.is_alive() for caller in callers)


def test_donated_memory_is_updated_in_place():
    sequence = elementwise("increment_donated", 5000, "add")
    program = ThreadedProgram(
        "bump_donated", 2, tuple(sequence_steps(sequence, [Address(0), Address(1)], []))
    )
    compiled = handler.compile_with_handler(program, HOST, arguments=1, results=1, arena=False)
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
        handler.compile_with_handler(mlp()[0], HOST, arguments=3, results=1, arena=True)


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
    assert frame["extension_start"] == ffi_frame.FRAME["extension"] and frame["api"] == ffi_frame.FRAME["api"]
    assert frame["stage"] == ffi_frame.FRAME["stage"]
    assert frame["args"] + args["size"] == ffi_frame.FRAME["arg_count"]
    assert frame["args"] + args["args"] == ffi_frame.FRAME["args"]
    assert frame["rets"] + rets["size"] == ffi_frame.FRAME["ret_count"]
    assert frame["rets"] + rets["rets"] == ffi_frame.FRAME["rets"]
    assert frame["attrs"] + layout("XLA_FFI_Attrs")["attrs"] == ffi_frame.FRAME["attributes"]
    assert layout("XLA_FFI_Scalar")["value"] == ffi_frame.SCALAR_VALUE
    state = layout("XLA_FFI_State_Set_Args")
    assert [state[name] for name in ("ctx", "stage", "type_id", "state")] == [16, 24, 32, 40]
    assert state["__size__"] == ffi_frame.STATE_BYTES
    assert layout("XLA_FFI_Buffer")["data"] == ffi_frame.BUFFER_DATA
    base = re.search(r"struct XLA_FFI_Metadata_Extension \{\s*(\w+) ", text)[1]  # its name differs by version
    assert layout(base)["type"] == ffi_frame.EXTENSION["type"]
    assert layout("XLA_FFI_Metadata_Extension")["metadata"] == ffi_frame.EXTENSION["metadata"]
    metadata, version = layout("XLA_FFI_Metadata"), layout("XLA_FFI_Api_Version")
    assert metadata["api_version"] + version["major_version"] == ffi_frame.METADATA["major"]
    assert metadata["api_version"] + version["minor_version"] == ffi_frame.METADATA["minor"]
    assert metadata["traits"] == ffi_frame.METADATA["traits"]
    api, offered = (
        layout("XLA_FFI_Api"),
        (*("Error_Create", "Stream_Get", "State_Set", "RunId_Get", "DeviceOrdinal_Get"),),
    )
    assert [api[f"XLA_FFI_{name}"] for name in offered] == list(ffi_frame.API.values())
    assert frame["ctx"] == ffi_frame.FRAME["context"]
    assert layout("XLA_FFI_Stream_Get_Args")["stream"] == ffi_frame.ANSWER
    assert layout("XLA_FFI_RunId_Get_Args")["run_id"] == ffi_frame.ANSWER
    assert layout("XLA_FFI_DeviceOrdinal_Get_Args")["device_ordinal"] == ffi_frame.ANSWER
    monkeypatch.setattr(ffi_frame, "API_MINOR", 99)
    ffi_frame.check_version.cache_clear()
    with pytest.raises(CompileError, match=r"native code needs 0\.99 or a later minor version"):
        ffi_frame.check_version()
    ffi_frame.check_version.cache_clear()
