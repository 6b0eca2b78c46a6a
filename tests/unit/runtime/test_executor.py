from __future__ import annotations

import jax
import numpy as np
import pytest

from mpmd.runtime.channels.placement import Placement
from mpmd.runtime.executor import Executor, RuntimeOptions
from mpmd.runtime.linearize import linearize

from .pipelines import BODIES, compiled, one_f_one_b, random_inputs, sequential

ISSUES = ("one-thread", "thread-per-mesh")


def placement(meshes: int) -> Placement:
    return Placement({f"m{s}": [jax.devices()[s]] for s in range(meshes)})


def make(graph, bodies=BODIES, **options) -> Executor:
    program = linearize(graph)
    return Executor(
        program, compiled(program, bodies), placement(len(program.streams)), RuntimeOptions(**options)
    )


@pytest.mark.parametrize("issue", ISSUES)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 2), (2, 4), (4, 5), (3, 1)])
def test_1f1b_gives_the_sequential_result(issue, stages, microbatches):
    graph = one_f_one_b(stages, microbatches)
    with make(graph, issue=issue) as executor:
        for step in range(3):
            inputs = random_inputs(graph, step)
            got = executor.run(inputs)
            for want, array in zip(sequential(graph, inputs), got, strict=True):
                np.testing.assert_allclose(np.asarray(array), want, rtol=1e-5, atol=1e-6)
        executor.synchronize()
