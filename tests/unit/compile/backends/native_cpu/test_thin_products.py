"""Products with hardly any rows or columns run as reductions, and give what products give."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from examples.workloads.direct import DirectKernel, row_major
from mpmd.compile.backends.native_cpu.gemm.gemm_kernel import GemmKernel, gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.thin import ThinKernel, thin_form
from mpmd.compile.backends.native_cpu.steps import as_reduction
from mpmd.compile.buffers.assignment import Slice
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from mpmd.compile.llvm.cpu import host_target, named_target
from mpmd.compile.thunks.thunk import MatmulThunk
from tests.support.native_fragments import compiled, fragment_of, run
from tests.support.native_functions import Floats

floats = Floats()

BF16 = ml_dtypes.bfloat16


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

    assert kind(product(100, 1, 64, a=(1, 100), b=(1, 1))) == "column", "columns of a matrix with a vector"
    assert kind(product(1, 100, 64, a=(64, 1), b=(100, 1), c=(100, 1))) == "column"
    assert kind(product(1, 100, 64, a=(64, 1), b=(100, 1), c=(1, 2))) is None, (
        "a result that is not contiguous"
    )
    assert kind(product(100, 1, 64, a=(64, 1), b=(1, 1))) is None, "rows of a matrix with a vector"
    assert kind(product(4, 4, 0, a=(1, 1), b=(1, 1))) is None
    assert kind(product(100, 1, 0, a=(1, 100), b=(1, 1))) is None, "nothing to add"


def test_which_products_have_no_tiles():
    target = named_target("avx512_bf16")

    def form(*sizes, **more):
        return thin_form(row_major(*sizes, **more), target)

    few_columns, few_rows = form(1024, 4, 768, transpose_b=True), form(4, 1024, 768, transpose_b=True)
    assert not few_columns.swapped and few_rows.swapped
    assert form(1024, 4, 768, dtype="bf16", transpose_b=True).pairs and not few_columns.pairs
    assert form(1024, 4, 768) is None and form(4, 1024, 768) is None, (
        "a factor that is not contiguous along K"
    )
    assert form(1024, 9, 768, transpose_b=True) is None and form(0, 4, 64, transpose_b=True) is None
    for n in range(1, 9):
        made = form(100, n, 64, transpose_b=True)
        assert made.group * made.few.items * made.chains < target.vector_registers


CASES = {
    "matrix and vector": (lambda a, x: a @ x, (floats(70, 45), floats(45))),
    "vector and matrix": (lambda x, a: x @ a, (floats(45), floats(45, 70))),
    "batch of matrices and vectors": (
        lambda a, x: jnp.einsum("bkm,bk->bm", a, x),
        (floats(5, 4, 33), floats(5, 4)),
    ),
    "few rows, few columns": (lambda a, b: a @ b.T, (floats(3, 100), floats(4, 100))),
    "batch of dots": (lambda a, b: jnp.einsum("btd,bsd->bts", a, b), (floats(6, 2, 50), floats(6, 3, 50))),
    "dots and what follows": (
        lambda a, b, c: jnp.tanh(a @ b.T + c) * 2.0,
        (floats(4, 64), floats(70, 64), floats(70)),
    ),
    "bf16": (
        lambda a, b: jnp.einsum("td,sd->ts", a, b),
        (floats(2, 300, dtype=BF16), floats(90, 300, dtype=BF16)),
    ),
    "bf16 columns": (lambda a, x: a.T @ x, (floats(6, 50, dtype=BF16), floats(6, dtype=BF16))),
    "bf16 into f32": (
        lambda a, x: jnp.dot(a, x, preferred_element_type=jnp.float32),
        (floats(5, 64, dtype=BF16), floats(64, dtype=BF16)),
    ),
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_thin_products_equal_jax(name):
    function, arguments = CASES[name]
    fragment = fragment_of(function, *arguments)
    made = compiled(fragment)
    assert any(isinstance(thunk, MatmulThunk) for thunk in made.thunks)
    kernels = [step.kernel for step in compiled(fragment, poison=False).program.threaded.steps]
    assert not any(isinstance(kernel, GemmKernel) for kernel in kernels), "a tile kernel was made"
    (got,) = run(fragment, list(arguments), made)
    wanted = np.asarray(jax.jit(function)(*arguments))
    loose = 2e-2 if wanted.dtype == BF16 else 1e-4
    np.testing.assert_allclose(got.astype(np.float32), wanted.astype(np.float32), rtol=loose, atol=loose)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("sizes", [(70, 4, 100), (4, 70, 100), (70, 3, 45)])
def test_numbers_do_not_depend_on_threads_and_nan_stays_in_its_row(sizes, dtype):
    (m, n, k), kind = sizes, NUMPY_DTYPE[dtype]
    gemm = row_major(m, n, k, dtype, transpose_b=True)
    a, b = floats(m, k), floats(n, k)
    a[3, 5] = np.nan
    results = []
    for threads in (1, 2, 3):
        kernel = DirectKernel(gemm_kernel("thin", gemm, host_target()), host_target(), threads=threads)
        assert isinstance(kernel.kernel, ThinKernel)
        c = np.zeros((m, n), kind)
        kernel(a.astype(kind), b.astype(kind), c)
        results.append(c.astype(np.float32))
    assert np.isnan(results[0][3]).all() and np.isnan(results[0]).sum() == n
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_allclose(results[0], a @ b.T, atol=0.4 if dtype == "bf16" else 1e-4)
