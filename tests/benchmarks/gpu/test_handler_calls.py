"""What a GPU handler calls, through a table that records: no GPU, no Triton."""

import ctypes
import re
from pathlib import Path

import jax
import pytest

from benchmarks.gpu.handler import (
    COMMAND_BUFFER,
    PRODUCT_WORDS,
    STREAM_GET_BYTES,
    WORKSPACE_BYTES,
    Fill,
    GpuBuffer,
    Handler,
    Launch,
    MemoryCopy,
    Multiply,
    Scalar,
)
from benchmarks.gpu.table import ENTRIES, RecordingTable
from examples.workloads.call_frame import CallFrame
from mpmd.compile.llvm.cpu import host_target

STREAM, CONTEXT, KERNELS = 0x77, 0xCC, [0xA0, 0xA1]
ADDRESSES = [0x1000, 0x2000, 0x3000, 0x4000]
POINTER = ctypes.c_void_p
STEPS = (
    Launch(
        1,
        (8, 12, 2),
        128,
        (GpuBuffer(0), GpuBuffer(2), Scalar("i32", -5), Scalar("float", 0.25), None),
        shared=70000,
    ),
    Fill(GpuBuffer(3), 0x3F800000, 1024),
    MemoryCopy(GpuBuffer(3), GpuBuffer(2), 4096),
    Multiply(
        1,
        a=GpuBuffer(0),
        b=GpuBuffer(1),
        d=GpuBuffer(2),
        workspace=GpuBuffer(3),
        bias=GpuBuffer(1),
        aux=GpuBuffer(0),
    ),
)


def make(name, steps=STEPS, **options):
    return Handler(host_target(), name, steps, arguments=2, results=2, **options)


@pytest.fixture(scope="module")
def handler():
    return make("gpu_test_steps", traits=COMMAND_BUFFER)


@pytest.fixture
def records():
    """Words that tell which they are."""
    return (ctypes.c_int64 * (2 * PRODUCT_WORDS))(*range(500, 500 + 2 * PRODUCT_WORDS))


def frame(**options):
    return CallFrame(ADDRESSES[:2], ADDRESSES[2:], stream=STREAM, **options)


def test_every_step_calls_its_function_with_its_arguments(handler, records):
    kinds = [POINTER, POINTER, ctypes.c_int, ctypes.c_float, POINTER]
    recorder = RecordingTable({0xA1: kinds})
    handler.bind(recorder.table, KERNELS, records, CONTEXT)
    assert frame().run(handler)
    assert [call.name for call in recorder.calls] == [
        "cuCtxSetCurrent",
        "cuLaunchKernel",
        "cuMemsetD32Async",
        "cuMemcpyDtoDAsync_v2",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatmul",
    ]
    context, launch, fill, copy, bias, aux, product = recorder.calls
    assert context.arguments == (CONTEXT,)
    assert launch.arguments[:9] == (0xA1, 8, 12, 2, 128, 1, 1, 70000, STREAM) and launch.arguments[10] == 0
    assert launch.parameters == (0x1000, 0x3000, -5, 0.25, None)
    assert fill.arguments == (0x4000, 0x3F800000, 1024, STREAM)
    assert copy.arguments == (0x4000, 0x3000, 4096, STREAM)
    first = 500 + PRODUCT_WORDS  # the second record
    assert bias.arguments == (first + 1, 8, 0x2000, 8)
    assert aux.arguments == (first + 1, 11, 0x1000, 8)
    handle, descriptor, alpha, a, b, beta, c, d, algorithm, size = range(first, first + 10)
    assert product.arguments == (
        handle, descriptor, alpha, 0x2000, a, 0x1000, b, beta, 0x3000, c, 0x3000, d, algorithm, 0x4000, size,
        STREAM,
    )  # fmt: skip
    assert size == first + WORKSPACE_BYTES


def test_addresses_are_read_anew_in_every_call(handler, records):
    recorder = RecordingTable()
    handler.bind(recorder.table, KERNELS, records)
    before = handler.calls
    for base in (0x10000, 0x20000):
        assert CallFrame([base, base + 1], [base + 2, base + 3]).run(handler)
    copies = [call.arguments[:2] for call in recorder.calls if call.name == "cuMemcpyDtoDAsync_v2"]
    assert copies == [(0x10003, 0x10002), (0x20003, 0x20002)]
    assert handler.calls == before + 2


@pytest.mark.parametrize("at", range(1, 8))
def test_a_call_that_fails_ends_the_handler_and_is_named(handler, records, at):
    recorder = RecordingTable(fail_at=at, status=719)
    handler.bind(recorder.table, KERNELS, records)
    call = frame()
    assert not call.run(handler)
    assert len(recorder.calls) == at
    step = (-1, 0, 1, 2, 3, 3, 3)[at - 1]
    name = recorder.calls[-1].name
    assert call.errors == [f"gpu_test_steps: {name} of step {step} failed"]
    assert handler.failure == (step, 719)


@pytest.mark.parametrize(("arguments", "results", "which"), [(1, 2, "arg_count"), (2, 3, "ret_count")])
def test_a_frame_with_other_buffers_is_refused(handler, records, arguments, results, which):
    recorder = RecordingTable()
    handler.bind(recorder.table, KERNELS, records)
    call = CallFrame([1] * arguments, [1] * results)
    assert not call.run(handler)
    assert call.errors == [f"gpu_test_steps: the call has another {which} than 2"] and not recorder.calls


def test_metadata_is_answered_without_running(handler):
    plain = make("gpu_test_plain", steps=[])
    before = handler.calls, plain.calls
    assert frame().metadata(handler) == (0, 3, COMMAND_BUFFER)
    assert frame().metadata(plain) == (0, 3, 0)
    assert (handler.calls, plain.calls) == before


def test_the_question_for_the_stream_is_that_of_the_header():
    text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    asked = re.search(r"struct XLA_FFI_Stream_Get_Args \{(.*?)\}", text, re.S).group(1)
    kept = re.findall(r"(\w+);", re.sub(r"//[^\n]*", "", asked))
    assert kept == ["struct_size", "extension_start", "ctx", "stream"] and 8 * len(kept) == STREAM_GET_BYTES


def test_the_table_has_an_entry_for_every_function():
    recorder = RecordingTable()
    assert len(recorder.table) == len(ENTRIES) and all(recorder.table)
    assert len(set(recorder.table)) == len(ENTRIES)
