"""Programs whose meshes are in several processes, without any process."""

from __future__ import annotations

import dataclasses
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from examples.workloads.graphs import GraphBuilder
from mpmd.errors import ConfigError, PeerError
from mpmd.runtime.processes.exchange import Alike
from mpmd.runtime.processes.meeting import MeetingCall, with_meetings
from mpmd.runtime.processes.monitor import Monitor, first_difference
from mpmd.runtime.processes.placing import own_cores, placed, share_of
from mpmd.runtime.processes.store import BoundedStore, NoAnswer
from mpmd.runtime.processes.world import Failure, World
from mpmd.runtime.program.graph import CallNode, OutputSpec
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.streams import Copy, Feed, Fetch, Recv, Run, Send
from mpmd.runtime.run.clients import available_cores
from mpmd.runtime.run.decode import chosen_fetches
from tests.support.fake_engine import FakeArray
from tests.support.worlds import KeyValueTable, in_threads

TWO = {"a": (0,), "b": (1,)}


def ops(program, mesh, *kinds):
    stream = next(s for s in program.streams if s.mesh == mesh)
    return [op for op in stream.instructions if isinstance(op, kinds)]


def test_an_argument_is_read_by_one_process_and_sent_to_the_other():
    b = GraphBuilder()
    x = b.input("a", donated=True)
    b.output(*b.call("f", "a", [x], donated=(0,)))
    b.output(*b.call("f", "b", [b.transfer(x, "b")], donated=(0,)))
    program = linearize(b.graph(), processes=TWO)
    assert program.between_processes == {0}
    (feed,) = ops(program, "a", Feed)
    assert feed.fresh, "the user's array may be deleted before the other process has read it"
    assert len(ops(program, "a", Send)) == len(ops(program, "a", Copy)) == 1
    assert ops(program, "b", Feed) == [] and len(ops(program, "b", Recv)) == 1
    assert [stream.processes for stream in program.streams] == [(0,), (1,)]
    assert [stream.mesh for stream in program.part(1).streams] == ["b"]


def test_a_scalar_argument_is_read_by_every_process_that_uses_it():
    """An array that one of them consumes is not another's."""
    b = GraphBuilder(shape=())
    x = b.input("a", donated=True)
    b.output(*b.call("f", "a", [x], donated=(0,)))
    (y,) = b.call("f", "b", [b.transfer(x, "b")])
    b.output(*b.call("g", "c", [b.transfer(y, "c"), b.transfer(x, "c")], donated=(1,)))
    program = linearize(b.graph(), processes={"a": (0,), "b": (1,), "c": (1,)})
    feeds = {mesh: [(f.input, f.fresh) for f in ops(program, mesh, Feed)] for mesh in "abc"}
    assert feeds == {"a": [(0, False)], "b": [(0, True)], "c": [(0, True)]}
    sent = {(c.source, c.target): len(c.types) for c in program.channels}
    assert sent == {("a", "b"): 1, ("b", "c"): 1, ("c", "a"): 1}, "two results and a value, not the argument"


def test_a_copy_of_a_scalar_result_is_not_sent():
    b = GraphBuilder(shape=())
    x = b.input("a")
    b.output(*b.call("f", "a", [x]))
    (copy,) = b.call("f", "b", [b.transfer(x, "b")])
    b.copies.append(OutputSpec(copy, 0, "y0"))
    program = linearize(b.graph(), processes={"a": (0,), "b": (1,), "c": (2,)})
    assert [len(ops(program, mesh, Fetch)) for mesh in "ab"] == [1, 1]
    assert not any(ops(program, mesh, Recv) for mesh in "ab")
    assert len(program.outputs) == 1


def test_meshes_of_one_process_share_arguments_and_channels():
    b = GraphBuilder()
    x = b.input("a")
    (y,) = b.call("f", "a", [b.transfer(b.transfer(x, "b"), "a")])
    (z,) = b.call("f", "c", [b.transfer(y, "c")])
    b.output(*b.call("g", "b", [b.transfer(z, "b"), b.transfer(x, "b")]))
    program = linearize(b.graph(), processes={"a": (0,), "b": (0,), "c": (1,)})
    between = [(c.source, c.target) for c in program.channels]
    assert between == [("a", "c"), ("c", "b")] and program.between_processes == {0, 1}
    assert len(ops(program, "b", Feed)) == 1
    assert linearize(b.graph()).between_processes == frozenset()


