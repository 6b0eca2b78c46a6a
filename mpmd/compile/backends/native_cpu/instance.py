"""A loaded program with memory of its own: what runs, directly or inside of a custom call.

program ── compile_program ──▶ object file + names of shared functions   (what a cache keeps)
        ── ProgramInstance ──▶ code in memory, arena, workspaces, threads
"""

from __future__ import annotations

import ctypes
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpmd.compile.backends.native_cpu.direct import program_memory
from mpmd.compile.backends.native_cpu.llvm.engine import LoadedCode, load_object, object_of
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.meeting import MEETING_BYTES, MeshLayout
from mpmd.compile.backends.native_cpu.overrides import Override, apply_overrides
from mpmd.compile.backends.native_cpu.program import Program
from mpmd.compile.backends.native_cpu.recipes import shared_function
from mpmd.compile.backends.native_cpu.shared import shared_code
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.backends.native_cpu.threads import WorkerPool
from mpmd.compile.cache import DiskCache
from mpmd.errors import CompileError


@dataclass(frozen=True)
class CompiledProgram:
    """A program as machine code, ready to be kept on disk.

    Attributes:
        name: symbol of the entry.
        pointers: pointers that a caller gives.
        workspace_bytes: size of a thread's workspace.
        code: the object file.
        imports: names of the shared functions that it calls.
        exports: symbols that are looked up in it.
        listing: the LLVM assembly that it was compiled from, compressed; no part of the code.
        devices: how many devices run it together.
        mesh: the memory that they share; None if they never meet.
    """

    name: str
    pointers: int
    workspace_bytes: int
    code: bytes
    imports: tuple[str, ...]
    exports: tuple[str, ...]
    listing: bytes = field(default=b"", compare=False, repr=False)
    devices: int = 1
    mesh: MeshLayout | None = None

    @property
    def llvm(self) -> str:
        """The LLVM assembly that it was compiled from."""
        return zlib.decompress(self.listing).decode() if self.listing else ""

    @property
    def fingerprint(self) -> str:
        """A name for the content: equal for equal code."""
        digest = hashlib.sha256(self.code)
        digest.update(
            repr(
                (self.name, self.pointers, self.workspace_bytes, self.imports, self.devices, self.mesh)
            ).encode()
        )
        return digest.hexdigest()[:16]

    def load(self, target: CpuTarget, cache: DiskCache | None = None) -> LoadedCode:
        """Bring the code into this process.

        Args:
            target: the CPU it was compiled for.
            cache: where the functions that it calls are kept, if they are.

        Raises:
            CompileError: the object file is damaged, or names a function that this version does not have.
        """
        functions = [shared_function(name) for name in self.imports]
        return load_object(self.code, self.exports, shared_code(functions, target, cache))


def compile_program(
    program: Program,
    target: CpuTarget,
    module: Module | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> CompiledProgram:
    """Machine code of a program.

    Args:
        program: what to compile.
        target: for which CPU.
        module: a module that has further functions, exported too; the program is added to it.
        overrides: kernels from files, by their names.

    Raises:
        CompileError: such a kernel does not fit, or LLVM refuses it.
    """
    module = module or Module(target)
    further = module.names()
    shared = program.emit(module)
    apply_overrides(module, {k.name for k in program.kernels()}, overrides or {})
    imports = sorted({s.name for s in shared} | module.imports())
    text = module.text()
    return CompiledProgram(
        program.name,
        program.pointers,
        program.workspace_bytes,
        object_of(text, target),
        tuple(imports),
        (program.name, *further),
        zlib.compress(text.encode(), 1),
        program.devices,
        program.mesh,
    )


class ProgramInstance:
    """A compiled program in memory, with workspaces and threads.

    Args:
        compiled: the program.
        target: the CPU, which must be this one or a subset of it.
        pool: threads that run it; the caller's thread alone if None.
    """

    def __init__(self, compiled: CompiledProgram, target: CpuTarget, pool: WorkerPool | None = None) -> None:
        if not target.runs_here():
            raise CompileError(f"code for {target.cpu} ({target.triple}) does not run on this machine")
        if compiled.devices > 1:
            raise CompileError(
                f"program {compiled.name} is one of {compiled.devices} devices: they run it inside of JAX"
            )
        self.compiled = compiled
        self.pool = pool
        self.code = compiled.load(target)
        threads = pool.threads if pool else 1
        self.workspaces = program_memory(max(64, threads * compiled.workspace_bytes))
        self.barrier = np.zeros(MEETING_BYTES + 64, np.uint8)
        self.entry = self.code.address(compiled.name)
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        self._run = self.code.function(compiled.name, integer, integer, pointer)

    @property
    def barrier_address(self) -> int:
        """Address of the barrier, at the start of a cache line."""
        start = self.barrier.ctypes.data
        return start + -start % 64

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
            self._run(0, 1, ctypes.addressof(table))
        else:
            self.pool.run(self.entry, ctypes.addressof(table))
