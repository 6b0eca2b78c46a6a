"""From LLVM assembly to an object file, and from an object file to functions in this process.

Compiling and loading are apart, so that a compile cache can keep the object file and skip the first half.
No LLVM optimisation pipeline runs: the emitters write vectors, loops and addresses as they should be, and
code generation does instruction selection, scheduling and registers.

Pages of LLVM's own code, which are needed while a program is compiled.

Code generation touches 48 MB of LLVM's code.  They are clean pages of a file, shared by the processes that
map it, but they count in the resident memory of each.  A file mapping of code is never written, so its pages
may be unmapped at any time, also while a thread runs there: they are mapped again from the page cache when
they are executed.
Measurements: docs/decisions/memory-of-processes.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite.binding as binding

from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.function_builder import Module
from mpmd.errors import CompileError
from mpmd.support.resources import once

_EFFORT = 2  # of LLVM's code generation, 0 to 3
_LIBRARY_NUMBERS = itertools.count()
_LIBRARIES_PER_JIT_COMPILER = 16
_MAX_LLVM = 22  # the last version known to have the option below: LLVM ends the process at one that it lacks
_LOCK = threading.Lock()
_generating = 0


@once
def _initialize(triple: str) -> None:
    if triple.split("-")[0] == binding.get_process_triple().split("-")[0]:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
    else:
        binding.initialize_all_targets()
        binding.initialize_all_asmprinters()


def _machine(target: CpuTarget) -> Any:
    """A target machine for one compilation: LLVM lets no two threads share one."""
    _initialize(target.triple)
    return binding.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=_EFFORT, reloc="pic", codemodel="small", jit=True
    )


def _parse(text: str, target: CpuTarget) -> Any:
    """A module in a context of its own: a context keeps every constant and type until it is freed itself."""
    _initialize(target.triple)
    try:
        parsed = binding.parse_assembly(text, binding.create_context())
        parsed.verify()
    except RuntimeError as error:
        raise CompileError(f"LLVM refused the generated code: {str(error).strip()}") from error
    return parsed


@contextlib.contextmanager
def _addresses_as_emitted() -> Iterator[None]:
    """Code generation without loop strength reduction, for as long as any thread is inside.

    The emitters write the addresses of a loop as they should be: the pass takes half of the time of code
    generation, and the code is no faster with it (`docs/decisions/compile-time.md`).  It can only be disabled
    for the process; others that use LLVM through llvmlite get it back.
    """
    global _generating
    known = binding.llvm_version_info[0] <= _MAX_LLVM
    with _LOCK:
        if known and not _generating:
            binding.set_option("mpmd", "-disable-lsr=true")
        _generating += 1
    try:
        yield
    finally:
        with _LOCK:
            _generating -= 1
            if known and not _generating:
                binding.set_option("mpmd", "-disable-lsr=false")


def emit_object(module: Module) -> bytes:
    """Machine code of a module as an object file; see `object_of`."""
    return object_of(module.text(), module.target)


def object_of(text: str, target: CpuTarget) -> bytes:
    """Machine code of LLVM assembly as an object file.

    Args:
        text: what to compile.
        target: for which CPU.

    Raises:
        CompileError: LLVM does not accept the text.
    """
    lib = binding.ffi.lib
    # llvmlite's lock lets one thread at a time into LLVM.  Context and machine are this thread's own.
    generate = lib.LLVMPY_TargetMachineEmitToMemory._cfn
    with _addresses_as_emitted(), binding.ffi.OutputString() as error:
        memory = generate(_machine(target), _parse(text, target), True, error)
        if not memory:
            raise CompileError(f"LLVM cannot compile the generated code: {error}")
    try:
        return ctypes.string_at(lib.LLVMPY_GetBufferStart(memory), lib.LLVMPY_GetBufferSize(memory))
    finally:
        lib.LLVMPY_DisposeMemoryBuffer(memory)


def emit_assembly(module: Module) -> str:
    """Machine code of a module as assembly text, for reading and for tests."""
    return assembly_of(module.text(), module.target)


def assembly_of(text: str, target: CpuTarget) -> str:
    """Machine code of LLVM assembly as the target's assembly; see `object_of`."""
    with _addresses_as_emitted():
        return str(_machine(target).emit_assembly(_parse(text, target)))


