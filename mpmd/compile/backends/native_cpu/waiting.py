"""How native threads wait for each other: a barrier, and loops that give the core away after a while."""

from __future__ import annotations

from dataclasses import dataclass

from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.module import Module
from mpmd.compile.llvm.target import LINE_BYTES
from mpmd.compile.llvm.types import Value, constant

# Rounds of a waiting loop before the core is offered to others, each round some tens of cycles.  Threads that
# work side by side meet sooner; where two share a core, the one that waits only keeps the other from coming.
SPIN_ROUNDS = 600

_SLEEP_US = 50

OPENED_AT = LINE_BYTES
"""A barrier is a count and, on another cache line, how often it opened."""


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
        back_off(f, count, SPIN_ROUNDS)
    return f.load(seen, "i64")


def back_off(f: FunctionBuilder, rounds: Value, spins: int, yields: int | None = None) -> None:
    """Let some time pass in a waiting loop: spin, then offer the core to others, then sleep.

    Args:
        f: where the code goes.
        rounds: an `i64`, how many rounds the loop has made.
        spins: rounds that spin.
        yields: rounds after them that offer the core; all, if none is given.
    """
    with f.when(f.compare("ule", rounds, constant(spins, "i64"))):
        f.pause()
    with f.when(f.compare("ugt", rounds, constant(spins, "i64"))):
        if yields is None:
            f.call("sched_yield", result="i32")
            return
        last = constant(spins + yields, "i64")
        with f.when(f.compare("ule", rounds, last)):
            f.call("sched_yield", result="i32")
        with f.when(f.compare("ugt", rounds, last)):
            f.call("usleep", constant(_SLEEP_US, "i32"), result="i32")


@dataclass(frozen=True)
class Barrier:
    """`void name(ptr barrier, i64 threads)`: returns once all threads have called it.

    Count and number of openings start at zero.
    """

    @property
    def name(self) -> str:
        return "mpmd_barrier"

    def emit(self, module: Module) -> None:
        with FunctionBuilder(module, self.name, [("barrier", "ptr"), ("threads", "i64")]) as f:
            count, threads = f.arguments["barrier"], f.arguments["threads"]
            with f.when(f.compare("eq", threads, constant(1, "i64")), returns=True):
                pass
            opened = f.offset(count, OPENED_AT)
            before = f.atomic_load(opened)
            arrived = f.add(f.atomic_add(count, 1), constant(1, "i64"))
            with f.when(f.compare("eq", arrived, threads), returns=True):
                f.atomic_store(constant(0, "i64"), count)
                f.atomic_add(opened, 1)
            wait_until(f, opened, "ne", before)
