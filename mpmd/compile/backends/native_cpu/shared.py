"""Functions that many fragments call: compiled once per process and target, found again by name.

A micro-kernel or a packing routine does not depend on the fragment that uses it.  The fragment's module
only declares it; the loader of the fragment's object provides the functions it names.  `CpuKernel` is the
interface of kernels that are part of a fragment.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from mpmd.compile.cache import DiskCache, key_of
from mpmd.compile.llvm.cpu import CpuTarget
from mpmd.compile.llvm.engine import LoadedCode, compile_module, emit_object, load_object
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module


class SharedFunction(Protocol):
    """The recipe of a function whose name determines its code."""

    @property
    def name(self) -> str:
        """Symbol of the function; equal recipes have equal names."""

    def emit(self, module: Module) -> None:
        """Add the function to a module."""


_LOADED: dict[tuple[CpuTarget, str], LoadedCode] = {}
_LOCK = threading.Lock()


def shared_code(
    functions: Iterable[SharedFunction], target: CpuTarget, cache: DiskCache | None = None
) -> dict[str, LoadedCode]:
    """Loaded code for each function, by name, as the imports of `load_object`.

    Functions that this process has not compiled yet are compiled together, or each taken from the cache.

    Args:
        functions: the wanted functions.
        target: their CPU.
        cache: of their code; None keeps it for this process only.
    """
    wanted = {f.name: f for f in functions}
    with _LOCK:
        missing = [f for name, f in sorted(wanted.items()) if (target, name) not in _LOADED]
        if missing and cache is None:
            code = compile_module(_module_of(missing, target), [f.name for f in missing])
            _LOADED.update({(target, f.name): code for f in missing})
        elif cache is not None:
            _LOADED.update({(target, f.name): _kept_code(f, target, cache) for f in missing})
        return {name: _LOADED[target, name] for name in sorted(wanted)}


def _module_of(functions: Sequence[SharedFunction], target: CpuTarget) -> Module:
    module = Module(target)
    for function in functions:
        function.emit(module)
    return module


def _kept_code(function: SharedFunction, target: CpuTarget, cache: DiskCache) -> LoadedCode:
    """One function, compiled once for all processes that share the cache."""
    key = key_of("function", target.key(), function.name)
    data = cache.get(key)
    if data is not None:
        return load_object(data, [function.name])
    code = emit_object(_module_of([function], target))
    cache.put(key, code)
    return load_object(code, [function.name])


def kernel_function(module: Module, kernel: CpuKernel, *, plain: bool = False) -> FunctionBuilder:
    """The function of a kernel, to be filled."""
    arguments = [*((p, "ptr") for p in (*kernel.pointers, "workspace")), ("begin", "i64"), ("end", "i64")]
    return FunctionBuilder(module, kernel.name, arguments, plain=plain)


class CpuKernel(Protocol):
    """A function `void name(ptr ..., ptr workspace, i64 begin, i64 end)` that does some units of its work.

    Units are independent: threads take disjoint ranges in any order, each with a workspace of its own.
    """

    @property
    def name(self) -> str:
        """Symbol of the function."""

    @property
    def pointers(self) -> tuple[str, ...]:
        """Names of its pointer arguments before the workspace."""

    @property
    def units(self) -> int:
        """The number of units of the whole work."""

    @property
    def workspace_bytes(self) -> int:
        """Size of a thread's workspace, which is aligned to 64 bytes."""

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add the function to a module; returns the shared functions that it calls."""
