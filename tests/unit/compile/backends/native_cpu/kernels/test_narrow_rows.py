"""Rows that join single elements of several arrays: vectors run across them, whatever their number is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.kernels.plan_kernels import plan_kernels
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.cpu import named_target
from tests.support import native_fragments


def joined(rows, width, pieces):
    """`pieces` arrays side by side, each with its part of the columns of one."""
    b, part = PlanBuilder("joined", (rows, width)), width // pieces
    found = -1
    for k in range(pieces):
        column = b.index(dim(1), "s32")
        inside = b.apply("compare-ge", column, b.constant(k * part, "s32"))
        below = b.apply("compare-lt", column, b.constant((k + 1) * part, "s32"))
        where = b.apply("and", inside, below)
        place = dim(0) * part + dim(1) + -k * part
        value = b.load(b.operand(f"x{k}", "f32", rows * part), place, where=where)
        found = value if found < 0 else b.apply("select", where, value, found)
    b.store_dense(b.operand("y", "f32", rows * width), found)
    return b.finish()


@pytest.mark.parametrize(
    ("target", "rows", "width", "pieces", "extents"),
    [
        ("avx512", 100, 2, 2, (2, 100)),
        ("avx512", 6 * 1024, 2, 2, (6, 2, 1024)),
        ("avx512", 8, 2, 2, (8, 2)),  # fewer rows than lanes
        ("avx512", 100, 4, 2, (100, 4)),  # loads of two adjacent elements
        ("avx512", 100, 8, 8, (100, 8)),  # half of a vector
        ("avx2", 100, 2, 2, (100, 2)),  # no scatters
    ],
)
def test_vectors_run_across_rows_where_these_join_single_elements(target, rows, width, pieces, extents):
    assert plan_kernels(joined(rows, width, pieces), named_target(target)).plan.extents == extents


def turned_pairs(x):
    """The other half of rotary embeddings of adjacent pairs."""
    return jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


CASES = {
    "pairs": lambda x: jnp.stack([x, x + 1], -1),
    "triples": lambda x: jnp.stack([x, -x, x * 2], -1),
    "pairs in the middle": lambda x: jnp.stack([x, x + 1], 1),
    "pairs of halves": lambda x: jnp.concatenate([x[..., 3:], x[..., :3]], -1),
    "turned pairs": turned_pairs,
    "gradient of turned pairs": jax.grad(lambda x: jnp.sum(jnp.sin(x) * turned_pairs(x))),
    "many pieces": lambda x: jnp.concatenate([x[k] + k for k in range(3)] * 7),
    "reflected padding": lambda x: jnp.pad(x, ((0, 0), (2, 2), (1, 1)), mode="reflect"),
    "wrapped padding": lambda x: jnp.pad(x[:, :, ::-1], ((1, 1), (0, 3), (5, 5)), mode="wrap"),
}


@pytest.mark.parametrize("shape", [(3, 70, 6), (4, 1024, 4)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_joined_arrays_have_the_values_of_jit(name, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    fragment = native_fragments.fragment_of(CASES[name], x)
    (got,) = native_fragments.run(fragment, [x], native_fragments.compiled(fragment))
    np.testing.assert_allclose(got, jax.jit(CASES[name])(x), rtol=1e-6, atol=1e-6)
