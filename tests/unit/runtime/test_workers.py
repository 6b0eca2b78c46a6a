"""Threads that issue streams, interrupted wherever Python may interrupt them."""

import sys
import threading

import pytest

from mpmd.runtime.run.interpreter import StepState, Workers

MESHES = ("m0", "m1", "m2")


class Gate:
    """An instruction that ends when the step is stopped, or when all meshes have come to it."""

    mesh, at = "m0", 0

    def __init__(self, meshes):
        self.expected = meshes
        self.open = threading.Event()
        self.lock, self.count = threading.Lock(), 0

    def issue(self, frame):
        with self.lock:
            self.count += 1
            if self.count == self.expected:
                self.open.set()
        while not frame.stopped and not self.open.wait(0.001):
            pass


def frame():
    return StepState(0, [], [], [], [])


def interrupted_after(opcodes, call):
    """Whether a KeyboardInterrupt came up `opcodes` opcodes into `Workers.issue` and what it calls."""
    left = [opcodes]

    def trace(scope, event, _):
        if not scope.f_code.co_filename.endswith("interpreter.py"):
            return None
        scope.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for opcodes if some frame wants them by now
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_place_leaves_threads_that_do_the_next_step():
    """Among them places at which some threads have their streams and others have not."""
    places = 0
    for opcodes in range(1, 10_000):
        workers = Workers(MESHES)
        gate = Gate(len(MESHES))
        if not interrupted_after(opcodes, lambda: workers.issue([[gate]] * len(MESHES), frame())):  # noqa: B023
            workers.close()
            break
        places += 1
        second = threading.Thread(
            target=workers.issue, args=([[Gate(1)]] * len(MESHES), frame()), daemon=True
        )
        second.start()
        second.join(20)
        assert not second.is_alive(), (
            f"the step after an interrupt {opcodes} opcodes into the first one hangs"
        )
        workers.close()
    assert places > 100, "the whole of issuing was interrupted"


def test_the_first_failure_of_a_thread_is_raised_and_the_others_stop():
    class FailingCall:
        mesh, at = "m1", 0

        def issue(self, frame):
            raise ValueError("no")

    workers, never = Workers(MESHES), Gate(len(MESHES) + 1)
    with pytest.raises(ValueError, match="no"):
        workers.issue([[never], [FailingCall()], [never]], frame())
    workers.issue([[Gate(1)]] * len(MESHES), frame())
    workers.close()
    assert not any(thread.is_alive() for thread in workers.threads)
