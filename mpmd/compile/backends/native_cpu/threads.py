"""Worker threads for native programs: they live in native code and need neither the GIL nor XLA's pool.

The threads are Python threads that enter one native function and stay there; ctypes has released the GIL.  A
job is an entry `void run(i64 thread, i64 threads, ptr table)`; the caller is thread 0.  All threads of a job
are certain to run, so a job may use barriers.  Between jobs the workers spin for a short while and then
sleep.  Loops that wait for other threads give the core away after a while.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mpmd.compile.backends.native_cpu.shared import shared_code
from mpmd.compile.llvm.cpu import LINE_BYTES, host_target
from mpmd.compile.llvm.engine import LoadedCode
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import Value, constant
from mpmd.errors import ConfigError
from mpmd.support.resources import keep_past_exit, on_cores, release

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
            # Read before this thread is counted: the barrier cannot open until it is, so `before` is of
            # this round.
            before = f.atomic_load(opened)
            arrived = f.add(f.atomic_add(count, 1), constant(1, "i64"))
            with f.when(f.compare("eq", arrived, threads), returns=True):
                # First the count, then the opening: threads that leave may come to the next round at once.
                f.atomic_store(constant(0, "i64"), count)
                f.atomic_add(opened, 1)
            wait_until(f, opened, "ne", before)


# Bytes from the start of a pool to each of its fields; what threads write often has a line of its own.
_MUTEX, _CONDITION, _JOB_MUTEX = 0, LINE_BYTES, 2 * LINE_BYTES
_JOBS, _UNFINISHED = 192, 256
_ENTRY, _TABLE, _THREADS, _STOP, _FLOAT_MODE = 320, 328, 336, 344, 352
_POOL_BYTES = 384

# Rounds that a worker waits for the next job before it sleeps; in the later ones it offers the core to
# others, among them the thread that submits the job.
_SPINS = SPIN_ROUNDS + 150


def _field(f: FunctionBuilder, offset: int) -> Value:
    return f.offset(f.arguments["pool"], offset)


def _lock(f: FunctionBuilder, offset: int) -> None:
    f.call("pthread_mutex_lock", _field(f, offset), result="i32")


def _unlock(f: FunctionBuilder, offset: int) -> None:
    f.call("pthread_mutex_unlock", _field(f, offset), result="i32")


@dataclass(frozen=True)
class PoolRun:
    """`void name(ptr pool, ptr entry, ptr table)`: run a job on all threads of a pool, one job at a time."""

    @property
    def name(self) -> str:
        return "mpmd_pool_run"

    def emit(self, module: Module) -> None:
        arguments = [("pool", "ptr"), ("entry", "ptr"), ("table", "ptr")]
        with FunctionBuilder(module, self.name, arguments) as f:
            _lock(f, _JOB_MUTEX)
            threads = f.load(_field(f, _THREADS), "i64")
            f.store(f.arguments["entry"], _field(f, _ENTRY))
            f.store(f.arguments["table"], _field(f, _TABLE))
            _save_float_mode(f)
            # Everything that workers read is stored before the number of jobs grows, which they acquire.
            f.atomic_store(f.sub(threads, constant(1, "i64")), _field(f, _UNFINISHED))
            _lock(f, _MUTEX)
            # Under the mutex: a worker that has just looked, and is about to sleep, would miss the
            # broadcast.
            f.atomic_add(_field(f, _JOBS), 1)
            f.call("pthread_cond_broadcast", _field(f, _CONDITION), result="i32")
            _unlock(f, _MUTEX)
            entry, table = f.arguments["entry"], f.arguments["table"]
            f.emit(f"call void {entry}(i64 0, {threads.typed}, {table.typed})")
            # The caller's table may be on its stack: it stays until the last worker has left the job.
            wait_until(f, _field(f, _UNFINISHED), "eq", constant(0, "i64"))
            _unlock(f, _JOB_MUTEX)


@dataclass(frozen=True)
class PoolWorker:
    """`void name(ptr pool, i64 thread)`: what a worker does until the pool is closed."""

    @property
    def name(self) -> str:
        return "mpmd_pool_worker"

    def emit(self, module: Module) -> None:
        with FunctionBuilder(module, self.name, [("pool", "ptr"), ("thread", "i64")]) as f:
            done, spins = f.stack("i64"), f.stack("i64")
            f.store(constant(0, "i64"), done)
            with f.repeat() as leave_if:
                self._wait_for_job(f, done, spins)
                f.store(f.atomic_load(_field(f, _JOBS)), done)
                leave_if(f.compare("ne", f.load(_field(f, _STOP), "i64"), constant(0, "i64")))
                _load_float_mode(f)
                entry, table = f.load(_field(f, _ENTRY), "ptr"), f.load(_field(f, _TABLE), "ptr")
                threads, thread = f.load(_field(f, _THREADS), "i64"), f.arguments["thread"]
                f.emit(f"call void {entry}({thread.typed}, {threads.typed}, {table.typed})")
                f.atomic_add(_field(f, _UNFINISHED), -1)

    def _wait_for_job(self, f: FunctionBuilder, done: Value, spins: Value) -> None:
        f.store(constant(0, "i64"), spins)
        with f.repeat() as leave_if:
            leave_if(f.compare("ne", f.atomic_load(_field(f, _JOBS)), f.load(done, "i64")))
            count = f.add(f.load(spins, "i64"), constant(1, "i64"))
            f.store(count, spins)
            leave_if(f.compare("ugt", count, constant(_SPINS, "i64")))
            f.pause()
            with f.when(f.compare("ugt", count, constant(SPIN_ROUNDS, "i64"))):
                f.call("sched_yield", result="i32")
        _lock(f, _MUTEX)
        with f.repeat() as leave_if:
            leave_if(f.compare("ne", f.atomic_load(_field(f, _JOBS)), f.load(done, "i64")))
            f.call("pthread_cond_wait", _field(f, _CONDITION), _field(f, _MUTEX), result="i32")
        _unlock(f, _MUTEX)


def _save_float_mode(f: FunctionBuilder) -> None:
    """Note how the caller rounds and whether it flushes denormals: its workers must do the same."""
    if f.target.is_x86:
        f.module.declare("llvm.x86.sse.stmxcsr", "void", ("ptr",))
        f.emit(f"call void @llvm.x86.sse.stmxcsr(ptr {_field(f, _FLOAT_MODE)})")
    else:
        mode = f.intrinsic("llvm.aarch64.get.fpcr", "i64")
        f.store(mode, _field(f, _FLOAT_MODE))


def _load_float_mode(f: FunctionBuilder) -> None:
    if f.target.is_x86:
        f.module.declare("llvm.x86.sse.ldmxcsr", "void", ("ptr",))
        f.emit(f"call void @llvm.x86.sse.ldmxcsr(ptr {_field(f, _FLOAT_MODE)})")
    else:
        f.module.declare("llvm.aarch64.set.fpcr", "void", ("i64",))
        mode = f.load(_field(f, _FLOAT_MODE), "i64")
        f.emit(f"call void @llvm.aarch64.set.fpcr({mode.typed})")


@lru_cache(maxsize=1)
def _pool_code() -> dict[str, LoadedCode]:
    return shared_code([PoolRun(), PoolWorker()], host_target())


class WorkerPool:
    """Threads that run native jobs together with the caller.

    Args:
        threads: how many take part in a job, the caller included.
        cores: where they run; anywhere if there are none.

    Raises:
        ConfigError: fewer than one thread.
    """

    def __init__(self, threads: int, cores: Sequence[int] = ()) -> None:
        if threads < 1:
            raise ConfigError(f"a pool needs at least one thread, got {threads}")
        self.threads = threads
        self._memory = np.zeros(_POOL_BYTES + LINE_BYTES, np.uint8)
        self.address = self._memory.ctypes.data + -self._memory.ctypes.data % LINE_BYTES
        libc = ctypes.CDLL(None)
        for mutex in (_MUTEX, _JOB_MUTEX):
            libc.pthread_mutex_init(ctypes.c_void_p(self.address + mutex), None)
        libc.pthread_cond_init(ctypes.c_void_p(self.address + _CONDITION), None)
        self._word(_THREADS).value = threads
        code = _pool_code()
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        self._run = code[PoolRun().name].function(PoolRun().name, pointer, pointer, pointer)
        worker = code[PoolWorker().name].function(PoolWorker().name, pointer, integer)
        self._workers = [
            threading.Thread(target=worker, args=(self.address, k), daemon=True, name=f"native-{k}")
            for k in range(1, threads)
        ]
        with on_cores(cores):  # threads stay where they are started
            for thread in self._workers:
                thread.start()
        self._closed = False
        self._used = self._memory, code
        keep_past_exit(self._used)

    def _word(self, offset: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.address + offset)

    def run(self, entry: int, table: int) -> None:
        """Run the entry at an address on all threads, and return when all have returned.

        Args:
            entry: address of `void run(i64 thread, i64 threads, ptr table)`.
            table: address handed to it.

        Raises:
            ConfigError: the pool is closed.
        """
        if self._closed:
            raise ConfigError("the pool of native threads is closed; nothing can run on it")
        self._run(self.address, entry, table)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._word(_STOP).value = 1
        libc = ctypes.CDLL(None)
        mutex, condition = ctypes.c_void_p(self.address + _MUTEX), ctypes.c_void_p(self.address + _CONDITION)
        libc.pthread_mutex_lock(mutex)
        self._word(_JOBS).value += 1
        libc.pthread_cond_broadcast(condition)
        libc.pthread_mutex_unlock(mutex)
        for thread in self._workers:
            thread.join()
        release(self._used)
