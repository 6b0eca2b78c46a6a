"""Updates of optimizers computed part by part are those of whole arrays to the last bit.

What a step in stages differs by from `jax.jit` is then the order in which its gradients were added up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpmd
from examples.workloads.models import normal
from mpmd.tracing.stages.stacked.by_parts import PartwiseInterpreter
from mpmd.tracing.stages.stacked.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked.stacked import in_parts, is_stacked
from tests.support.layered_models import scanned

OPTIMIZERS = {
    "half-precision moments": optax.adam(1e-2, eps=1e-3, mu_dtype=jnp.bfloat16),
    "sm3": optax.sm3(1e-2),
    "rms and adagrad": optax.chain(optax.scale_by_rms(), optax.adagrad(1e-2)),
}


def in_halves(tree):
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: (
            in_parts(leaf, (2, 2)) if "layers" in str(path) and np.shape(leaf)[:1] == (4,) else leaf
        ),
        tree,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_in_parts_are_those_of_whole_arrays(name):
    optimizer, params = OPTIMIZERS[name], jax.tree.map(jnp.asarray, scanned()[0])

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def of_parts(args):
        made = interpreter.run(closed.jaxpr, closed.consts, jax.tree.leaves(args, is_leaf=is_stacked))
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    state = optimizer.init(params)
    closed, shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    interpreter = PartwiseInterpreter(RULES, FROM_ARRAYS, [(2, 2)])
    whole, parts = (params, state), in_halves((params, state))
    for seed in range(3):
        grads = jax.tree.map(lambda leaf, s=seed: normal(s, *leaf.shape), params)
        whole = jax.jit(update)(*whole, grads)
        parts = jax.jit(of_parts)((*parts, in_halves(grads)))
        assert isinstance(parts[0]["layers"]["w"], mpmd.Stacked)
        joined = jax.tree.map(np.asarray, parts, is_leaf=is_stacked)
        for ours, theirs in zip(jax.tree.leaves(joined), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert not interpreter.joined
