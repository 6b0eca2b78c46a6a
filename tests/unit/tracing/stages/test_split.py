"""Scans over stacked layers: how they are divided, and operations on the parts of stacks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpmd
from examples.workloads.models import normal
from mpmd.errors import ConfigError
from mpmd.tracing.stages.stacked.by_parts import PartwiseInterpreter
from mpmd.tracing.stages.stacked.part_rules import FROM_ARRAYS, RULES
from mpmd.tracing.stages.stacked.stacked import in_parts
from tests.support.layered_models import scanned, separate, sliced


@pytest.fixture(scope="module")
def topology():
    return mpmd.make_topology({"m0": 1, "m1": 1})


def stages_text(topology, model, **options):
    params, loss, batch, pattern = model
    config = mpmd.make_config(topology, stages=mpmd.split(pattern, **options))
    return mpmd.jit(mpmd.staged(loss), config).trace(params, *batch).stages_text


@pytest.mark.parametrize(
    ("how", "options", "rows"),
    [
        ({}, {}, ["0:2", "2:4"]),
        ({"layers": 5}, {}, ["0:3", "3:5"]),
        ({"layers": 5}, {"lengths": [1, 4]}, ["0:1", "1:5"]),
        ({"reverse": True}, {"lengths": [1, 3]}, ["3:4", "0:3"]),
    ],
)
def test_each_stage_has_a_range_of_the_rows(topology, how, options, rows):
    text = stages_text(topology, scanned(**how), **options)
    found = [line.split("[")[-1].rstrip("]") for line in text.splitlines() if " layers/w[" in line]
    assert found == rows


@pytest.mark.parametrize(
    ("model", "rows"), [(sliced(), ["0:1", "1:4"]), (sliced("unstacked", (3, 2, 1, 0)), ["3:4", "0:3"])]
)
def test_rows_that_a_loop_of_python_slices_are_divided_like_those_of_a_scan(topology, model, rows):
    text = stages_text(topology, model, lengths=[1, 3])
    assert [line.split("[")[-1].rstrip("]") for line in text.splitlines() if " layers/w[" in line] == rows


def test_sliced_rows_in_another_order_are_refused(topology):
    with pytest.raises(ConfigError, match=r"next to each other in the stack.*the order 0, 2, 1, 3"):
        stages_text(topology, sliced(order=(0, 2, 1, 3)))


def test_parameters_that_no_scan_runs_over_are_refused(topology):
    with pytest.raises(
        ConfigError, match=r"no scan has rows of what it matches\n  layers/0/b is read by broadcast_in_dim \("
    ):
        stages_text(topology, (*separate()[:3], "layers"))


def test_a_stack_that_is_not_an_argument_is_reported(topology):
    params, loss, batch, pattern = scanned()

    def step(layers, *batch):
        return jax.grad(mpmd.staged(loss))({**params, "layers": layers[0]}, *batch)

    config = mpmd.make_config(topology, stages=mpmd.split(pattern))
    warnings = mpmd.jit(step, config).trace([params["layers"]], *batch).warnings
    assert len(warnings) == 3 and "no argument of step has a path that ends with layers/b" in warnings[0]


LENGTHS = (3, 1, 2)


def operations(x, y, wide, key):
    """Results that stay in parts, and results that are combined."""
    row = jnp.arange(4.0)
    mean = x.mean(0, keepdims=True)
    parts = {
        "elementwise": jnp.where(x > row, jnp.clip(x, -1, 1), -y) * mean,
        "cast": x.astype(jnp.bfloat16),
        "normalised": x / jnp.sqrt((x**2).sum(1, keepdims=True)),
        "moved": jnp.moveaxis(wide, 0, 2).transpose(2, 1, 0),
        "merged": wide.reshape(6 * 4, 3),
        "parted": wide.reshape(6, 2, 2, 3),
        "one more dim": x[:, None],
        "sorted": jnp.sort(x, axis=1),
        "largest": wide.argmax(1),
        "sums": jnp.cumsum(x, 1),
        "product with an array": jnp.einsum("lij,jk->lik", wide, wide[0].T),
        "product of each row": jnp.einsum("lij,lik->ljk", wide, x[:, :, None]),
        "padded": jnp.pad(x, ((0, 0), (1, 2))),
        "joined with another": jnp.concatenate([x, y], 1),
        "random": x + jax.random.normal(key, x.shape),
        "in a loop": jax.lax.fori_loop(0, 3, lambda _, v: v * 0.5 + y, jnp.zeros_like(x)),
        "scanned": jax.lax.scan(lambda c, r: (c + r, c * r), x[:, 0], wide.transpose(1, 0, 2)[:, :, 0])[1],
        "chosen": jax.lax.cond(mean[0, 0] > 0, lambda v: v * 2, lambda v: v + y, x),
        "rows of one part": jnp.zeros_like(x).at[:3].set(0) + jax.grad(lambda v: (v[3:4] ** 2).sum())(x),
    }
    combined = {
        "sum": x.sum(), "columns": x.max(0), "any": (x > 3).any(), "norm": jnp.vdot(x, y), "least": x.min(),
        "gram": wide.reshape(6, 12).T @ x, "a range": x[1:3].sum(), "one row": x[3],
    }  # fmt: skip
    return parts, combined


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operations_on_parts_are_those_on_the_whole(runs):
    """They stay in parts; where they run they have the same numbers."""
    given = normal(1, 6, 4), normal(2, 6, 4), normal(3, 6, 4, 3), jax.random.key(0)
    closed, shapes = jax.make_jaxpr(operations, return_shape=True)(*given)
    interpreter = PartwiseInterpreter(RULES, FROM_ARRAYS, [LENGTHS])

    @jax.jit
    def in_stacks(*arrays):
        stacks = [in_parts(a, LENGTHS) for a in arrays[:3]]
        made = interpreter.run(closed.jaxpr, closed.consts, [*stacks, arrays[3]])
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    parts, combined = in_stacks(*given) if runs else jax.eval_shape(in_stacks, *given)
    assert [text for text in interpreter.joined if "scatter" not in text] == []
    assert [name for name, value in parts.items() if not isinstance(value, mpmd.Stacked)] == []
    if not runs:
        return
    want_parts, want_combined = jax.jit(operations)(*given)
    for name, want in want_parts.items():
        np.testing.assert_allclose(
            np.asarray(parts[name], np.float32), np.asarray(want, np.float32), 1e-5, 1e-6, err_msg=name
        )
    for name, want in want_combined.items():
        np.testing.assert_allclose(combined[name], want, 1e-5, err_msg=name)


def test_stacked_is_a_pytree_of_parts_with_the_shape_of_the_whole():
    array = normal(1, 6, 4)
    stack = in_parts(array, LENGTHS)
    assert repr(stack) == "Stacked(float32[6,4] in 3 parts, 3 + 1 + 2 along dim 0)"
    assert (stack.shape, stack.ndim, stack.dtype, stack.nbytes) == ((6, 4), 2, np.float32, 96)
    np.testing.assert_array_equal(stack.whole(), array)
    np.testing.assert_array_equal(
        jax.device_get(jax.tree.map(lambda part: 2 * part, stack)).whole(), 2 * array
    )
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path({"w": stack})]
    assert paths == [f"['w'].parts[{k}]" for k in range(3)]
    shapes = in_parts(jax.ShapeDtypeStruct((4, 6), jnp.float32), LENGTHS, 1)
    assert shapes.lengths == LENGTHS and shapes.whole() == jax.ShapeDtypeStruct((4, 6), jnp.float32)
