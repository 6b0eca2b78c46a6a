"""Prefetches of a product's tiles for later tiles, as micro-kernels see them."""

import ctypes
import dataclasses

import numpy as np
import pytest

from examples.workloads.direct import row_major
from mpmd.compile.backends.native_cpu.ffi import aligned_empty, program_memory
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import GemmKernel
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import ARGUMENTS, Fetching, MicroKernel
from mpmd.compile.backends.native_cpu.gemm.tiling import choose_tiling
from mpmd.compile.backends.native_cpu.shared import shared_code
from mpmd.compile.llvm.cpu import host_target
from mpmd.compile.llvm.engine import compile_module
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant

LINES_PER_TILE = 200
TARGET = host_target()


def note_taker(kernel, start, notes):
    """A function instead of a micro-kernel: it notes each line that it would fetch, and computes nothing."""
    module = Module(TARGET)
    with FunctionBuilder(module, kernel.name, ARGUMENTS) as f:
        first = f.op(f"inttoptr i64 {start.ctypes.data} to ptr", "ptr")
        out = f.op(f"inttoptr i64 {notes.ctypes.data} to ptr", "ptr")

        def note(pointer: Value, **_: object) -> None:
            address, base = (f.op(f"ptrtoint ptr {p} to i64", "i64") for p in (pointer, first))
            offset = f.index(f.isub(address, base))
            inside = f.and_(
                f.compare("sge", offset, constant(0, "i64")),
                f.compare("slt", offset, constant(start.nbytes, "i64")),
            )
            with f.when(inside):
                f.store(constant(1, "i8"), out, f.idiv(offset, 64))

        f.prefetch = note
        fetching = Fetching(f, f.arguments["fetch"])
        with f.loop(0, LINES_PER_TILE, carried=fetching.start) as loop:
            loop.carry(fetching.line(loop.carried))
        fetching.leave(loop.carried)
    return compile_module(module, [kernel.name])


def lines_fetched(gemm, tiling, memory, a, b):
    """For each line of the memory whether a tile fetched it, one thread doing all units."""
    product = GemmKernel("product", gemm, tiling)
    notes = np.zeros(memory.nbytes // 64, np.uint8)
    module = Module(TARGET)
    functions = product.emit(module)
    imports = dict(shared_code([f for f in functions if not isinstance(f, MicroKernel)], TARGET))
    imports |= {f.name: note_taker(f, memory, notes) for f in functions if isinstance(f, MicroKernel)}
    code = compile_module(module, ["product"], imports)
    c = aligned_empty((gemm.batch_size, gemm.m, gemm.n), np.float32)
    workspace = program_memory(product.workspace_bytes + 64)
    function = code.function("product", *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_int64)
    function(a.ctypes.data, b.ctypes.data, c.ctypes.data, workspace.ctypes.data, 0, product.units)
    return notes


@pytest.mark.parametrize("n", [32, 128])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("tiles", [2, 5])
@pytest.mark.parametrize("pack_a,pack_b", [(False, False), (True, True), (False, True)])
def test_all_of_the_factors_is_fetched_but_what_comes_first(tiles, pack_a, pack_b, batch, n):
    """Row blocks of few tiles and of several, two chunks of K, groups of strips, and batch indices."""
    count, m, k = max(1, *batch, 1), 120, 96
    gemm = row_major(m, n, k, batch=batch)
    tiling = choose_tiling(gemm, TARGET)
    tiling = dataclasses.replace(tiling, kc=48, mc=tiles * tiling.rows, panels=max(1, n // tiling.width // 2))
    tiling = dataclasses.replace(tiling, pack_a=pack_a, pack_b=pack_b, split="columns", part_rows=0)
    memory = aligned_empty((count * (m * k + k * n),), np.float32)
    memory[:] = 0
    a, b = memory[: count * m * k], memory[count * m * k :]
    notes = lines_fetched(gemm, tiling, memory, a, b)
    notes_a = notes[: a.nbytes // 64].reshape(count, m, k // 16)
    notes_b = notes[a.nbytes // 64 :].reshape(count, k, n // 16)
    first_rows, chunk = tiling.mc, tiling.kc // 16
    notes_a[0, :first_rows, :chunk] = 1  # what the first block is made of nobody can fetch before it
    notes_b[0, : tiling.kc, : tiling.width // 16] = 1
    assert notes_a.all(), f"of A {np.argwhere(notes_a == 0)[:5].tolist()} is never fetched"
    assert notes_b.all(), f"of B {np.argwhere(notes_b == 0)[:5].tolist()} is never fetched"
