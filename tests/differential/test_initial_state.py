"""State is created where the step reads it, and is that of `jax.jit` of the initialization."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from mpmd.errors import SignatureError
from tests.support.stacked_training import LAYERS, WIDTH, assert_equal, batch, init, jitted, numbers

KEY = jax.random.key(7)


@pytest.fixture(scope="module")
def compiled():
    return jitted(2).compiled(jax.eval_shape(init, KEY), *batch())


@pytest.fixture(scope="module")
def born(compiled):
    return compiled.init(init, KEY)


def bytes_by_device(tree):
    found = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            found[shard.device] = found.get(shard.device, 0) + shard.data.nbytes
    return found


def test_the_state_is_that_of_jax_and_lies_where_the_step_wants_it(compiled, born):
    assert_equal(born, jax.jit(init)(KEY))
    for leaf, want in zip(jax.tree.leaves(born), jax.tree.leaves(compiled.abstract_args[0]), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.aval.weak_type) == (want.shape, want.dtype, want.weak_type)
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    weights = born["params"]["layers"]["w"]
    assert isinstance(weights, mpmd.Stacked) and weights.lengths == (LAYERS // 2,) * 2
    assert len(bytes_by_device(born)) == 2
    assert all(jax.tree.leaves(compiled.inputs_used))


def test_weights_are_read_leaf_by_leaf_and_no_more_than_a_mesh_holds(compiled, born):
    files, read = numbers(jax.jit(init)(KEY)), []

    def reader(path, leaf, index):
        read.append((path, tuple((s.start, s.stop) for s in index)))
        return files[path][index]

    assert_equal(compiled.load(reader), born)
    of_layers = [index for path, index in read if path == "['params']['layers']['w']"]
    assert of_layers == [((0, 2), (0, WIDTH), (0, WIDTH)), ((2, 4), (0, WIDTH), (0, WIDTH))]
    assert len(read) == len(set(read))


def test_a_reader_or_an_initialization_of_something_else_is_named(compiled):
    with pytest.raises(SignatureError, match=re.escape("returned float64[16,16] for ['momenta']['inward']")):
        compiled.load(lambda path, leaf, index: KEY if path == "['key']" else np.zeros(leaf.shape)[index])

    def narrow(key):
        state = init(key)
        del state["step"]
        return state | {"params": jax.tree.map(lambda p: p.astype(jnp.bfloat16), state["params"]), "more": 1}

    with pytest.raises(SignatureError) as raised:
        compiled.init(narrow, KEY)
    text = str(raised.value)
    assert "['step'] is missing" in text and "['more'] is not part of the argument" in text
    assert "['params']['outward'] is bfloat16[16,16], and the step takes float32[16,16]" in text
    with pytest.raises(SignatureError, match="there is no argument 5; the step has 3"):
        compiled.init(init, KEY, argnum=5)


@pytest.mark.slow
def test_what_cannot_be_divided_is_computed_whole_with_a_warning():
    def sorted_init(key):
        state = init(key)
        wide = jnp.sort(jax.random.normal(key, (LAYERS, 400, 400)), axis=0)
        state["params"]["layers"]["w"] = wide[:, :WIDTH, :WIDTH]
        return state

    compiled = jitted(2).compiled(jax.eval_shape(sorted_init, KEY), *batch())
    with pytest.warns(UserWarning, match=r"computes 2 MiB on a mesh that needs 1 MiB of them: 'sort' at "):
        born = compiled.init(sorted_init, KEY)
    assert_equal(born, jax.jit(sorted_init)(KEY))


# XLA reassociates products with constants, in sharded programs differently: some roundings of 2**-24.
ROUNDING = 2**-20


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "devices"), [(2, 2), (4, 2), (4, 1), (1, 4)])
def test_no_device_holds_more_than_its_share(stages, devices):
    compiled = jitted(stages, devices).compiled(jax.eval_shape(init, KEY), *batch())
    born = compiled.init(init, KEY)
    assert_equal(born, jax.jit(init)(KEY), ROUNDING)
    whole = sum(leaf.nbytes for leaf in numbers(born).values())
    held = bytes_by_device(born)
    assert len(held) == stages * devices
    # the first and the last stage have one weight more than the others
    assert max(held.values()) <= 1.6 * whole / (stages * devices)
    _, value = compiled(born, *batch())
    assert np.isfinite(float(value))
