"""How native threads wait for each other: a barrier, and loops that give the core away after a while."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.module import Module
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant

# Rounds of a waiting loop before the core is offered to others, each round some tens of cycles.  Threads that
# work side by side meet sooner; where two share a core, the one that waits only keeps the other from coming.
PATIENCE = 600


def wait_until(f: FunctionBuilder, pointer: Value, predicate: str, value: Value) -> Value:
    """Wait until an `i64` that another thread stores compares as wanted; returns it."""
    rounds, seen = f.stack("i64"), f.stack("i64")
    f.store(constant(0, "i64"), rounds)
    with f.repeat() as leave_if:
        now = f.atomic_load(pointer)
        f.store(now, seen)
        leave_if(f.compare(predicate, now, value))
        count = f.add(f.load(rounds, "i64"), constant(1, "i64"))
        f.store(count, rounds)
        f.pause()
        with f.when(f.compare("ugt", count, constant(PATIENCE, "i64"))):
            f.call("sched_yield", result="i32")
    return f.load(seen, "i64")


@dataclass(frozen=True)
class Barrier:
    """`void name(ptr barrier, i64 threads)`: returns once all threads have called it.

    The barrier is a count and, on another cache line, the number of times that it opened; both start at zero.
    """

    @property
    def name(self) -> str:
        """Its symbol."""
        return "mpmd_barrier"

    def emit(self, module: Module) -> None:
        """Add the function to a module."""
        with FunctionBuilder(module, self.name, [("barrier", "ptr"), ("threads", "i64")]) as f:
            count, threads = f.arguments["barrier"], f.arguments["threads"]
            with f.when(f.compare("eq", threads, constant(1, "i64")), returns=True):
                pass
            opened = f.offset(count, 64)
            before = f.atomic_load(opened)
            arrived = f.add(f.atomic_add(count, 1), constant(1, "i64"))
            with f.when(f.compare("eq", arrived, threads), returns=True):
                f.atomic_store(constant(0, "i64"), count)
                f.atomic_add(opened, 1)
            wait_until(f, opened, "ne", before)
