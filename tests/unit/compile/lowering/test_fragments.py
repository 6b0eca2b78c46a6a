"""Every fragment of every model: our HLO of it, evaluated, gives what XLA gives for its StableHLO."""

import jax
import numpy as np
import pytest

import mpmd
from examples.workloads.models import MODELS
from mpmd.compile.hlo import verify
from mpmd.compile.lowering import lower
from tests.support.comparing import relative_difference
from tests.support.hlo_meaning import evaluate

QUICK = ("mlp", "mixture")


def arguments_of(module, rng):
    """Small floats; integers that are indices of something."""
    out = []
    for parameter in module.entry.parameters:
        shape = parameter.shape
        if shape.info.kind == "float":
            out.append((rng.standard_normal(shape.dims) * 0.1).astype(shape.numpy_dtype))
        else:
            out.append(rng.integers(0, 2, shape.dims).astype(shape.numpy_dtype))
    return out


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in MODELS]
)
def test_fragments(name, xla):
    model = MODELS[name]
    params, loss, batch = model.build(2)

    def step(params, *batch):
        return mpmd.accumulate_gradients(loss, 2)(params, *batch)

    topology = mpmd.make_topology({f"m{s}": 1 for s in range(2)})
    config = mpmd.make_config(topology, {f"stage{s}": f"m{s}" for s in range(2)})
    lowered = mpmd.jit(step, config).lower(params, *batch)
    rng = np.random.default_rng(0)
    assert lowered.fragments
    for fragment in lowered.fragments.values():
        module = lower(fragment.text)
        verify(module)
        arguments = arguments_of(module, rng)
        got = evaluate(module, arguments)
        want = xla.run_stablehlo(fragment.text, arguments)
        assert relative_difference(jax.tree.leaves(got), want) <= max(model.tolerance, 1e-5), fragment.name
