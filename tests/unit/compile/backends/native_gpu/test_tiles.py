"""Tiles of products: the largest first, and smaller ones where the compiled code does not fit."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.launches import KernelLaunch, LoopLaunch
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.triton.compile_kernels import TritonCompiler
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.product_plans import MatmulPlan, View
from tests.support.gpu_launches import CalledProgram
from tests.support.native_fragments import fragment_of
from tests.support.simulated_gpu import StandInCompiler

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
H100 = GPUS["H100"]
TWO_UNITS = dataclasses.replace(H100, device=dataclasses.replace(H100.device, units=2))
X, W = (np.full(shape, 0.5, jnp.bfloat16) for shape in ((256, 64), (64, 512)))


class ScarceCompiler(StandInCompiler):
    """Its code for tiles of more columns than some needs stack, or more shared memory than there is."""

    def __init__(self, columns, **needs):
        super().__init__()
        self.columns, self.needs = columns, needs

    def compile(self, kernels, capability, cache):
        made = super().compile(kernels, capability, cache)
        for name, kernel in kernels.items():
            if columns_of(kernel) > self.columns:
                made[name] = dataclasses.replace(made[name], **self.needs)
        return made


def columns_of(kernel):
    """Of its tile; 0 for other kernels than products."""
    sums = kernel.source.partition("acc = tl.full([")[2].partition("]")[0]
    return int(sums.split(", ")[1]) if sums else 0


def gelu_product(x, w):
    return jax.nn.gelu(jnp.dot(x, w, preferred_element_type=jnp.float32)).astype(jnp.bfloat16)


def compiled(function, *arguments, compiler):
    return prepare_fragment(fragment_of(function, *arguments), GpuTarget(TWO_UNITS, compiler)).compiled().code


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("needs", [{"stack_bytes": 8}, {"shared_bytes": H100.shared_bytes + 1}])
@pytest.mark.parametrize("columns, grid", [(256, 4), (128, 8), (64, 16)])
def test_the_largest_tile_that_fits_is_taken(needs, columns, grid):
    code = compiled(gelu_product, X, W, compiler=ScarceCompiler(columns, **needs))
    (step,) = code.program.steps
    assert [columns_of(k) for k in code.program.kernels.values()] == [columns] and step.grid == grid
    assert list(code.cubins) == list(code.program.kernels) == [step.kernel]


@pytest.mark.usefixtures("unpoisoned")
def test_where_no_tile_fits_the_smallest_has_stack():
    code = compiled(gelu_product, X, W, compiler=ScarceCompiler(0, stack_bytes=8))
    assert [columns_of(k) for k in code.program.kernels.values()] == [64]


@pytest.mark.usefixtures("unpoisoned")
def test_tiles_of_loops_and_of_batches_are_replaced():
    def function(x, w, n):
        y = jax.vmap(gelu_product)(x, w)
        return jax.lax.fori_loop(0, n, lambda _, y: jax.vmap(gelu_product)(y[:, :, :64], w), y)

    arguments = np.stack([X] * 3), np.stack([W] * 3), np.int32(2)
    code = compiled(function, *arguments, compiler=ScarceCompiler(128, stack_bytes=8))
    body = [step.body for step in code.program.steps if isinstance(step, LoopLaunch)]
    assert body
    launches = [s for s in code.program.launches() if isinstance(s, KernelLaunch)]
    found = [s for s in launches if columns_of(code.program.kernels[s.kernel])]
    assert [(columns_of(code.program.kernels[s.kernel]), s.grid) for s in found] == [(128, 24)] * 2
    assert set(code.cubins) == set(code.program.kernels) == {s.kernel for s in launches}


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("count, first", [(4, {(256, 8), (256, 16)}), (10, {(128, 16), (256, 16)})])
def test_launches_of_one_kernel_have_programs_by_their_own_batch(count, first):
    """For 10 processors the shorter batch begins with the tile that comes second for the longer one."""
    units = dataclasses.replace(H100, device=dataclasses.replace(H100.device, units=count))
    arguments = [np.stack([a] * count) for count in (2, 4) for a in (X, W)]

    def function(x, w, more, others):
        return jax.vmap(gelu_product)(x, w), jax.vmap(gelu_product)(more, others)

    fragment = fragment_of(function, *arguments)
    for columns, launches in ((256, first), (64, {(64, 32), (64, 64)})):
        compiler = ScarceCompiler(columns, stack_bytes=8)
        program = prepare_fragment(fragment, GpuTarget(units, compiler)).compiled().code.program
        assert {(columns_of(program.kernels[s.kernel]), s.grid) for s in program.steps} == launches


@pytest.mark.parametrize("m, n, units, columns", [
    (256, 512, 4, 256), (256, 512, 5, 128), (256, 512, 8, 128), (256, 512, 9, 64), (256, 384, 1, 128),
    (256, 200, 1, 256), (256, 40, 1, 64),
])  # fmt: skip
def test_the_first_tile_keeps_the_device_busy_and_adds_no_columns(m, n, units, columns):
    views = [View("bf16", 0, 64, 1), View("bf16", 0, n, 1), View("f32", 0, n, 1)]
    (kernel,) = product_kernel(MatmulPlan("product", (), m, n, 64, *views), units).kernels
    assert columns_of(kernel) == columns
    smaller = []
    while kernel.smaller is not None:
        kernel = kernel.smaller
        smaller.append(columns_of(kernel))
    assert smaller == [side for side in (128, 64) if side < columns]


@needs_triton
@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("columns", [256, 64])
def test_programs_with_other_tiles_have_the_same_results(columns):
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(a.shape).astype(jnp.bfloat16) for a in (X, W))
    code = compiled(gelu_product, x, w, compiler=ScarceCompiler(columns, stack_bytes=8))
    (got,) = CalledProgram(code.program).call([a.view(np.uint8).ravel() for a in (x, w)])
    wanted = np.asarray(gelu_product(x, w), np.float32)
    np.testing.assert_allclose(
        got.view(jnp.bfloat16).astype(np.float32).reshape(wanted.shape), wanted, rtol=2e-2, atol=2e-2
    )


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_stack_that_the_assembler_reports(capability):
    """512 sums of a thread do not fit into its registers."""
    views = [View("bf16", 0, 64, 1), View("bf16", 0, 256, 1), View("f32", 0, 256, 1)]
    plan = MatmulPlan("product", (), 256, 256, 64, *views)
    for rows, warps, has in ((256, 4, True), (128, 8, False)):
        (kernel,) = product_kernel(plan, 1, (rows, 256, 64, warps)).kernels
        (cubin,) = TritonCompiler().compile({kernel.name: kernel}, capability).values()
        assert bool(cubin.stack_bytes) == has