def test_every_process_gets_the_scalar_results_and_no_sent_buffer_is_a_result():
    b = GraphBuilder()
    loss = b.value("b", shape=())
    call = b.call("f", "b", [b.transfer(b.input("a"), "b")])
    b.ops[-1] = type(b.ops[-1])("f", "b", b.ops[-1].inputs, (call[0], loss))
    b.output(call[0])
    b.output(loss)
    program = linearize(b.graph(), processes=TWO)
    assert [op.output for op in ops(program, "a", Fetch)] == [1]
    assert [op.output for op in ops(program, "b", Fetch)] == [0, 1]
    assert len(program.outputs) == 2
    sent = {op.buffer for op in ops(program, "b", Send)}
    assert len(sent) == 1 and sent.isdisjoint(op.buffer for op in ops(program, "b", Fetch))
    assert {k: process for k, (process, _) in program.results.items()} == {0: (1,), 1: (1,)}
    assert len(ops(program, "b", Run)) == 1
    assert "mesh b in process 1:" in program.as_text()


def test_a_receive_from_another_process_is_posted_a_task_before_its_use():
    b = GraphBuilder()
    x, w = b.input("a"), b.input("b")
    (one,) = b.call("f", "a", [x], microbatch=0)
    (two,) = b.call("f", "a", [x], microbatch=1)
    (got,) = b.call("g", "b", [w, b.transfer(one, "b")], microbatch=0)
    (sliced,) = b.call("slice", "b", [w])
    b.output(*b.call("g", "b", [sliced, b.transfer(two, "b")], microbatch=1))
    b.output(*b.call("h", "a", [b.transfer(got, "a")]))
    graph = b.graph()
    names = [type(op).__name__ for op in ops(linearize(graph, TWO), "b", Recv, Run, Send)]
    assert names == ["Recv", "Recv", "Run", "Send", "Run", "Run"], (
        "the second receive is before the first task"
    )
    names = [type(op).__name__ for op in ops(linearize(graph), "b", Recv, Run, Send)]
    assert names == ["Recv", "Run", "Send", "Run", "Recv", "Run"], "within a process a receive waits"


def test_a_mesh_over_several_processes_has_a_stream_and_messages_in_each():
    b = GraphBuilder()
    x, y = b.input("a"), b.input("c")
    (z,) = b.call("f", "a", [x])
    b.output(*b.call("g", "b", [b.transfer(z, "b"), b.transfer(y, "b")]))
    loss = b.value("a", shape=())
    b.ops.append(CallNode("h", "a", (x,), (loss,)))
    b.output(loss)
    program = linearize(b.graph(), processes={"a": (0, 1), "b": (1, 2), "c": (3,)})
    assert [stream.mesh for stream in program.part(1).streams] == ["a", "b"]
    ends = {(c.source, c.target): k for k, c in enumerate(program.channels)}
    assert program.between_processes == set(ends.values())
    assert program.posted == {ends["c", "b"], ends["a", "c"]}, "the others wait for their own process"
    fetching = {mesh for mesh in "abc" for op in ops(program, mesh, Fetch) if op.output == 1}
    assert fetching == {"a", "b", "c"}, "processes 2 and 3 have no device of its mesh"
    mesh_of_loss = {
        process: {mesh for mesh, at in chosen_fetches(own) if fetch_at(own, mesh, at).output == 1}
        for process in range(4)
        for own in [program.part(process)]
    }
    assert mesh_of_loss == {0: {"a"}, 1: {"a"}, 2: {"b"}, 3: {"c"}}, "process 1 received a copy, too"
    assert "mesh b in processes 1, 2:" in program.as_text()


def fetch_at(program, mesh, at):
    return next(stream for stream in program.streams if stream.mesh == mesh).instructions[at]


@dataclasses.dataclass(frozen=True)
class NumberedDevice:
    process_index: int
    number: int
    platform: str = "cpu"


def processes_of_meshes(sizes, counts):
    devices = [NumberedDevice(process, k) for process, size in enumerate(sizes) for k in range(size)]
    found = placed(devices, {f"m{k}": count for k, count in enumerate(counts)})
    assert [len(of) for of in found.values()] == list(counts)
    taken = [device for of in found.values() for device in of]
    assert taken == [device for device in devices if device in taken], "each once, in order"
    return [sorted({device.process_index for device in of}) for of in found.values()]


