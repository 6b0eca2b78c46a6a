"""What becomes of the communication of programs of several devices in their pipeline."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.hlo import verify
from mpmd.compile.pipelines import preparation
from tests.support.meshes import evaluated, part, partitioned

WIDE, DEEP, BATCH = 8, 3, 8
ROWS, WHOLE = ("data",), ()


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return (x**2).mean()


def gradients(*arguments):
    return jax.tree.leaves(jax.value_and_grad(loss)(list(arguments[:-1]), arguments[-1]))


def given():
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((WIDE, WIDE)).astype(np.float32) for _ in range(DEEP)]
    return [*arrays, random.standard_normal((BATCH, WIDE)).astype(np.float32)]


def prepared(devices, spec):
    """The gradients of weights that all devices have, on parts of a batch."""
    axes, specs = {"data": devices}, [[WHOLE, WHOLE]] * DEEP + [[ROWS, WHOLE]]
    wanted = [[], *[[spec, WHOLE]] * DEEP]
    module = partitioned(lambda *a: gradients(*a), given(), axes, specs, wanted)
    for pass_ in preparation(devices):
        pass_.run(module)
    verify(module)
    return module, evaluated(module, given(), axes, specs), wanted


def collectives(module):
    return Counter(i.opcode for c in module.computations for i in c if i.info.category.name == "COLLECTIVE")


def check(rows, wanted, devices):
    whole = [np.asarray(g) for g in gradients(*given())]
    for device, values in enumerate(rows):
        for got, array, spec in zip(values, whole, wanted, strict=True):
            own = part(array, spec, {"data": devices}, device)
            np.testing.assert_allclose(got, own, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_gradients_of_all_weights_are_summed_at_once(devices):
    module, rows, wanted = prepared(devices, WHOLE)
    assert collectives(module) == {"all-reduce": 1}
    (sum_,) = (i for i in module.entry if i.opcode == "all-reduce")
    assert len(sum_.operands) == 1 + DEEP, "the loss and the gradients"
    assert not any(i.opcode == "transpose" and i.operands[0] is sum_ for i in module.entry)
    check(rows, wanted, devices)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_gradients_of_which_each_device_keeps_a_part_are_scattered(devices):
    module, rows, wanted = prepared(devices, ROWS)
    assert collectives(module) == {"all-reduce": 1, "reduce-scatter": 1}
    (scattered,) = (i for i in module.entry if i.opcode == "reduce-scatter")
    assert len(scattered.operands) == DEEP
    check(rows, wanted, devices)


def test_no_start_is_left_before_kernels_are_made():
    module, _, _ = prepared(2, WHOLE)
    assert not any(i.opcode.endswith("-start") for c in module.computations for i in c)
