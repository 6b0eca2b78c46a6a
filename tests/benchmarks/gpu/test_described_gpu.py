"""XLA's CUDA platform takes our custom call, and compiles a fragment with it for a described GPU."""

import dataclasses
import gc
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.gpu import ahead
from examples.workloads.steps import pipelined, sgd_momentum, training_step
from mpmd.compile.backends.jax_function import jax_function
from mpmd.compile.backends.native_gpu import backend as native_gpu
from mpmd.compile.backends.native_gpu.backend import NativeGpuBackend
from mpmd.compile.compiler import FallbackBackend
from mpmd.compile.driver import compiled_or_kept
from mpmd.config.compiler_options import default_rows
from mpmd.jax_compat import effort_levels
from tests.support.native_fragments import fragment_of
from tests.support.native_meshes import OnMesh, mesh_of
from tests.support.sharded_models import EIGHT, SHARDED_MODELS, STAGES, shardings
from tests.support.simulated_gpu import StandInGpu

STEPS = re.compile(r" (custom-call|all-reduce-start|all-reduce-done)\(")
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("unpoisoned"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None, reason="JAX's CUDA plugin is not installed"
    ),
]


class DescribedGpu(StandInGpu):
    """Its handlers are registered with XLA's CUDA platform, which never calls them here."""

    platform = "CUDA"

    def entry(self, handler):
        return handler


def test_a_fragment_is_one_call_of_ours():
    if why := ahead.why_not():
        pytest.skip(why)
    mesh, gpu = Mesh(np.array(ahead.devices()[:1]), ("x",)), DescribedGpu()
    backend = NativeGpuBackend.of(mesh, libraries=gpu)
    fragment = fragment_of(lambda x, w: (jnp.dot(x @ w, w), x), X, X, donated=(0,))
    made, _ = compiled_or_kept(fragment, backend.target, backend.options)
    program = backend.register(made, "mesh", mesh)
    text = jax_function(fragment, mesh, program, made.aliases, large=False).as_text()
    assert text.count('custom_call_target="mpmd_native"') == 1 and "fusion(" not in text
    assert "output_to_operand_aliasing={{1}: (0, {})}" in text  # the donated argument is updated in place
    assert f"u8[{program.arena_bytes}]" in text and gpu.live["descriptor"] == 1
    gc.collect()
    assert not gpu.broken


@pytest.mark.parametrize("axes", EIGHT.values(), ids=EIGHT)
@pytest.mark.parametrize("name", SHARDED_MODELS)
def test_steps_of_eight_gpus_are_compiled_to_the_end(name, axes, monkeypatch):
    """Every fragment; XLA's collectives are asynchronous, and some of our calls run beside them."""
    if why := ahead.why_not():
        pytest.skip(why)
    # what is compiled ahead cannot be called
    monkeypatch.setattr(native_gpu, "direct_call", lambda compiled: compiled)
    model, gpu = SHARDED_MODELS[name](), DescribedGpu(count=8)
    init, update = sgd_momentum()
    options = {**shardings(model, axes), "backend": "native"}
    step = training_step(model.loss, 2, update)
    lowered = pipelined(step, STAGES, mesh=axes, options=options, donate_argnums=0).lower(
        init(model.params), *model.batch
    )
    mesh = Mesh(np.array(ahead.devices(8)).reshape(tuple(axes.values())), tuple(axes))
    backend, order = FallbackBackend(NativeGpuBackend.of(mesh, libraries=gpu)), ""
    level = ("optimization_level", effort_levels()["O1"])  # as on meshes of GPUs
    for fragment in lowered.fragments.values():
        made = backend.compile(dataclasses.replace(fragment, compiler_options=(level,)), mesh)
        assert getattr(made, "reasons", ()) == () and made.cost_analysis().get("fallbacks", 0) == 0
        order += " ".join(STEPS.findall(made.compiled.as_text())) + "\n"
    assert "all-reduce-done custom-call" in order and "custom-call all-reduce-start" in order
    if name == "transformer":  # gradients of weights beside the sum of those of activations
        assert "all-reduce-start custom-call all-reduce-done" in order
    assert not gpu.broken


def test_every_collective_is_compiled_for_several_gpus():
    """In one program, around products of ours."""
    if why := ahead.why_not():
        pytest.skip(why)
    axes = {"x": 2, "y": 2}

    def function(a, w):
        rows = lax.all_gather(a @ w, "x", tiled=True)
        moved = lax.ppermute(rows @ w, "y", [(0, 1), (1, 0)])
        parts = lax.all_to_all(moved @ w, "y", 1, 0, tiled=True)
        return lax.psum_scatter(lax.pmax(parts @ w[:4], "x") @ w, "y", tiled=True)

    cut = [P("x"), P()]
    made = OnMesh(
        function, [X, X], mesh_of(axes), cut, P("y"), FallbackBackend(NativeGpuBackend(problem="-"))
    )
    mesh, gpu = Mesh(np.array(ahead.devices(4)).reshape(2, 2), tuple(axes)), DescribedGpu(count=4)
    text = FallbackBackend(NativeGpuBackend.of(mesh, libraries=gpu)).compile(made.fragment, mesh)
    hlo = text.compiled.as_text()
    assert text.backend == "native" and text.reasons == () and hlo.count('"mpmd_native"') >= 5
    for opcode in ("all-gather", "collective-permute", "all-to-all", "all-reduce", "reduce-scatter"):
        assert re.search(rf" {opcode}(-start)?\(|async_computation.*{opcode}", hlo), opcode


def test_the_level_pipelines_gathers_of_a_loop():
    """By XLA's compiler for described GPUs."""
    if why := ahead.why_not():
        pytest.skip(why)
    mesh = Mesh(np.array(ahead.devices(4)), ("x",))
    whole = jax.NamedSharding(mesh, P())

    def layers(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(layer, x, weights)[0]

    shapes = [(8, 512, 512), (512, 512)]
    specs = [P(None, "x"), P("x")]
    given = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    step = jax.jit(layers).lower(*given)
    options = dict(pair for row in default_rows({"a": mesh}) for pair in row.options)
    plain, pipelined = (step.compile(o).as_text().count(" all-gather-start(") for o in (None, options))
    assert plain == 1 < pipelined