def test_a_mesh_is_in_one_process_where_it_fits_and_over_whole_ones_else():
    assert processes_of_meshes([2, 2, 2, 2], [1, 1, 2, 4]) == [[0], [0], [1], [2, 3]]
    assert processes_of_meshes([2, 2, 2], [1, 4]) == [[0], [1, 2]], "it begins at the next process"
    assert processes_of_meshes([1, 1, 1, 1], [2, 2]) == [[0, 1], [2, 3]]
    assert processes_of_meshes([4, 4], [3, 3]) == [[0], [1]]
    with pytest.raises(ConfigError, match="mesh 'm0' of 3 devices does not fit into a process") as raised:
        processes_of_meshes([2, 2, 2], [3])
    assert "give it 2 or 4 of them" in str(raised.value)
    with pytest.raises(ConfigError, match=r"needs more devices \(m0: 3, m1: 3\) than .*process 1: 2\)"):
        processes_of_meshes([4, 2], [3, 3])


def in_exchange(act):
    """Work that is one exchange."""

    def work(world):
        with world.exchange("x") as exchange:
            return act(exchange)

    return work


def test_texts_are_exchanged_in_turns_and_forgotten():
    table = KeyValueTable()

    def work(world):
        with world.exchange("x") as exchange:
            return [exchange.gather(f"{turn} {world.index}") for turn in range(3)]

    assert in_threads(work, table) == [[["0 0", "0 1"], ["1 0", "1 1"], ["2 0", "2 1"]]] * 2
    assert len(table.entries) == 2, "the last turn's"


def test_processes_of_a_machine_divide_the_cores_that_they_may_all_use():
    both, far = ("here", (0, 1)), ("there", (0, 1))
    assert [share_of(p, [both, far, both]) for p in range(3)] == [(0,), (0, 1), (1,)]
    assert [share_of(p, [both] * 4) for p in range(4)] == [(0,), (1,), (0,), (1,)], "there are too few cores"
    pinned = [("here", (0, 1)), ("here", (2, 3))]
    assert [share_of(p, pinned) for p in range(2)] == [(0, 1), (2, 3)], "none is shared"
    assert in_threads(in_exchange(own_cores))[0] == share_of(0, [("here", available_cores())] * 2)


class LostLog(KeyValueTable):
    """A store whose coordinator is gone."""

    def key_value_dir_get(self, prefix):
        raise NoAnswer("no answer for 3 s")


@pytest.mark.parametrize("raises", [False, True])
def test_a_busy_process_that_has_lost_the_coordinator_prints_the_error(raises, monkeypatch, capsys):
    """JAX aborts it; one that raises the error itself prints nothing more."""
    monkeypatch.setattr("mpmd.runtime.processes.monitor._POLL_SECONDS", 0.01)
    monkeypatch.setattr("mpmd.runtime.processes.monitor._RAISE_SECONDS", 0.3)
    world = World(LostLog(), 0, 2)
    before = set(threading.enumerate())
    Monitor(world).start()
    (watching,) = set(threading.enumerate()) - before
    assert until(lambda: world.failure is not None)
    if raises:
        with pytest.raises(PeerError, match="does not answer"):
            world.check()
    assert until(lambda: not watching.is_alive())
    page = capsys.readouterr().err
    if raises:
        assert page == ""
    else:
        lost = "mpmd.errors.PeerError: the coordinator at  does not answer: no answer for 3 s"
        assert page.startswith(lost) and page.endswith(f"in {world.name()}, which was busy\n")


def until(holds):
    """Whether something comes to hold within some seconds."""
    end = time.monotonic() + 5
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def test_what_must_be_alike_is_compared_and_refused_by_all():
    def work(world, text):
        with world.exchange("x", Alike("runs another program", text, "do the same")):
            return world.turns

    assert in_threads(lambda world: work(world, "one\ntwo\n")) == [0, 0]
    for page in in_threads(lambda world: work(world, f"one\ntwo {world.index}\nthree\n")):
        assert page.splitlines() == [
            "process 1 runs another program than process 0",
            "  the first line that differs is line 2",
            "    process 0: two 0",
            "    process 1: two 1",
            "  do the same",
        ]


