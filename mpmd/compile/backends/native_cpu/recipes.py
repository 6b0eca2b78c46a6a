"""Shared functions by name: from the symbol in a stored object file back to its recipe."""

from __future__ import annotations

from mpmd.compile.backends.native_cpu.gemm.micro_kernel import MicroKernel
from mpmd.compile.backends.native_cpu.gemm.packing import Pack
from mpmd.compile.backends.native_cpu.meeting import FUNCTIONS
from mpmd.compile.backends.native_cpu.shared import SharedFunction
from mpmd.compile.backends.native_cpu.threads import PoolRun
from mpmd.compile.backends.native_cpu.waiting import Barrier
from mpmd.errors import CompileError


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
