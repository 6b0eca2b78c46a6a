"""Products with hardly any rows or columns run as reductions, and give what products give."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpmd.compile.backends.native_cpu.thin_products import as_reduction
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.thunks.thunk import MatmulThunk
from tests.support.native_fragments import compiled, fragment_of, run

RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def product(m, n, k, a, b, c=(1, 1)):
    """A thunk of one product, each view given by its two strides."""
    views = [View("f32", 0, *strides) for strides in (a, b, c)]
    plan = MatmulPlan("product", (), m, n, k, *views)
    slices = [Slice(number, 0, 4096) for number in range(3)]
    return MatmulThunk("product", plan, slices[0], slices[1], {0: slices[2]})


def test_which_products_are_reductions():
    def kind(thunk):
        made = as_reduction(thunk)
        return None if made is None else made.plan.kind

    assert kind(product(100, 1, 64, a=(64, 1), b=(1, 1))) == "row", "rows of a matrix with a vector"
    assert kind(product(1, 4, 768, a=(768, 1), b=(1, 768), c=(4, 1))) == "row"
    assert kind(product(100, 1, 64, a=(1, 100), b=(1, 1))) == "column", "columns of a matrix with a vector"
    assert kind(product(1, 100, 64, a=(64, 1), b=(100, 1), c=(100, 1))) == "column"
    assert kind(product(1, 100, 64, a=(64, 1), b=(100, 1), c=(1, 2))) is None, (
        "a result that is not contiguous"
    )
    assert kind(product(8, 100, 64, a=(64, 1), b=(1, 64), c=(100, 1))) is None, "rows enough for a tile"
    assert kind(product(4, 4, 8, a=(8, 1), b=(1, 8), c=(4, 1))) is None, "sums too short"
    assert kind(product(4, 4, 0, a=(1, 1), b=(1, 1))) is None


CASES = {
    "matrix and vector": (lambda a, x: a @ x, (normal(70, 45), normal(45))),
    "vector and matrix": (lambda x, a: x @ a, (normal(45), normal(45, 70))),
    "batch of matrices and vectors": (
        lambda a, x: jnp.einsum("bkm,bk->bm", a, x),
        (normal(5, 4, 33), normal(5, 4)),
    ),
    "few rows, few columns": (lambda a, b: a @ b.T, (normal(3, 100), normal(4, 100))),
    "batch of dots": (lambda a, b: jnp.einsum("btd,bsd->bts", a, b), (normal(6, 2, 50), normal(6, 3, 50))),
    "dots and what follows": (
        lambda a, b, c: jnp.tanh(a @ b.T + c) * 2.0,
        (normal(4, 64), normal(70, 64), normal(70)),
    ),
    "bf16": (
        lambda a, b: jnp.einsum("td,sd->ts", a, b),
        (normal(2, 300, dtype=BF16), normal(90, 300, dtype=BF16)),
    ),
    "bf16 columns": (lambda a, x: a.T @ x, (normal(6, 50, dtype=BF16), normal(6, dtype=BF16))),
    "bf16 into f32": (
        lambda a, x: jnp.dot(a, x, preferred_element_type=jnp.float32),
        (normal(5, 64, dtype=BF16), normal(64, dtype=BF16)),
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_thin_products_equal_jax(name):
    function, arguments = CASES[name]
    fragment = fragment_of(function, *arguments)
    made = compiled(fragment)
    assert any(isinstance(thunk, MatmulThunk) for thunk in made.thunks)
    assert not any("product" in r for r in _symbols(made)), "a tile kernel was made"
    (got,) = run(fragment, list(arguments), made)
    wanted = np.asarray(jax.jit(function)(*arguments))
    loose = 2e-2 if wanted.dtype == BF16 else 1e-4
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=loose, atol=loose)


def _symbols(made):
    """Names of the kernels of a program."""
    return [step.kernel.name for step in made.native.program.steps]
