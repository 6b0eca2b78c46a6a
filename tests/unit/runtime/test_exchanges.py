"""Exchanges between processes: they announce themselves, are compared, and end in all processes alike."""

from __future__ import annotations

import signal
import threading

import pytest

from mpmd.errors import CheckpointError, PeerError, ProgramError
from mpmd.runtime.processes.exchange import Alike, settings_text, without_addresses
from mpmd.runtime.processes.store import BoundedStore
from mpmd.runtime.processes.world import Origins, differ
from mpmd.runtime.run.waiting import Exclusive
from tests.support.worlds import in_threads


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("mpmd.runtime.processes.monitor._POLL_SECONDS", 0.01)


def test_processes_in_different_exchanges_are_told_so():
    def work(world):
        with world.exchange("save" if world.index == 1 else "fetch 0") as exchange:
            return exchange.gather("")

    for page in in_threads(work):
        assert page.startswith("process 1") and " began save, where process 0 began fetch 0\n" in page


def test_one_that_is_in_no_exchange_is_missed():
    """Process 1 runs a step, which it announces: the others' monitors see that."""

    def work(world):
        if world.index == 1:
            return world.begin("step 3 of program 0")
        with world.exchange("save") as exchange:
            return exchange.gather("")

    first, _ = in_threads(work, watched=True)
    assert " began step 3 of program 0, where process 0 began save\n" in first


@pytest.mark.parametrize("error", [ValueError("no such file"), KeyboardInterrupt()])
def test_an_exchange_that_one_process_leaves_ends_in_all(error):
    def work(world):
        try:
            with world.exchange("save") as exchange:
                if world.index == 1:
                    raise error
                return exchange.gather("")
        except KeyboardInterrupt:
            return "interrupted"

    first, second = in_threads(work, watched=True)
    assert second in (error, "interrupted")
    assert f" failed in save:\n    {str(error) or 'KeyboardInterrupt'}\n" in first


def test_work_that_fails_in_one_process_fails_in_all_and_they_go_on():
    def work(world):
        def fail():
            if world.index == 1:
                raise ValueError("no such file")
            return world.index

        raised = []
        for kind in (PeerError, CheckpointError):
            try:
                with world.exchange("save") as exchange:
                    exchange.together(fail, kind)
            except (PeerError, CheckpointError, ValueError) as error:
                raised.append(error)
        with world.exchange("again") as exchange:
            return raised, exchange.together(lambda: world.index)

    (first, both), (second, _) = in_threads(work)
    assert both == [0, 1]
    assert [type(error) for error in first] == [PeerError, CheckpointError]
    assert [type(error) for error in second] == [ValueError, ValueError]
    assert "process 1" in str(first[0]) and "failed in save: ValueError: no such file" in str(first[0])


def test_a_handler_within_an_exchange_or_a_step_is_refused_and_not_waited_for():
    def work(world):
        refusal = pytest.raises(ProgramError, match="between two steps")
        with world.exchange("save"), refusal as refused, world.exchange("fetch 0"):
            pass
        with world.turn("a step"), refusal, world.exchange("fetch 0"):
            pass
        with world.exchange("again"):
            return str(refused.value)

    for page in in_threads(work):
        assert page.startswith("fetch 0 was begun by a signal handler")


def test_what_is_compared_shows_the_line_that_differs_and_does_not_end_the_world():
    def work(world):
        alike = Alike("saves something else", f"step {world.index}")
        refusal = pytest.raises(PeerError, match="process 1 saves something else than process 0")
        with refusal, world.exchange("save", alike):
            pass
        with world.exchange("again") as exchange:
            return exchange.gather(str(world.index))

    assert in_threads(work) == [["0", "1"]] * 2


def test_settings_that_change_numbers_are_lines():
    text = settings_text()
    for name in (
        "mpmd",
        "jax",
        "jaxlib",
        "jax_enable_x64 =",
        "jax_default_matmul_precision =",
        "prng_impl =",
    ):
        assert name in text
    assert without_addresses("f <function g at 0x7f12ab34cd> 0x1") == "f <function g at 0x> 0x1"


def test_origins_name_the_call_and_the_result_of_an_array_and_hold_none():
    class SomeArray:
        pass

    origins, first, second = Origins(), SomeArray(), SomeArray()
    origins.record("program 0", [first, 1.0, second])
    assert origins.of(second) == ["result 2 of program 0"] and origins.of(SomeArray()) == []
    origins.record("program 1", [second])  # an argument that is a result
    both = origins.of(second)
    assert both == ["result 0 of program 1", "result 2 of program 0"]
    assert differ(origins.of(first), both) and not differ(both, both[1:]) and not differ(both, [])
    for step in range(20):
        origins.record(f"program {step}", [])
    assert origins.of(second) == [], "of an early call"


def test_a_call_of_the_store_within_another_gets_its_own_answer():
    """As in a signal handler, which runs while the main thread waits for an answer."""
    asked = threading.Event()

    class Client:
        def key_value_dir_get(self, prefix):
            if prefix == "outer":
                asked.wait(5)
            return [(prefix, "")]

    store, found = BoundedStore(Client()), []

    def handler(*_):
        asked.set()
        found.append(store.key_value_dir_get("inner"))

    before = signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, signal.SIGUSR1]).start()
    try:
        assert store.key_value_dir_get("outer") == [("outer", "")]
    finally:
        signal.signal(signal.SIGUSR1, before)
        store.close()
    assert found == [[("inner", "")]]


def test_exclusive_work_refuses_its_own_thread_and_waits_for_others():
    exclusive, order = Exclusive(), []
    assert not exclusive.held_below()

    def other():
        assert not exclusive.held_below(), "by another thread"
        with exclusive.work("other"):
            order.append("other")

    with exclusive.work("a step"):
        assert exclusive.held_below()
        thread = threading.Thread(target=other)
        thread.start()
        refusal = pytest.raises(ProgramError, match="another step was begun by a signal handler")
        with refusal, exclusive.work("another step"):
            pass
        order.append("first")
    thread.join(5)
    assert order == ["first", "other"]


def test_a_thread_of_xla_is_refused_while_another_one_works():
    """A callback would wait for the step that waits for it."""
    exclusive, found = Exclusive(), []

    def callback():
        threading.current_thread().name = "Dummy-7"
        try:
            with exclusive.work("a step"):
                found.append("worked")
        except ProgramError as error:
            found.append(str(error))

    with exclusive.work("a step"):
        thread = threading.Thread(target=callback)
        thread.start()
        thread.join(5)
    callback_after = threading.Thread(target=callback)
    callback_after.start()
    callback_after.join(5)
    assert found[0].startswith("a step was begun by a callback of a fragment") and found[1] == "worked"
