"""The interface of every CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.llvm.function_builder import Module


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
