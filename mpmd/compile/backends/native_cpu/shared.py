"""Functions that many fragments call: compiled once per process and target, found again by name.

A micro-kernel or a packing routine depends on nothing of the fragment that uses it.  The fragment's module
only declares it; whoever loads the fragment's object asks for the functions it names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from mpmd.compile.backends.native_cpu.llvm.engine import LoadedCode, compile_module
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.target import CpuTarget


class SharedFunction(Protocol):
    """The recipe of a function whose name says everything about it."""

    @property
    def name(self) -> str:
        """Symbol of the function; equal recipes have equal names."""

    def emit(self, module: Module) -> None:
        """Add the function to a module."""


_LOADED: dict[tuple[CpuTarget, str], LoadedCode] = {}
_LOCK = threading.Lock()


def shared_code(functions: Iterable[SharedFunction], target: CpuTarget) -> dict[str, LoadedCode]:
    """Loaded code for each function, by name, as `load_object` wants its imports.

    Functions that this process has not compiled yet are compiled together.
    """
    wanted = {f.name: f for f in functions}
    with _LOCK:
        missing = [f for name, f in sorted(wanted.items()) if (target, name) not in _LOADED]
        if missing:
            module = Module(target)
            for function in missing:
                function.emit(module)
            code = compile_module(module, [f.name for f in missing])
            _LOADED.update({(target, f.name): code for f in missing})
        return {name: _LOADED[target, name] for name in sorted(wanted)}
