"""A program run directly, without XLA, with memory and threads of its own: for tests and measurements."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from mpmd.compile.backends.native_cpu.barrier import MEETING_BYTES
from mpmd.compile.backends.native_cpu.ffi import program_memory
from mpmd.compile.backends.native_cpu.loading import CompiledProgram
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.llvm.cpu import LINE_BYTES, CpuTarget
from mpmd.errors import CompileError
from tests.support.targets import runs_here


class ProgramInstance:
    """A compiled program in memory, with workspaces and threads.

    Args:
        compiled: the program.
        target: the CPU, which must be this one or a subset of it.
        pool: threads that run it; the caller's thread alone if None.
    """

    def __init__(self, compiled: CompiledProgram, target: CpuTarget, pool: WorkerPool | None = None) -> None:
        if not runs_here(target):
            raise CompileError(f"code for {target.cpu} ({target.triple}) does not run on this machine")
        if compiled.devices > 1:
            raise CompileError(
                f"program {compiled.name} is one of {compiled.devices} devices: they run it inside of JAX"
            )
        self.compiled = compiled
        self.pool = pool
        self.code = compiled.load(target)
        threads = pool.threads if pool else 1
        self.workspaces = program_memory(max(LINE_BYTES, threads * compiled.workspace_bytes))
        self.barrier = np.zeros(MEETING_BYTES + LINE_BYTES, np.uint8)
        self.entry = self.code.address(compiled.name)
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self.run = self.code.function(compiled.name, integer, integer, pointer)

    @property
    def barrier_address(self) -> int:
        """Address of the barrier, at the start of a cache line."""
        start = self.barrier.ctypes.data
        return start + -start % LINE_BYTES

    def __call__(self, addresses: Sequence[int]) -> None:
        """Run on the caller's pointers.

        Raises:
            TypeError: not as many pointers as the program takes.
        """
        if len(addresses) != self.compiled.pointers:
            raise TypeError(
                f"program {self.compiled.name} takes {self.compiled.pointers} pointers, got {len(addresses)}"
            )
        table = (ctypes.c_void_p * (len(addresses) + 2))(
            *addresses, self.workspaces.ctypes.data, self.barrier_address
        )
        if self.pool is None or self.pool.threads == 1:
            self.run(0, 1, ctypes.addressof(table))
        else:
            self.pool.run(self.entry, ctypes.addressof(table))
