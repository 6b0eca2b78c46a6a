"""Messages that are sent directly: in order, on a wire that keeps JAX's and NCCL's rules; which they are."""

import dataclasses
import time
from types import SimpleNamespace

import pytest

from examples.workloads.graphs import one_f_one_b
from mpmd import jax_distributed
from mpmd.api import processes
from mpmd.errors import ConfigError, ProgramError
from mpmd.runtime.channels import direct
from mpmd.runtime.channels.direct import DirectPair, DirectPairs, MessageEnds, direct_messages
from mpmd.runtime.program.graph import BufferType
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.fake_engine import expected, fake_arguments, fake_executables
from tests.support.fake_wires import Wire, WiredEngine, run_processes
from tests.support.pairs_in_processes import all_pairs, random_graph
from tests.support.worlds import in_threads


@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_trains_over_a_wire(stages):
    """Three steps; every process makes the calls of all pairs, those of others, too."""
    graph = one_f_one_b(stages, 5)
    program = linearize(graph, processes={f"m{k}": (k,) for k in range(stages)})
    found, wire = run_processes(program, lambda: fake_arguments(graph), 3, all_pairs)
    want = expected(graph)
    assert all([of_step[k] for k in range(len(want))] == want for of_step in found)
    assert [len(calls) for calls in wire.calls.values()] == [3 * len(all_pairs(program))] * stages


def test_random_programs_run_over_a_wire():
    """Meshes of one process and of two, several in one process, and processes without a message."""
    calls = 0
    for seed in range(25):
        graph, of_mesh = random_graph(seed)
        program = linearize(graph, processes=of_mesh)
        found, wire = run_processes(program, lambda graph=graph: fake_arguments(graph), 2, all_pairs)
        want = dict(enumerate(expected(graph)))
        assert all(
            of_step == {k: want[k] for k in of_step} and len(of_step) == len(want) for of_step in found
        )
        counts = {len(made) for made in wire.calls.values()}
        assert counts <= {2 * len(all_pairs(program))}
        calls += sum(counts)
    assert calls > 50


def test_a_message_out_of_order_is_an_error_and_no_wrong_array():
    calls = []
    pairs = DirectPairs(
        [
            DirectPair(
                (0, k), k in (0, 2), False, lambda a: a, lambda: "absent", lambda a, k=k: calls.append((k, a))
            )
            for k in range(4)
        ]
    )
    step = pairs.step()
    with pytest.raises(ProgramError, match="must be issued before those that follow it"):
        step.send((0, 2), "two")
    step = pairs.step()
    step.send((0, 0), "zero")
    assert calls == [(0, "zero")]
    step.send((0, 2), "two")
    assert calls == [(0, "zero"), (1, "absent"), (2, "two"), (3, "absent")]
    with pytest.raises(ProgramError, match="must be issued before"):
        step.send((0, 0), "again")


def test_threads_of_their_own_are_refused():
    graph = one_f_one_b(3, 2)
    program = linearize(graph, processes={"m0": (0,), "m1": (0,), "m2": (1,)})
    engine = WiredEngine(Wire(), 0, all_pairs)
    options = RuntimeOptions(issue="thread-per-mesh")
    with pytest.raises(ConfigError, match="but arrays are sent directly, and processes must issue all sends"):
        Executor(program, fake_executables(program), engine, options, process=0)
    with pytest.raises(ConfigError, match="transfers is 'nccl'; there are 'auto', 'device_put', 'server'"):
        RuntimeOptions(transfers="nccl")


@dataclasses.dataclass(frozen=True)
class FarDevice:
    process_index: int
    device_kind: str = "H100"
    platform: str = "gpu"
    number: int = 0
    count: int = 1

    @property
    def client(self):
        made = [FarDevice(p, number=n) for p in range(8) for n in range(self.count)]
        return SimpleNamespace(devices=lambda: made)


class Lying:
    """A sharding, as far as it matters."""

    def __init__(self, devices, hlo="replicated", memory_kind=None):
        self.device_set, self.memory_kind, self.hlo = set(devices), memory_kind, hlo

    def _to_xla_hlo_sharding(self, rank):
        return self.hlo, rank


