"""Ways compute what the kernel by rules computes, and become code."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.backends.native_gpu.tuning import tune
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import compiled, tuned_kernels
from mpmd.compile.driver import lowered, prepare_fragment
from tests.support.launch_memory import Extent
from tests.support.native_fragments import fragment_of
from tests.support.simulated_gpu import StandInGpu

pytestmark = [
    pytest.mark.usefixtures("unpoisoned"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]
FEW = dataclasses.replace(GPUS["H100"], device=dataclasses.replace(GPUS["H100"].device, units=4))
PITCH = 4
"""An argument may be a part of each row of a larger array."""


def product(x, w):
    return jax.nn.gelu(x @ w[:, :128])


def attended(x, w):
    """Causal, with gradients: the second kernel reads what blocks of the first leave."""

    def scored(x):
        q, k, v = (a.reshape(1, 128, 2, 64) for a in jnp.split(x @ w, 3, -1))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32).sum()

    return jax.grad(scored)(x)


def sums(x, w):
    return x.astype(jnp.float32).sum(0), jax.nn.softmax(w.astype(jnp.float32)), jnp.tanh(x[:8, :64]).T


def mixed(x, w):
    wide = x.astype(jnp.float32)
    y = wide - wide.mean(-1, keepdims=True)
    return y, (y * wide).sum(0)


def kernels_of(function, rows):
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((rows, 128), (128, 384))]
    target = GpuTarget(FEW)
    return target, tuned_kernels(prepare_fragment(fragment_of(function, *given), target).thunks, FEW)


def results(kernels):
    """The arrays that kernels leave, from random numbers; what one leaves the next one reads."""
    interpreter = pytest.importorskip("tests.support.triton_interpreter")
    types = {"*bf16": jnp.bfloat16, "*fp32": np.float32, "*i8": np.int8, "*u8": np.uint8, "*i32": np.int32}
    arrays = {}
    for kernel in kernels:
        for operand, pointer, size in zip(kernel.operands, kernel.pointers, kernel.sizes):
            dtype = np.dtype(types[pointer])
            numbers = np.random.default_rng(operand).standard_normal(PITCH * size // dtype.itemsize)
            given = operand in kernel.reads and dtype.kind not in "iu"
            arrays.setdefault(operand, (numbers * given).astype(np.float32).astype(dtype))
        interpreter.run_kernel(kernel, [Extent.of(arrays[operand]) for operand in kernel.operands])
    last = kernels[-1]
    return [arrays[k].astype(np.float32) for k in last.operands if k in last.writes]


@pytest.mark.slow
@pytest.mark.parametrize("function, rows, kinds", [
    (product, 128, {"product"}), (attended, 128, {"attention"}), (sums, 1000, {"column", "row", "loop"}),
    (mixed, 1000, {"mixed"}),
], ids=lambda given: getattr(given, "__name__", ""))  # fmt: skip
def test_ways_compute_the_same(function, rows, kinds):
    _, found = kernels_of(function, rows)
    of_kind = [k for k in found if k.key.partition("_")[0] in kinds]
    assert {k.key.partition("_")[0] for k in of_kind} == kinds
    for kernel in of_kind:
        own = results(kernel.ways[0].kernels)
        for way in kernel.ways[1 :: max(1, len(kernel.ways) // 6)]:
            for got, want in zip(results(way.kernels), own, strict=True):
                scale = np.nanmax(np.abs(want))
                np.testing.assert_allclose(got, want, atol=2e-2 * scale, err_msg=f"{kernel.key} {way.choice}")


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["A100", "H100", "B200"])
def test_ways_become_code(capability):
    target, found = kernels_of(product, 256)
    target = dataclasses.replace(target, gpu=GPUS[capability])
    (kernel,) = (k for k in found if k.key.startswith("product"))
    ways = kernel.ways[:: len(kernel.ways) // 4]
    made = [compiled(kernel, way, target) for way in ways]
    assert made[0] is not None and made[0].choice == "own" and all(each.flops for each in made if each)
    assert len({each.launches[0].cubin.name for each in made if each}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("function", [product, attended, sums, mixed])
def test_tuning_finds_no_way_with_other_results(function, tmp_path, monkeypatch):
    """On a stand-in that computes: whichever way its clock finds fastest, the results are those by rules."""
    pytest.importorskip("tests.support.triton_interpreter")

    def few(thunks, gpu):
        chosen = (k for k in tuned_kernels(thunks, gpu))
        return [dataclasses.replace(k, ways=k.ways[:: max(1, len(k.ways) // 3)]) for k in chosen]

    monkeypatch.setattr(tune, "tuned_kernels", few)
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(
        tune, "fastest", lambda times: min(times, key=lambda choice: (choice == "own", choice))
    )
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((128, 128), (128, 384))]
    fragment, said, gpu = fragment_of(function, *given), [], StandInGpu()
    tune.tune(tune.TuningTask([(fragment, lowered(fragment))], tmp_path, 100.0), said.append, gpu)
    assert len(said) > 2 and not gpu.broken and not gpu.live
    assert not [line for line in said if "computes something else" in line or "by own" in line]