@lru_cache(maxsize=1)
def _jit_compiler(number: int) -> Any:
    """LLVM's JIT compiler for the next libraries; the code that it loads keeps it alive.

    LLVM keeps 9 KB of each unloaded library until the compiler itself is freed: a process that compiles for
    ever new shapes would grow.  A compiler takes 150 KB and a millisecond.

    Args:
        number: of the compiler; the cache drops the one before.
    """
    _initialize(binding.get_process_triple())
    target = binding.Target.from_default_triple()
    machine = target.create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        codemodel="small",
        jit=True,
    )
    # JITLink puts all sections of an object into one mapping.  The older loader maps them one by one, more
    # than 2 GiB apart in a process that has used much memory, which no reference of small code can span.
    return binding.create_lljit_compiler(machine, use_jit_link=True, suppress_errors=True)


class LoadedCode:
    """Functions of one object file, in memory for as long as this object lives.

    Code that passes on an address keeps the `LoadedCode` alive; a function that another runtime may call at
    any time (a registered custom call) keeps it for the life of the process.
    """

    def __init__(self, tracker: Any, imports: Sequence[LoadedCode]) -> None:
        self._tracker = tracker
        self._imports = tuple(imports)  # code that this code calls into

    def address(self, name: str) -> int:
        return int(self._tracker[name])

    def function(self, name: str, *arguments: Any, result: Any = None) -> Any:
        """A callable for an exported function; the GIL is released during the call.

        Args:
            name: exported function.
            *arguments: ctypes types of its arguments.
            result: ctypes type of its result, or None.
        """
        callable_: Any = ctypes.CFUNCTYPE(result, *arguments)(self.address(name))
        callable_.code = self  # the code lives as long as the callable
        return callable_


def load_object(
    data: bytes,
    exports: Sequence[str],
    imports: Mapping[str, LoadedCode] | None = None,
) -> LoadedCode:
    """Load an object file into this process.

    Args:
        data: what `emit_object` returned, for a target that runs here.
        exports: functions whose addresses are wanted.
        imports: for each function that the object calls in other loaded code, that code.

    Raises:
        CompileError: the object is damaged or names a function that is not defined.
    """
    builder = binding.JITLibraryBuilder()
    builder.add_object_img(data).add_current_process()
    for name in exports:
        builder.export_symbol(name)
    imports = dict(sorted((imports or {}).items()))
    for name, code in imports.items():
        builder.import_symbol(name, code.address(name))
    number = next(_LIBRARY_NUMBERS)
    try:
        tracker = builder.link(_jit_compiler(number // _LIBRARIES_PER_JIT_COMPILER), f"mpmd.{number}")
    except RuntimeError as error:
        raise CompileError(
            f"cannot load compiled code: {str(error).strip()}\n"
            f"The file is damaged, does not define all of {', '.join(exports)}, or calls a function that is "
            f"in neither this process nor the imports ({', '.join(imports) or 'none given'})."
        ) from error
    return LoadedCode(tracker, list(imports.values()))


def compile_module(
    module: Module,
    exports: Sequence[str],
    imports: Mapping[str, LoadedCode] | None = None,
) -> LoadedCode:
    return load_object(emit_object(module), exports, imports)


_DONTNEED = 4  # MADV_DONTNEED of <sys/mman.h> on Linux
_MAPPINGS = Path("/proc/self/maps")


def unmap_compiler_code() -> int:
    """Unmaps the pages of LLVM's code, if LLVM was loaded; takes 2 ms, and compiling maps them again.

    Returns:
        The bytes of the code, touched or not; 0 if LLVM was not loaded, and on other systems than Linux.

    Source: madvise(2), proc(5).
    """
    if "llvmlite.binding" not in sys.modules or not _MAPPINGS.exists():
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    sizes = [end - start for start, end in _code() if libc.madvise(start, end - start, _DONTNEED) == 0]
    return sum(sizes)


def _code() -> list[tuple[int, int]]:
    """The mappings of LLVM's library that are executable and not writable."""
    mappings = []
    for line in _MAPPINGS.read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        if permissions == "r-xp" and Path(name).name.startswith("libllvmlite."):
            start, end = (int(address, 16) for address in addresses.split("-"))
            mappings.append((start, end))
    return mappings
