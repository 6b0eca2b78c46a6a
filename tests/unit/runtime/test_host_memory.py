"""Freed memory stays with the process when it is asked to, as far as it is allowed to."""

import ctypes
import inspect
import subprocess
import sys

import pytest

from examples.workloads.graphs import GraphBuilder, one_f_one_b
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.program.stream_memory import peak_and_freed
from mpmd.runtime.run import executor, host_memory
from mpmd.runtime.run.host_memory import SLACK_BYTES, limit_of
from mpmd.runtime.run.interpreter import Observer
from tests.support.pipeline_graphs import chain_executor, make, random_inputs

FAULTS = """
import resource, sys, threading
import numpy as np
from mpmd.runtime.run.host_memory import freed_memory

def faults(size):
    start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(32):
        np.empty(size, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start

def both(size):
    faults(size)
    print(memory is not None, faults(size))

memory = freed_memory() if sys.argv[1] == "keep" else None
if memory is not None:
    memory.trim()
both(2**26)
thread = threading.Thread(target=both, args=[2**25])  # in the heap of a thread: smaller than 64 MiB
thread.start()
thread.join()
"""

LIMIT = """
import sys
import numpy as np
from mpmd.runtime.run import host_memory
from mpmd.runtime.run.host_memory import freed_memory

class Owner: pass

MiB, host_memory._INTERVAL_SECONDS, host_memory._CHECK_SHARE = 1 << 20, 0.0, 0
host_memory._RETURN_SECONDS = 0.0
memory = freed_memory()
if memory is None:
    sys.exit()

def allocate_and_free(count):
    blocks = [np.full(2 * MiB, 1, np.uint8) for _ in range(count)]
    between = [np.full(64, 1, np.uint8) for _ in range(100)]
    del blocks
    return between

def trimmed():
    print(memory.kept() // MiB, memory.trim(), memory.kept() // MiB)

small, large = Owner(), Owner()
memory.allow(small, 16 * MiB)
memory.allow(large, 100 * MiB)
held = allocate_and_free(32)
trimmed()  # below the larger limit
held += allocate_and_free(64)
trimmed()  # above it
del large
held += allocate_and_free(12)
print(memory.kept() // MiB, memory.trim(postpone=True), memory.kept() // MiB)
held += allocate_and_free(20)
host_memory._RETURN_SECONDS = 1e6
trimmed()  # above the one that is left
held += allocate_and_free(12)
trimmed()  # above it, too soon
held += allocate_and_free(32)
trimmed()  # above twice the limit
host_memory._INTERVAL_SECONDS = 1e6
memory.trim()
held += allocate_and_free(32)
trimmed()  # not looked at again so soon
"""


def _run(program: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.slow
def test_blocks_that_were_freed_are_used_again_without_page_faults() -> None:
    runs = zip(_run(FAULTS, "keep"), _run(FAULTS, "default"), strict=True)
    for kept, without in runs:
        kept_any, faults = kept.split()
        if kept_any == "False":
            pytest.skip("this C library has no mallopt, or no mallinfo2")
        assert int(faults) < int(without.split()[1]) / 4  # of 4 KiB or of 2 MiB each, as the system likes


def test_more_than_the_largest_limit_is_returned_to_the_system() -> None:
    lines = _run(LIMIT)
    if not lines:
        pytest.skip("this C library has no mallopt, or no mallinfo2")
    table = [line.split() for line in lines]
    assert [returned for _, returned, _ in table] == [
        "False",
        "True",
        "False",
        "True",
        "False",
        "True",
        "False",
    ]
    for kept, returned, left in table:
        assert 20 <= int(kept) <= 140
        assert int(left) <= 4 if returned == "True" else abs(int(left) - int(kept)) <= 4


@pytest.mark.parametrize("missing", ["gnu_get_libc_version", "mallinfo2"])
def test_other_c_libraries_are_left_alone(missing, monkeypatch) -> None:
    class Library:
        def __getattr__(self, name):
            if name == missing:
                raise AttributeError(name)
            return lambda *_: pytest.fail(f"{name} was called")

    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library())
    assert inspect.unwrap(host_memory.freed_memory)() is None


def test_what_a_step_frees_itself_and_a_quarter_of_its_peak_may_be_kept() -> None:
    assert limit_of(1 << 30, 1 << 28) == (1 << 28) + (1 << 28)
    assert limit_of(1 << 20, 1 << 10) == (1 << 10) + SLACK_BYTES


def test_results_and_arguments_that_are_not_consumed_stay() -> None:
    b = GraphBuilder()
    consumed, read = b.input("m0", "state", donated=True), b.input("m0", "batch")  # 32 bytes each
    (y,) = b.call("f", "m0", [consumed, read], donated=(0,))
    (z,) = b.call("g", "m0", [y])
    b.output(z)
    workspace = {("m0", "f"): 1000, ("m0", "g"): 10}
    assert peak_and_freed(linearize(b.graph()), workspace) == (2 * 32 + 1000, 1000)


class Watching(Observer):
    """Observes a step."""


class Recorder:
    """In the place of the process's freed memory."""

    def __init__(self):
        self.limits, self.looked = [], 0

    def allow(self, owner, limit):
        self.limits.append(limit)

    def trim(self, postpone):
        self.looked += 1
        self.postponed = postpone


def test_every_step_looks_at_what_is_kept_unless_nothing_is(monkeypatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(executor, "freed_memory", lambda: recorder)
    graph = one_f_one_b(2, 3)
    with make(graph) as running:
        for step in range(3):
            running.run(random_inputs(graph, step))
        assert not recorder.postponed
        running.run(random_inputs(graph, 3), observers=[Watching()])
        assert recorder.postponed
        running.synchronize()
    assert recorder.limits == [limit_of(*peak_and_freed(running.program, {}))] and recorder.looked == 4
    with chain_executor({}, keep_freed_memory=False):
        assert len(recorder.limits) == 1


def test_without_glibc_steps_run_as_ever(monkeypatch) -> None:
    monkeypatch.setattr(executor, "freed_memory", lambda: None)
    graph = one_f_one_b(2, 3)
    with make(graph) as running:
        assert len(running.run(random_inputs(graph))) == len(graph.outputs)
        running.synchronize()
