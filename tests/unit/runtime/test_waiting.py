from __future__ import annotations

import signal
import threading
import time
import types

import pytest

from mpmd.runtime.channels.protocol import Stopped
from mpmd.runtime.interpreter import PendingCalls, Unfinished
from mpmd.runtime.waiting import failure_of, wait_for


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
