"""A range of a result is computed of ranges of operands where the operation allows it, else of whole ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.tracing.wanted_ranges import DemandedJaxpr, Range

X = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
ROW, COLUMN = X[:1], X[:, :1]


def running(x, *, reverse=False):
    return jax.lax.scan(lambda c, row: (c + row, c * row), jnp.zeros(4), x, reverse=reverse)


def drawn(x, partitionable):
    with jax.threefry_partitionable(partitionable):
        return jax.random.bits(jax.random.wrap_key_data(x[0, :2].view(np.uint32)), (6, 4)).astype("float32")


CASES = {
    "strided slice": (lambda x: jnp.concatenate([x, 2 * x])[::2], 0),
    "slice": (lambda x: jnp.concatenate([x, 2 * x])[3:9], 0),
    "slice of another dim": (lambda x: x[:, 1:3], 0),
    "broadcast of rows": (lambda x: jax.lax.broadcast_in_dim(x[:1], (6, 4), (0, 1)) + x, 0),
    "scalars": (lambda x: jax.lax.clamp(-x.max() / 2, x, x.max() / 2), 1),
    "reshape that joins": (lambda x: x.reshape(24), 0),
    "reshape to other dims": (lambda x: x.reshape(4, 6), 0),
    "reshape that keeps": (lambda x: x.reshape(6, 1, 2, 2), 0),
    "squeeze": (lambda x: jnp.squeeze(x[:, None], 1), 1),
    "transpose": (lambda x: x.T, 0),
    "sum": (lambda x: x[:, None].sum(2), 0),
    "greatest": (lambda x: jnp.argmax(x, 0), 0),
    "counts": (lambda x: jax.lax.broadcasted_iota(jnp.int32, (6, 4), 1) + x.astype(jnp.int32), 1),
    "pieces": (lambda x: jnp.concatenate([x[:2], x[1:5]]), 0),
    "pieces of another dim": (lambda x: jnp.concatenate([x, x[:, :2]], 1), 0),
    "sums so far": (lambda x: jnp.cumsum(x, 0), 0),
    "rows of a scan": (lambda x: running(x)[1], 0),
    "rows of a reversed scan": (lambda x: running(x, reverse=True)[1], 0),
    "columns of a scan": (lambda x: running(x)[1], 1),
    "end of a scan": (lambda x: running(x)[0], 0),
    "random bits": (lambda x: drawn(x, True), 0),
    "random bits of the older kind": (lambda x: drawn(x, False), 0),
    "product": (lambda x: x @ x.T, 0),
    "sorted": (lambda x: jnp.sort(x, 0), 0),
}


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", CASES)
def test_a_range_is_that_of_the_whole(name):
    function, dim = CASES[name]
    partitionable = "older" not in name
    with jax.threefry_partitionable(partitionable):
        closed, whole = jax.make_jaxpr(function)(X), np.asarray(function(X))
        wanted = Range(dim, 1, whole.shape[dim] - 1)
        demanded = DemandedJaxpr(closed.jaxpr, [[wanted]])
        (needed,) = demanded.inputs
        given = {d: X if d is None else jax.lax.slice_in_dim(X, d.start, d.stop, axis=d.dim) for d in needed}
        made = demanded.run([{None: value} for value in closed.consts], [given])[0][wanted]
    want = np.take(whole, np.arange(wanted.start, wanted.stop), dim)
    assert made.dtype == want.dtype
    np.testing.assert_allclose(np.asarray(made, np.float64), want.astype(np.float64), 1e-6, 1e-6)
