"""What a process has one of is made once, whichever threads ask for it first."""

from __future__ import annotations

import threading
import time

import pytest

from mpmd.support.resources import once


def in_threads(count, function):
    """The results of a function in threads that begin together."""
    barrier, found = threading.Barrier(count), []

    def run():
        barrier.wait()
        found.append(function())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_that_ask_at_once_get_what_one_of_them_made():
    made = []

    @once
    def registered(name):
        time.sleep(0.01)
        made.append(name)
        return object()

    assert len(set(in_threads(4, lambda: registered("a")))) == 1
    assert registered("b") is not registered("a")
    assert made == ["a", "b"]


def test_a_failure_is_not_kept_and_a_function_may_ask_for_itself():
    left = [RuntimeError("not yet")]

    @once
    def counted(n):
        if left:
            raise left.pop()
        return 0 if n == 0 else counted(n - 1) + 1

    with pytest.raises(RuntimeError, match="not yet"):
        counted(3)
    assert counted(3) == 3
