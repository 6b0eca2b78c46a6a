from __future__ import annotations

import os
import resource

import numpy as np
import pytest

from examples.workloads.graphs import one_f_one_b
from mpmd.runtime.program.linearize import linearize
from mpmd.runtime.run.executor import Executor, RuntimeOptions
from tests.support.pipeline_graphs import compiled, devices, random_inputs


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("issue", ["one-thread", "thread-per-mesh"])
def test_two_thousand_steps_leave_nothing_behind(issue):
    graph = one_f_one_b(3, 4)
    program = linearize(graph)
    rng = np.random.default_rng(0)
    with Executor(program, compiled(program), devices(3), RuntimeOptions(issue=issue)) as executor:
        weights = [rng.normal(size=8).astype(np.float32) for _ in range(3)]
        rest = random_inputs(graph)[3:]
        samples = []
        for step in range(2000):
            *weights, _ = executor.run([*weights, *rest])
            if step % 100 == 99:
                executor.synchronize()
                samples.append((resident_bytes(), len(os.listdir("/proc/self/fd"))))
    half = samples[len(samples) // 2 :]
    slope = np.polyfit(np.arange(len(half)) * 100, [size for size, _ in half], 1)[0]
    assert abs(slope) < 2000, f"{slope:.0f} bytes per step"
    assert len({files for _, files in samples}) == 1
