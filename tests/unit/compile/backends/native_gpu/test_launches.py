"""Fragments as launches: the listing, deduplicated kernels, scratch memory, control flow."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpmd.compile.backends.native_gpu.gpu_devices import GPUS
from mpmd.compile.backends.native_gpu.launches import BranchLaunch, KernelLaunch, LoopLaunch, ProductLaunch
from mpmd.compile.backends.native_gpu.target import GpuTarget
from mpmd.compile.driver import prepare_fragment
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.options import CompileOptions
from mpmd.errors import CompileError
from tests.support.native_fragments import fragment_of

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
HAS_TRITON = importlib.util.find_spec("triton") is not None


def prepared(function, *arguments, **named):
    return prepare_fragment(fragment_of(function, *arguments), GpuTarget(), **named)


def mlp(x, w):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def test_a_kernel_is_in_the_program_once(unpoisoned):
    program = prepared(mlp, X, X).program
    assert [type(s) for s in program.steps] == [ProductLaunch, KernelLaunch, ProductLaunch, KernelLaunch]
    assert len(program.kernels) == 1 and program.steps[1].kernel == program.steps[3].kernel
    again = prepared(mlp, X, X).program
    assert again.text() == program.text() and again.triton() == program.triton()
    assert "product 1x8x8x8 f32[0:8] · f32[0:8] -> f32[0:8] in tf32 (" in program.text()
    assert f"launch {program.steps[1].kernel} x1 (" in program.text() and "libdevice.tanh" in program.triton()


def test_the_sums_before_an_epilogue_are_scratch_memory(unpoisoned):
    made = prepared(mlp, X, X)
    first = made.thunks[0]
    assert first.scratch in first.writes and first.scratch.size == X.nbytes
    assert made.program.steps[0].d == first.scratch
    assert prepared(lambda x, w: x @ w, X, X).thunks[0].scratch is None


def test_products_of_f32_have_the_digits_that_were_asked_for(unpoisoned):
    """TF32 by default, as XLA has it; what no descriptor describes is a kernel with the same choice."""
    preset = jax.lax.DotAlgorithmPreset
    exact = [(algorithm, "f32") for algorithm in ("highest", preset.F32_F32_F32, preset.BF16_BF16_F32_X3)]
    for precision, how in ((None, "tf32"), ("high", "tf32"), *exact):

        def product(x, w, precision=precision):
            return jnp.dot(x, w, precision=precision)

        assert f" in {how} (" in prepared(product, X, X).program.text()
        kernel = prepared(lambda x, w: product(x[:, ::2], w[::2]), X, X).program.triton()
        assert f'input_precision="{ {"f32": "ieee"}.get(how, how) }"' in kernel


def test_loops_and_branches_keep_their_steps():
    def function(x, n):
        x = jax.lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.tanh(c[0] @ c[0]), c[1] + 1), (x, 0))[0]
        return jax.lax.cond(n > 3, jnp.sin, jnp.cos, x)

    program = prepared(function, X, np.int32(5)).program
    kinds = [type(step) for step in program.steps]
    assert LoopLaunch in kinds and BranchLaunch in kinds
    text = program.text()
    assert "repeat while" in text and " body:" in text and " branch 1:" in text
    assert text.partition(" condition:\n")[2].lstrip().startswith("launch "), "the flag is computed"
    assert len(list(program.launches())) > len(program.steps)


def test_programs_that_wait_for_a_flag_are_no_graph():
    def function(n, x):
        return jax.lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))[0]

    assert not prepared(function, np.int32(5), X).program.is_capturable
    assert prepared(lambda x: function(5, x), X).program.is_capturable


def test_what_depends_on_the_gpu(unpoisoned):
    """More multiprocessors: more programs share the rows of a column."""
    many = np.zeros((1 << 16, 64), np.float32)
    fragment = fragment_of(lambda x: x.sum(0), many)
    small = dataclasses.replace(GPUS["A100"], device=dataclasses.replace(GPUS["A100"].device, units=4))
    grids = [
        prepare_fragment(fragment, GpuTarget(gpu)).program.steps[0].grid for gpu in (small, *GPUS.values())
    ]
    assert grids[0] == 8 < grids[1] < grids[2] == grids[3] <= grids[4]
    assert len({GpuTarget(gpu).key() for gpu in GPUS.values()}) == len(GPUS)
    assert {gpu.capability for gpu in GPUS.values()} == {80, 90, 100}


def test_gradients_of_embeddings_are_added_in_f32():
    """A frequent token's would stop to grow in bf16; its sum is rounded once."""
    table, ids = np.zeros((64, 32), jnp.bfloat16), np.zeros(8192, np.int32)

    def gradient(ids, change):
        return jax.vjp(lambda table: jnp.take(table, ids, axis=0), jnp.asarray(table))[1](change)[0]

    program = prepared(gradient, ids, np.full((8192, 32), 1e-3, jnp.bfloat16)).program
    atomics = [k for k in program.kernels.values() if "tl.atomic_add" in k.source]
    assert atomics and all(k.pointers[k.operands.index(max(k.writes))] == "*fp32" for k in atomics)


def test_what_has_no_launches_is_refused():
    ids = np.zeros(8, np.int32)
    with pytest.raises(NoPlan, match="GPUs do not combine values of f32 by multiply at one place"):
        prepared(lambda x, i: x.at[i].multiply(2.0), X, ids)
    with pytest.raises(CompileError, match="no kernel calls lapack"):
        prepared(lambda x: jnp.linalg.eigvalsh(x), X)


def test_code_needs_triton_and_kernels_of_triton(tmp_path, monkeypatch):
    made = prepared(mlp, X, X)
    overridden = dataclasses.replace(made, options=CompileOptions(kernel_overrides=tmp_path))
    with pytest.raises(CompileError, match="GPUs have no kernels of LLVM"):
        overridden.compiled()
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(
        CompileError, match=r'compiled by Triton, which is missing: pip install "mpmd\[gpu\]"'
    ):
        made.compiled()


def test_bytes_that_are_no_program():
    for data in (b"", b"\x80\x04N."):
        with pytest.raises(ValueError, match="no program"):
            GpuTarget().code_from_bytes(data)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed: make test-gpu")
def test_machine_code_is_kept():
    made = prepared(mlp, X, X).compiled()
    assert all(cubin.code[:4] == b"\x7fELF" for cubin in made.code.cubins.values())
    assert made.code.cubins.keys() == made.program.kernels.keys() and made.code.size > 1000
    again = GpuTarget().code_from_bytes(made.code.to_bytes())
    assert again == made.code and again.fingerprint == made.code.fingerprint
    parts = {"launches": "product 1x8x8x8", "triton": "@triton.jit", "ptx": ".target sm_90"}
    parts["llvm"] = "define ptr @f"
    assert parts.keys() == GpuTarget.code_texts.keys()
    for what, part in parts.items():
        assert part in GpuTarget().code_text(again, what)
