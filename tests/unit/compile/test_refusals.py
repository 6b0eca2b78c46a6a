"""What native code cannot be made of ends in a counted fallback with the reason, never in a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.native_cpu import ffi
from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.loading import compile_program
from mpmd.compile.backends.native_cpu.native_program import ThreadedProgram
from mpmd.compile.compiler import FallbackBackend, compile_fragments, fallback_warning, get_backend
from mpmd.compile.llvm.cpu import host_target
from mpmd.errors import CompileError
from tests.support.native_fragments import fragment_of
from tests.support.native_meshes import OnMesh, mesh_of

X = np.linspace(0.1, 2, 64, dtype=np.float32).reshape(8, 8)


def compiled(function, *arguments):
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    made = compile_fragments({"fragment": fragment_of(function, *arguments)}, {"mesh": mesh}, "native")
    fallback_warning(made).show()
    return made["fragment"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (jnp.linalg.qr(x + 3 * jnp.eye(8))[0] * x) @ x, "no kernel calls lapack_"),
        (lambda x: (jnp.linalg.eigvalsh(x @ x.T)[:, None] * x) @ x, "no kernel calls lapack_"),
    ],
)
def test_operations_without_native_code(function, reason):
    with pytest.warns(UserWarning, match=f"in part:(?s:.*){reason}"):
        made = compiled(function, X)
    assert made.cost_analysis()["fallbacks"] >= 1
    np.testing.assert_allclose(made(X)[0], jax.jit(function)(X), rtol=1e-3, atol=1e-4)


def test_parts_that_wait_for_other_devices_are_not_split():
    """A part of XLA's between two that exchange values could run in another order on another device."""
    mesh, backend = mesh_of({"d": 2}), FallbackBackend(NativeCpuBackend())

    def function(x):
        return jnp.linalg.eigvalsh(jax.lax.psum(x @ x, "d")) @ x

    made = OnMesh(function, [X], mesh, [P()], P(), backend).native
    assert made.backend == "xla" and "no kernel calls lapack_" in made.reasons[0]


def test_more_temporary_memory_than_there_is():
    def function(x):
        row = x[0] * jnp.arange(1 << 22, dtype=jnp.float32)
        square = row[:, None] + row[None, :]
        return (square @ square)[:2, :2]

    with pytest.warns(UserWarning, match=r"needs 131072\.0 GiB of temporary memory, which this process does"):
        made = compiled(function, X[0])
    assert made.cost_analysis()["fallbacks"] == 1 and made.backend == "xla"


def test_an_arena_that_cannot_be_made_is_an_error_of_the_program():
    program = compile_program(ThreadedProgram("empty_program", 0, ()), host_target())
    with pytest.raises(CompileError, match=r"native program empty_program needs .* GiB of temporary memory"):
        ffi.register(program, host_target(), arena_bytes=1 << 60)


def test_an_unknown_backend():
    with pytest.raises(CompileError, match=r"no compile backend 'gcc'\n  there are .*'native', 'reference'"):
        get_backend("gcc")


@pytest.mark.parametrize("backend", ["native", "xla"])
def test_words_that_ask_for_no_text(backend):
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    made = get_backend(backend).compile(fragment_of(jnp.tanh, X), mesh)
    with pytest.raises(CompileError, match=r"no text 'llv' of a fragment\n  there are 'stablehlo', 'hlo', "):
        made.as_text("llv")
    for what in ("buffers", "memory", "thunks", "kernels", "costs", "bars", "llvm", "assembly"):
        assert (f"no text {what!r}" in made.as_text(what)) == (backend == "xla")