def ends(here, there, sequence=0):
    kinds = [BufferType((8, 8), "float32", mesh) for mesh in ("m0", "m1")]
    return MessageEnds((0, sequence), *kinds, Lying(*here), Lying(*there))


GPUS = ([FarDevice(0)],), ([FarDevice(1)],)


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(jax_distributed, "copies_between_processes", lambda platform: True)
    monkeypatch.setattr(direct.jax_compat, "default_memory_kind", lambda sharding: "device")


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        (([FarDevice(0)],), ([FarDevice(1, "H200")],), "their devices are H100 and H200"),
        (([FarDevice(0)], "a"), ([FarDevice(1)], "b"), "they are sharded differently"),
        (([FarDevice(0), FarDevice(1)],), ([FarDevice(2)],), "they are sharded differently"),
        (([FarDevice(0)],), ([FarDevice(0, number=1)],), "both meshes have devices in one process"),
        (
            ([FarDevice(0)], "r", "pinned_host"),
            ([FarDevice(1)], "r"),
            "one of them is not in the memory of its devices",
        ),
        (([FarDevice(0, count=4)],), ([FarDevice(1, count=4)],), "a process has several GPUs"),
    ],
)
@pytest.mark.usefixtures("nccl")
def test_arrays_that_are_not_alike_go_by_the_server_and_a_warning_says_so(here, there, why):
    alike = ends(*GPUS)
    found = direct_messages([alike, ends(here, there, 1), ends(here, there, 2)], "auto")
    assert found.keys == {alike.key}
    with pytest.warns(UserWarning, match=f"2 messages a step from mesh 'm0' to mesh 'm1': {why}"):
        found.warn()
    if "several" in why:
        assert len(direct_messages([ends(here, there, 1)], "device_put").keys) == 1
    else:
        with pytest.raises(ConfigError, match=f"transfers is 'device_put', but not all .*\n.*{why}"):
            direct_messages([alike, ends(here, there, 1)], "device_put")


@pytest.mark.usefixtures("nccl")
def test_what_is_sent_directly():
    assert direct_messages([ends(*GPUS)], "auto").keys == {(0, 0)}
    assert not direct_messages([ends(*GPUS)], "server").keys
    cpus = ([FarDevice(0, "cpu", "cpu")],), ([FarDevice(1, "cpu", "cpu")],)
    assert not direct_messages([ends(*cpus)], "auto").keys
    assert direct_messages([ends(*cpus)], "device_put").keys == {(0, 0)}
    several = ([FarDevice(0), FarDevice(1)],), ([FarDevice(2), FarDevice(3)],)
    assert direct_messages([ends(*several)], "auto").keys == {(0, 0)}


def test_without_such_copies_the_choice_is_an_error():
    """JAX on CPUs has them with a flag only."""
    cpus = ([FarDevice(0, "cpu", "cpu")],), ([FarDevice(1, "cpu", "cpu")],)
    with pytest.raises(ConfigError, match="does not copy arrays between CPUs of different processes"):
        direct_messages([ends(*cpus)], "device_put")


def test_no_message_is_sent_before_every_process_has_compiled(monkeypatch):
    """One process compiles longer; a process that would send other messages is found out."""
    events = []

    def work(world, keys):
        monkeypatch.setattr(processes, "WorldDevices", SimpleNamespace)
        with world.exchange("the compilation of a program") as exchange:
            time.sleep(0.05 * world.index)
            events.append("compiled")
            program = SimpleNamespace(pairs=keys[world.index])
            devices = SimpleNamespace(meshes={})
            made = processes.executor_of(program, {}, devices, RuntimeOptions(), {}, exchange)
        events.append("message")
        return made

    monkeypatch.setattr(processes, "Part", lambda program, *rest: program)
    monkeypatch.setattr(processes, "with_meetings", lambda program, executables, *rest: executables)
    in_threads(lambda world: work(world, [[(0, 0)], [(0, 0)]]))
    assert events == ["compiled"] * 2 + ["message"] * 2
    for error in in_threads(lambda world: work(world, [[(0, 0)], [(0, 1)]])):
        assert "process 1 sends other arrays directly than process 0" in error
