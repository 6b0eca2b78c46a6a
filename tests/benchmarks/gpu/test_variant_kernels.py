"""Variants of a kernel compute what the target's own computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.fragments import attention
from benchmarks.gpu.pack import OWN
from benchmarks.gpu.target import fragment_of
from benchmarks.gpu.variant_kernels import variants_of
from mpmd.compile.backends.native_gpu.devices import GPUS
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from tests.support.launch_memory import Extent

interpreter = pytest.importorskip("tests.support.triton_interpreter")

WIDTH = 128
PITCH = 4
"""An argument may be a part of each row of a larger array."""


def product(x, w, bias):
    return jax.nn.gelu(x @ w + bias)


def attended(x, w, bias):
    return attention(2, x[None], w, bias)


def sums(x, w, bias):
    return x.astype(jnp.float32).sum(0), jax.nn.softmax(w.astype(jnp.float32)), jnp.tanh(bias)


def results(kernel):
    """The arrays that a kernel leaves, from random numbers."""
    rng = np.random.default_rng(0)
    types = {"*bf16": jnp.bfloat16, "*fp32": np.float32, "*i8": np.int8, "*u8": np.uint8}
    arrays = []
    for operand, pointer, size in zip(kernel.operands, kernel.pointers, kernel.sizes):
        dtype = np.dtype(types[pointer])
        numbers = rng.standard_normal(PITCH * size // dtype.itemsize).astype(np.float32)
        arrays.append((numbers if operand in kernel.reads else 0 * numbers).astype(dtype))
    interpreter.run_kernel(kernel, [*map(Extent.of, arrays)])
    written = [a for k, a in zip(kernel.operands, arrays) if k in kernel.writes]
    return [a.astype(np.float32) for a in written]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "columns", "kinds"),
    [
        (product, WIDTH, {"128x64x32 w4 s4", "64x64x128 w4 s3"}),
        (attended, 3 * WIDTH, {"64x32 w4 s2", "128x128 w8 s3"}),
    ],
    ids=["product", "attention"],
)
def test_variants_compute_the_same(function, columns, kinds):
    shapes = [(WIDTH, WIDTH), (WIDTH, columns), (columns,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    target = GpuTarget(GPUS["H100"])
    made = prepare_fragment(fragment_of("variants", function, arguments), target)
    found = variants_of(made.thunks, target.gpu)
    assert kinds <= {v.choice for v in found}
    for variant in (v for v in found if v.choice in kinds):
        own = next(v for v in found if v.group == variant.group and v.choice == OWN)
        for got, want in zip(results(variant.kernel), results(own.kernel), strict=True):
            assert np.abs(got - want).max() <= 2e-2 * np.abs(want).max(), (variant.group, variant.choice)


def test_sums_have_other_programs_and_warps():
    shapes = [(1 << 16, WIDTH), (WIDTH, WIDTH), (WIDTH,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    target = GpuTarget(GPUS["H100"])
    made = prepare_fragment(fragment_of("sums", sums, arguments), target)
    found = variants_of(made.thunks, target.gpu)
    columns = [v for v in found if v.group.startswith("column")]
    assert columns[0].choice == OWN and len({v.kernel.grid for v in columns}) > 2
    assert len({v.kernel.name for v in columns}) == len(columns)
