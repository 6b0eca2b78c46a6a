"""Training in several processes equals one process's, bit by bit."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.workloads.models import MODELS
from tests.support.launching import launch, output
from tests.support.training_in_processes import train
from tests.support.two_hosts import ADDRESSES, NoNamespaces, two_hosts

SCHEDULES = ("1f1b", "zb_h1", "interleaved_1f1b")
PROGRAM = "tests.support.training_in_processes"


@pytest.mark.optimized
def test_two_processes_train_as_one_and_notice_that_one_was_killed():
    """One mesh over both first, then one in each."""
    spanning, case = "mlp:pair:xla", "mlp:1f1b"
    code, found = launch(2, PROGRAM, "2", "2", spanning, case, "kill:1")
    (left,) = [line for line in found if line["case"] == case]
    compared = [left, *(line for line in found if line["case"] == spanning)]
    assert len(compared) == 3
    want = {name: train(name, 2, 2) for name in (spanning, case)}
    for line in compared:
        assert [line[key] for key in ("losses", "state")] == [
            want[line["case"]][key] for key in ("losses", "state")
        ]
    assert want[spanning]["difference"] < 1e-6
    assert code == 137
    assert left["error"].startswith("process 1 (host ") and "'m1'" in left["error"].splitlines()[0]
    assert "step 3 is the last one that process 0 has completed" in left["error"]
    assert left["after"] < 10


def check_equal(cases, meshes, devices=1, processes=None):
    """The cases give the same bits in one process and in several, by default one for each mesh.

    Returns:
        What one process printed.
    """
    alone = output([sys.executable, "-m", PROGRAM, str(meshes), "2", *cases], 250)
    want = {line["case"]: line for line in map(json.loads, alone.stdout.splitlines())}
    count = meshes if processes is None else processes
    code, found = launch(count, PROGRAM, str(meshes), "2", *cases, seconds=250, devices=devices)
    assert code == 0 and sorted(line["process"] for line in found) == sorted([*range(count)] * len(cases))
    for line in found:
        for key in ("losses", "state"):
            assert line[key] == want[line["case"]][key], line["case"]
    return want.values()


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_under_every_schedule(name, meshes):
    check_equal([f"{name}:{schedule}" for schedule in SCHEDULES], meshes)


@pytest.mark.slow
@pytest.mark.optimized
def test_no_message_is_read_after_its_memory_was_freed_or_given_away(monkeypatch):
    """Freed memory is overwritten, and every message has one digest at both of its ends."""
    monkeypatch.setenv("MALLOC_PERTURB_", "165")
    cases = ["checkpointed_whole:interleaved_1f1b", "mlp:zb_h1"]
    code, found = launch(4, "tests.support.checked_messages", "4", "6", *cases, seconds=280)
    ends = [line for line in found if "sent" in line]
    assert code == 0 and len(ends) == 4
    sent = {number: digest for line in ends for number, digest in line["sent"].items()}
    received = {number: digest for line in ends for number, digest in line["received"].items()}
    assert len(sent) > 500 and received == sent
    for case in cases:
        want = train(case, 4, 6)
        for line in found:
            if line.get("case") == case:
                assert (line["losses"], line["state"]) == (want["losses"], want["state"]), case


@pytest.mark.slow
def test_meshes_of_several_devices_and_of_different_sizes():
    """Shards are sent to equal shards; what is sharded otherwise is sent in pieces."""
    check_equal(["mlp:sharded", "mlp:sizes"], 2, devices=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "kinds"),
    [(2, 2, ("whole", "crossed", "inside")), (4, 1, ("whole", "sharded"))],
)
def test_meshes_over_several_processes(processes, devices, kinds):
    """One mesh over all, meshes that share processes, one within another's process, each over two of four."""
    cases = [f"{name}:{kind}:xla" for name in ("mlp", "tied", "skip") for kind in kinds]
    for line in check_equal(cases, 2, devices, processes):
        assert line["difference"] < 1e-5, line["case"]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_on_meshes_over_two_processes(name):
    for line in check_equal([f"{name}:sharded:xla"], 2, 1, 4):
        assert line["difference"] <= MODELS[name].tolerance


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill:1", "stop:1"])
def test_a_collective_does_not_wait_for_a_process_that_is_lost(fault):
    code, found = launch(4, PROGRAM, "2", "2", "mlp:sharded:xla", fault)
    assert code == (137 if fault == "kill:1" else 1)
    assert len(found) == 3
    for line in found:
        assert line["error"].startswith("process 1 (host ") and line["after"] < 10


@pytest.mark.slow
def test_a_message_that_is_not_computed_yet_stops_no_other():
    """The large one depends on a small one that is asked for later, from the same process."""
    code, found = launch(3, "tests.support.late_receiver", seconds=60)
    assert code == 0 and [line["right"] for line in found] == [True] * 3


@pytest.mark.slow
def test_callbacks_may_use_jax_where_a_process_has_one_thread(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    code, found = launch(2, "tests.support.calling_back", seconds=60)
    assert code == 0 and sorted(line["process"] for line in found) == [0, 0, 1, 1]
    of_first = found[0]["found"][0]
    assert all(line["found"] == pytest.approx([of_first] * 3, rel=1e-5) for line in found)


JOINING = (
    "import sys, jax; jax.config.update('jax_num_cpu_devices', 1)\n"
    "jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2])); sys.argv[1:] = sys.argv[3:]\n"
    f"from {PROGRAM} import main; main()"
)
"""A script that joins two processes itself, as on a cluster, in place of `mpmd-run`."""


def joined(address, case, hosts=((), ())):
    """What two processes print that join each other; each command may begin with that of a host."""
    arguments = ["2", "2", case]
    commands = [[*hosts[k], sys.executable, "-c", JOINING, address, str(k), *arguments] for k in range(2)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(output, commands))
    assert [process.returncode for process in done] == [0, 0], done[0].stderr + done[1].stderr
    return [json.loads(process.stdout.splitlines()[-1]) for process in done]


@pytest.mark.slow
def test_processes_that_the_script_joins_itself():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    first, second = joined(address, "mlp:1f1b")
    assert (first["losses"], first["state"]) == (second["losses"], second["state"])


@pytest.mark.slow
@pytest.mark.optimized
def test_two_hosts_train_as_one_process():
    """Each host is a network namespace: neither reaches the other by loopback, or by its own name."""
    case = "mlp:1f1b"
    try:
        with two_hosts() as hosts:
            found = joined(f"{ADDRESSES[0]}:8476", case, hosts)
    except NoNamespaces as error:
        pytest.skip(f"network namespaces: {error}")
    want = train(case, 2, 2)
    for line in found:
        assert (line["losses"], line["state"]) == (want["losses"], want["state"])