def test_a_failure_stops_work_and_names_process_host_mesh_and_step():
    stopped = []
    world = World(KeyValueTable(), 0, 2)
    world.on_failure(lambda: stopped.append(True))
    world.meshes, world.hosts[1], world.completed = {1: ["b", "c"]}, "far", 7
    world.check()
    world.fail(Failure(1, "has not answered for 8 s"))
    world.fail(Failure(0, "is a later one"))
    assert stopped == [True]
    with pytest.raises(PeerError, match="process 1 \\(host 'far', meshes 'b', 'c'\\) has not answered") as e:
        world.check()
    assert str(e.value).splitlines()[1] == "  step 6 is the last one that process 0 has completed"


def test_processes_that_begin_different_steps_are_noticed():
    same = {0: (0, ["step 0", "fetch 0"]), 1: (0, ["step 0"]), 2: (1, ["fetch 0", "step 1"])}
    assert first_difference(same) is None, "one is ahead, and forgot the first"
    found = first_difference({**same, 1: (0, ["step 0", "step 1"])})
    assert (found.process, found.known) == (1, False)
    assert found.text == "began step 1, where process 0 began fetch 0"


class Collective:
    """A fragment that waits for other processes; it writes when it is called."""

    name, waits_for_processes = "f", True

    def __init__(self, events):
        self.events = events

    def __call__(self, *arrays):
        self.events.append("called")
        return [array.value for array in arrays]


@pytest.mark.parametrize(
    ("devices", "threads", "together"), [(256, "", True), (1, "", False), (1, "2", False), (1, "1", True)]
)
def test_collectives_that_could_hold_all_threads_begin_in_all_processes_together(
    devices, threads, together, monkeypatch
):
    monkeypatch.setenv("NPROC", threads)
    monkeypatch.setattr("mpmd.runtime.processes.meeting.available_cores", lambda: (0, 1))
    monkeypatch.setattr("mpmd.jax_compat.devices", lambda platform: [None])
    b = GraphBuilder()
    b.output(*b.call("f", "a", [b.transfer(b.input("c"), "a")]))
    program = linearize(b.graph(), processes={"a": (0, 1), "c": (0,)})
    of_mesh = [NumberedDevice(process, k) for process in range(2) for k in range(devices)]
    meshes = {"a": SimpleNamespace(devices=np.array(of_mesh, object))}
    events = []

    def work(world):
        with world.exchange("x") as exchange:
            made = with_meetings(program, {("a", "f"): Collective(events)}, meshes, exchange)["a", "f"]
        found = []
        for turn in range(3):
            if world.index == 1:
                time.sleep(0.02)
                events.append("arrived")
            found += made(FakeArray(f"{world.index}{turn}"))
        return found, isinstance(made, MeetingCall)

    assert in_threads(work) == [(["00", "01", "02"], together), (["10", "11", "12"], together)]
    assert (events[0] == "arrived") == together
    if together:
        assert all(events[: k + 1].count("called") <= 2 * events[:k].count("arrived") for k in range(9))


class Silent:
    """The client of a coordinator that is lost."""

    def __init__(self):
        self.ended = threading.Event()

    def key_value_set(self, key, value, allow_overwrite):
        self.ended.wait()


def test_a_coordinator_that_does_not_answer_ends_the_work():
    stopped, client = [], Silent()
    store = BoundedStore(client, polls=1)
    world = World(store, 1, 2)
    world.on_failure(lambda: stopped.append(True))
    with pytest.raises(PeerError, match="^the coordinator at .* does not answer: no answer for 0.2 s"):
        world.beat("one")
    assert stopped == [True]
    client.ended.set()
    store.close()


def test_a_thread_whose_first_call_comes_when_python_ends_shares_the_calls_of_another(monkeypatch):
    """From 3.12 on, Python then starts no threads."""
    store, read = BoundedStore(KeyValueTable()), []
    store.key_value_set("a", "1")

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def read_late():
        monkeypatch.setattr(threading.Thread, "start", refuse)
        read.append(store.key_value_dir_get("a"))

    late = threading.Thread(target=read_late)
    late.start()
    late.join()
    assert read == [[("a", "1")]]
    store.close()
