"""Programs for AArch64 run in an emulator, on machines of another kind.

Debian's packages `qemu-user` and `gcc-aarch64-linux-gnu` are the emulator, and a linker with a C library.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpmd.compile.backends.jax_function import numpy_dtype
from mpmd.compile.backends.native_cpu.barrier import MEETING_BYTES
from mpmd.compile.backends.native_cpu.loading import CompiledProgram, compile_program, shared_function
from mpmd.compile.backends.native_cpu.target import NativeCpu
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.llvm.cpu import LINE_BYTES, named_target
from mpmd.compile.llvm.engine import emit_object
from mpmd.compile.llvm.function_builder import Module
from tests.support.native_fragments import fragment_of

NEON = named_target("neon")
EMULATOR, LINKER = "qemu-aarch64", "aarch64-linux-gnu-gcc"

needs_emulator = pytest.mark.skipif(
    not (shutil.which(EMULATOR) and shutil.which(LINKER)),
    reason=f"{EMULATOR} and {LINKER} are not installed: Debian's qemu-user and gcc-aarch64-linux-gnu",
)

# Reads the memory of each pointer, runs one thread, and writes all memory.
_MAIN = """
#include <stdio.h>
#include <stdlib.h>
void ENTRY(long thread, long threads, void **table);
int main(int count, char **sizes) {
  void **table = calloc(count, sizeof(void *));
  for (int k = 1; k < count; k++) {
    size_t size = strtoul(sizes[k], 0, 10);
    table[k - 1] = aligned_alloc(LINE, (size / LINE + 1) * LINE);
    if (fread(table[k - 1], 1, size, stdin) != size) return 1;
  }
  ENTRY(0, 1, table);
  for (int k = 1; k < count; k++) {
    size_t size = strtoul(sizes[k], 0, 10);
    if (fwrite(table[k - 1], 1, size, stdout) != size) return 2;
  }
  return 0;
}
"""


def run(function: Any, arguments: Sequence[np.ndarray], folder: Path) -> list[np.ndarray]:
    """The results of a function of arrays, compiled for AArch64; `folder` is for files."""
    fragment = fragment_of(function, *arguments)
    prepared = prepare_fragment(fragment, NativeCpu(NEON))
    program = compile_program(prepared.program.threaded, NEON)
    results = [np.zeros(v.shape, numpy_dtype(v.dtype)) for v in fragment.results]
    memory = [np.ascontiguousarray(a).tobytes() for a in (*arguments, *results)]
    memory.append(prepared.program.constants.ljust(prepared.program.arena_bytes, b"\0"))
    memory += [bytes(max(LINE_BYTES, program.workspace_bytes)), bytes(MEETING_BYTES)]
    sizes = [str(len(data)) for data in memory]
    command = [EMULATOR, _linked(program, folder), *sizes]
    done = subprocess.run(command, input=b"".join(memory), stdout=subprocess.PIPE, check=True)
    written = done.stdout[sum(map(len, memory[: len(arguments)])) :]
    for result in results:
        data, written = written[: result.nbytes], written[result.nbytes :]
        result[...] = np.frombuffer(data, result.dtype).reshape(result.shape)
    return results


def _linked(program: CompiledProgram, folder: Path) -> Path:
    """An executable file that runs a program on the memory that it reads."""
    module = Module(NEON)
    for name in program.imports:
        shared_function(name).emit(module)
    files = {"program.o": program.code, "shared.o": emit_object(module), "main.c": _MAIN.encode()}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    names = [f"-DENTRY={program.name}", f"-DLINE={LINE_BYTES}", *files]
    subprocess.run([LINKER, "-static", "-o", "emulated", *names], cwd=folder, check=True)
    return folder / "emulated"
