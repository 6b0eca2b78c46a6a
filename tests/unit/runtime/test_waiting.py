from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import pytest

from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.run.interpreter import PendingCalls, Unfinished
from mpmd.runtime.run.waiting import failure_of, wait_for

ROOT = Path(__file__).resolve().parents[3]


class Array:
    """An array that is ready when it is told."""

    def __init__(self):
        self.ready = threading.Event()
        self.looks = 0
        self.failure = None

    def is_deleted(self):
        return False

    def is_ready(self):
        self.looks += 1
        return self.ready.is_set()

    def block_until_ready(self):
        assert self.ready.wait(20)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def array():
    made = Array()
    yield made
    made.ready.set()  # ends the thread that waits


def test_a_wait_ends_with_its_array_and_does_not_poll(array):
    threading.Timer(0.12, array.ready.set).start()
    begin = time.perf_counter()
    wait_for(array)
    assert array.ready.is_set()
    assert 0.1 < time.perf_counter() - begin < 10
    assert array.looks == 1


def test_waits_after_one_another_share_a_thread_that_holds_no_array():
    threads, arrays = set(), [Array() for _ in range(5)]

    def block_until_ready(array):
        threads.add(threading.get_ident())
        time.sleep(0.01)
        array.ready.set()

    for array in arrays:
        array.block_until_ready = functools.partial(block_until_ready, weakref.proxy(array))
        wait_for(array)
    assert all(array.ready.is_set() for array in arrays) and len(threads) == 1
    gone = threading.Event()
    weakref.finalize(arrays.pop(), gone.set)
    del array
    assert gone.wait(10)


def test_a_failed_array_ends_a_wait(array):
    array.failure = RuntimeError("broken")
    threading.Timer(0.01, array.ready.set).start()
    wait_for(array)
    assert failure_of(array) is array.failure


def test_a_check_ends_a_wait(array):
    def check():
        raise InterruptedError("the step was stopped")

    with pytest.raises(InterruptedError, match="stopped"):
        wait_for(array, check)
    assert not array.ready.is_set()


def test_a_signal_ends_a_wait(array):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            wait_for(array)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not array.ready.is_set()


@pytest.mark.parametrize(("limit", "left"), [(1, 0), (3, 2), (4, 2), (16, 11)])
def test_a_full_queue_waits_for_a_quarter_of_its_calls(limit, left):
    pending, arrays = PendingCalls("m"), [Array() for _ in range(limit)]
    pending.unfinished.extend(Unfinished(0, None, array) for array in arrays)
    frame = types.SimpleNamespace(stopped=False)
    ready = threading.Thread(target=lambda: [a.ready.set() for a in arrays[: limit - left]])
    ready.start()
    pending.make_room(frame, limit)
    ready.join()
    assert len(pending.unfinished) == left
    pending.make_room(frame, limit)  # there is room
    frame.stopped = True
    if left:
        with pytest.raises(Stopped):
            pending.make_room(frame, left)


@pytest.mark.parametrize("looks", range(12))
def test_calls_may_end_at_any_moment_of_a_wait(looks):
    """Whoever looks forgets those that ended: an index found before a look is stale after it."""
    left = looks

    class EndsAfterLooks(Array):
        def is_ready(self):
            nonlocal left
            left -= 1
            if left < 0:
                self.ready.set()
            return super().is_ready()

    pending, limit = PendingCalls("m"), 8
    pending.unfinished.extend(Unfinished(0, None, EndsAfterLooks()) for _ in range(limit))
    pending.make_room(types.SimpleNamespace(stopped=False), limit)
    assert not pending.unfinished


@pytest.mark.slow
def test_a_process_that_was_interrupted_ends_well():
    """Its wait is still in XLA when it ends."""
    code = """if True:
        import signal
        import jax.numpy as jnp
        import numpy as np
        import jax
        from mpmd.runtime.run.waiting import wait_for
        from examples.workloads.sleeping import sleep
        square = np.eye(64, dtype=np.float32)  # XLA runs programs of fewer operations when they are called
        after = lambda x: (jax.lax.optimization_barrier(square) @ square)[0, 0] * x
        f = jax.jit(lambda x: x + sleep(x[0], after(x)))
        def interrupt(*_):
            raise KeyboardInterrupt
        signal.signal(signal.SIGALRM, interrupt)
        slow = f(jnp.full(4, 1.0))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            wait_for(slow)
        except KeyboardInterrupt:
            print("interrupted", slow.is_ready())
    """
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "interrupted False\n"), ended.stderr
