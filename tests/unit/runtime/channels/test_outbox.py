"""Messages to other processes are offered in order, once they are computed, and are then let go."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref

import pytest

from mpmd.errors import TransferError
from mpmd.runtime.channels.outbox import Outbox

_TIMEOUT_S = 10.0


class ArrayToCome:
    """An array that is ready when `compute` was called."""

    def __init__(self):
        self.computed = threading.Event()

    def is_deleted(self):
        return False

    def is_ready(self):
        return self.computed.is_set()

    def block_until_ready(self):
        assert self.computed.wait(_TIMEOUT_S)


@pytest.fixture(autouse=True)
def the_thread_ends_with_its_outbox():
    yield
    until = time.monotonic() + _TIMEOUT_S
    while any(thread.name == "mpmd-send-m" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(1e-3)


def test_messages_are_offered_in_order_once_they_are_computed_and_are_not_held():
    offered, sent = [], threading.Semaphore(0)

    def offer(number, arrays):
        offered.append((number, all(array.is_ready() for array in arrays)))
        sent.release()

    outbox = Outbox("m", offer, never)
    first, second = ArrayToCome(), ArrayToCome()
    outbox.put(1, [first])
    outbox.put(2, [second])
    second.computed.set()
    assert not sent.acquire(timeout=0.05)
    first.computed.set()
    assert sent.acquire(timeout=_TIMEOUT_S) and sent.acquire(timeout=_TIMEOUT_S)
    assert offered == [(1, True), (2, True)]
    gone = threading.Event()
    weakref.finalize(second, gone.set)
    del first, second
    gc.collect()
    assert gone.wait(_TIMEOUT_S)


def never(failure):
    raise AssertionError(failure)


def test_a_wait_ends_when_all_messages_are_offered_or_when_it_is_stopped():
    offered = []
    outbox = Outbox("m", lambda number, arrays: offered.append(number), never)
    outbox.wait(lambda: None)
    late = ArrayToCome()
    outbox.put(1, [late])
    with pytest.raises(InterruptedError):
        outbox.wait(raise_interrupted)
    assert offered == []
    late.computed.set()
    outbox.wait(lambda: None)
    assert offered == [1]


def raise_interrupted():
    raise InterruptedError


def test_a_message_that_cannot_be_offered_is_reported_at_once_and_raised_by_every_later_call():
    reported = queue.SimpleQueue()

    def offer(number, arrays):
        raise ValueError("no connection")

    outbox = Outbox("m", offer, reported.put)
    outbox.put(1, [])
    for call in (lambda: outbox.wait(lambda: None), lambda: outbox.put(2, []), outbox.check):
        with pytest.raises(TransferError, match="^mesh 'm' could not send an array to another") as raised:
            call()
        assert "ValueError: no connection" in str(raised.value)
    assert reported.get(timeout=_TIMEOUT_S) is raised.value and reported.empty()
