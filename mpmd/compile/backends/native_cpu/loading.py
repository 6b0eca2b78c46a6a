"""A program as machine code, ready to be kept on disk and to be loaded.

program ── compile_program ──▶ CompiledProgram: object file + names of shared functions   (what a cache keeps)
        ── load            ──▶ code in memory: of a custom call (`ffi.py`)

Shared functions are loaded by name: the symbol in a stored object file says their recipe.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from mpmd.brief import brief
from mpmd.compile.backends.native_cpu.barrier import FUNCTIONS, MeshLayout
from mpmd.compile.backends.native_cpu.gemm.micro_kernel import MicroKernel
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.backends.native_cpu.native_program import ThreadedProgram
from mpmd.compile.backends.native_cpu.overrides import Override, apply_overrides
from mpmd.compile.backends.native_cpu.shared import SharedFunction, shared_code
from mpmd.compile.backends.native_cpu.threads import Barrier, PoolRun
from mpmd.compile.cache import DiskCache
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.engine import LoadedCode, load_object, object_of
from mpmd.compile.llvm.function_builder import Module
from mpmd.errors import CompileError

_SIZES = struct.Struct("<3Q")


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

    __repr__ = brief

    @property
    def llvm(self) -> str:
        return zlib.decompress(self.listing).decode() if self.listing else ""

    @property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.code)
        digest.update(
            repr(
                (self.name, self.pointers, self.workspace_bytes, self.imports, self.devices, self.mesh)
            ).encode()
        )
        return digest.hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes of the object file."""
        return len(self.code)

    def to_bytes(self) -> bytes:
        """The program as bytes; see `Code`."""
        mesh = None if self.mesh is None else astuple(self.mesh)
        head = json.dumps(
            [self.name, self.pointers, self.workspace_bytes, self.imports, self.exports, self.devices, mesh]
        ).encode()
        parts = [head, self.code, self.listing]
        return b"".join([_SIZES.pack(*map(len, parts)), *parts])

    @staticmethod
    def from_bytes(data: bytes) -> CompiledProgram:
        """What `to_bytes` wrote.

        Raises:
            ValueError: the bytes are something else.
            struct.error: there are too few of them.
        """
        ends = list(itertools.accumulate(_SIZES.unpack_from(data), initial=_SIZES.size))
        head, code, listing = (data[start:end] for start, end in itertools.pairwise(ends))
        name, pointers, workspace, imports, exports, devices, mesh = json.loads(head)
        layout = None if mesh is None else MeshLayout(*mesh)
        return CompiledProgram(
            name, pointers, workspace, code, tuple(imports), tuple(exports), listing, devices, layout
        )

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
    program: ThreadedProgram,
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


def shared_function(name: str) -> SharedFunction:
    """The recipe of a shared function.

    Raises:
        CompileError: no recipe has this name; the object file is of another version.
    """
    single: dict[str, SharedFunction] = {f.name: f for f in (Barrier(), PoolRun(), *FUNCTIONS)}
    if name in single:
        return single[name]
    parts = name.split("_")
    recipe: SharedFunction | None = None
    try:
        if parts[:2] == ["mpmd", "gemm"] and len(parts) == 5:
            rows, vectors = parts[3].split("x")
            recipe = MicroKernel(parts[2], int(rows), int(vectors), parts[4])
        elif parts[:2] == ["mpmd", "pack"] and len(parts) == 6:
            recipe = Pack(parts[2], parts[3], int(parts[4]), parts[5])
    except ValueError:
        recipe = None
    if recipe is None or recipe.name != name:
        raise CompileError(
            f"compiled code calls {name}, which this version does not have; compile the program again"
        )
    return recipe
