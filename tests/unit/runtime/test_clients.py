from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mpmd
from mpmd.errors import ConfigError
from mpmd.runtime.run import clients
from mpmd.runtime.run.clients import made_devices, mesh_devices, plan_places


@pytest.mark.parametrize(
    ("counts", "cores", "shares"),
    [
        ({"a": 1, "b": 1}, 2, [(0,), (1,)]),
        ({"a": 1, "b": 1}, 5, [(0, 1, 2), (3, 4)]),
        ({"a": 2, "b": 2, "c": 1}, 3, [(0,), (1,), (2,)]),
        ({"a": 1, "b": 1, "c": 1}, 2, [(0,), (0,), (0,)]),
        ({"a": 2, "b": 2, "c": 1}, 2, [(0,), (0,), (0,)]),
        ({"a": 4}, 2, [(0, 1)]),
    ],
)
def test_meshes_get_cores_of_their_own_where_there_are_enough(counts, cores, shares):
    places = plan_places(counts, range(cores))
    assert [place.cores for place in places] == shares
    assert {place.mesh: place.num_devices for place in places} == counts
    assert [place.floats for place in places] == [cores < len(counts)] * len(counts)


def test_pinning_can_be_asked_for_and_refused():
    with pytest.raises(ConfigError, match=r"^3 meshes cannot be pinned to 2 cores"):
        plan_places({"a": 1, "b": 1, "c": 1}, range(2), "always")
    with pytest.raises(ConfigError, match=r"^mesh 'b' has 0 devices; a mesh on CPU has 1 to 2048$"):
        plan_places({"a": 1, "b": 0}, range(2))


def test_too_few_devices_say_how_to_get_more():
    with pytest.raises(ConfigError) as error:
        mesh_devices({"a": 90}, pinning="never")
    assert str(error.value).startswith("the topology needs 90 devices (a: 90), but there are ")
    assert "jax.config.update('jax_num_cpu_devices', 90)" in str(error.value)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_clients_are_apart_pinned_kept_and_leave_the_affinity_alone():
    """In a process of its own, because clients cannot be ended."""
    code = """
        import json, os
        import jax, numpy as np
        from mpmd.runtime.channels.mesh_devices import MeshDevices
        from mpmd.runtime.run.clients import mesh_devices, plan_places
        from mpmd.runtime.run.executor import Executor
        from mpmd.runtime.program.linearize import linearize
        from tests.support.pipeline_graphs import compiled, random_inputs, sequential
        from examples.workloads.graphs import one_f_one_b
        before = os.sched_getaffinity(0)
        counts = {"m0": 2, "m1": 2}
        devices = mesh_devices(counts)
        clients = {d.client for ds in devices.values() for d in ds} - {jax.devices()[0].client}
        again = mesh_devices(counts)
        graph = one_f_one_b(2, 3)
        program = linearize(graph)
        inputs = random_inputs(graph)
        with Executor(program, compiled(program), MeshDevices(devices)) as executor:
            got = executor.run(inputs)
        error = max(float(np.abs(np.asarray(a) - b).max()) for a, b in zip(got, sequential(graph, inputs)))
        print(json.dumps(dict(
            clients=len(clients), sizes=[len(d) for d in devices.values()], same=devices == again,
            ids=[d.id for ds in devices.values() for d in ds],
            error=error,
            affinity=before == os.sched_getaffinity(0), there=[a.devices() <= set(devices[m]) for a, m in
            zip(got, ("m0", "m1", "m1"))])))
    """
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=os.getcwd())
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.pop("error") < 1e-5
    assert result == {
        "clients": 2,
        "sizes": [2, 2],
        "same": True,
        "ids": [2048, 2049, 4096, 4097],
        "affinity": True,
        "there": [True] * 3,
    }


def test_a_mesh_knows_the_cores_that_work_for_it(monkeypatch):
    monkeypatch.setattr(clients, "available_cores", lambda: (0,))
    floating = clients.made_devices({"a": 1, "b": 1})
    assert [clients.cores_of(devices[0]) for devices in floating.values()] == [(0,), (0,)]
    monkeypatch.undo()
    default = clients.mesh_devices({"a": 1}, pinning="never")["a"][0]
    assert clients.cores_of(default) == clients.available_cores()


def test_meshes_of_one_client_share_its_cores_out():
    shared = mpmd.make_topology({"a": 1, "b": 1, "c": 1}, pinning="never")
    cores = clients.cores_of_meshes(shared)
    assert set(cores) == {"a", "b", "c"} and all(cores.values())
    assert len({core for mesh in cores.values() for core in mesh}) == len(clients.available_cores())


def test_meshes_take_the_devices_of_jax_where_there_are_enough():
    topology = mpmd.make_topology({"a": 1, "b": {"x": 2}})
    assert [d for mesh in topology.values() for d in mesh.devices.flat] == jax.devices()[:3]
    assert repr(topology) == "Topology(a: data=1, b: x=2)"


def test_a_topology_says_which_devices_were_made_for_it():
    topology = mpmd.make_topology({"a": 3, "b": 6})
    made = [d for mesh in topology.values() for d in mesh.devices.flat]
    assert not {d.id for d in made} & {d.id for d in jax.devices()} and len({d.id for d in made}) == 9
    assert repr(topology) == (
        "Topology(a: data=3, b: data=6)\n"
        f"  on made devices, as JAX has 8 on CPU: 9: {made[0]!r} to {made[-1]!r}"
    )
    assert mpmd.make_topology({"a": 3, "b": 6}) == topology, "a client cannot be ended: it is used again"


@pytest.mark.parametrize("made", [True, False])
def test_jax_says_which_arrays_are_on_meshes_where_they_cannot_be_combined(made):
    counts = {"a": 1, "b": 2}
    topology = mpmd.make_topology(made_devices(counts) if made else counts)
    a, b = (jax.device_put(np.ones(4), NamedSharding(mesh, P())) for mesh in topology.values())
    with pytest.raises(ValueError, match=r"^Received incompatible .*\n  they are on meshes 'a' and 'b'"):
        a + b
    elsewhere = jax.device_put(np.ones(4), jax.devices()[7])  # where another test may have a mesh
    with pytest.raises(ValueError, match=r"on mesh(es)? 'b'.*\n  mpmd\.fetch\(tree\) puts the arrays"):
        jax.jit(lambda x, y: x * y)(b, elsewhere)
    np.testing.assert_array_equal(sum(mpmd.fetch([a, b])), 2 * np.ones(4))
