"""Functions of one device, under `shard_map`, as native fragments of a mesh."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.native_cpu.barrier import BACK_OFF_LIMIT, MAX_BACK_OFFS, MESH_AT
from mpmd.compile.backends.native_cpu.ffi import RegisteredProgram
from mpmd.compile.backends.native_cpu.handler import SLOT
from mpmd.compile.executable import Backend
from mpmd.compile.fragment import FragmentModule, ValueSpec
from tests.support.native_fragments import mlir_type

BOTH, ALONE = P("x", "y"), P("x", None)
COLLECTIVES = {
    "sum": (lambda a: lax.psum(a, "x"), BOTH, P(None, "y")),
    "sum over both axes": (lambda a: lax.psum(a, ("x", "y")), BOTH, P()),
    "maximum": (lambda a: lax.pmax(a, "y"), BOTH, P("x")),
    "minimum": (lambda a: lax.pmin(a, "y"), BOTH, P("x")),
    "gather": (lambda a: lax.all_gather(a, "y", axis=1, tiled=True), BOTH, P("x")),
    "gather rows": (lambda a: lax.all_gather(a, ("x", "y")), BOTH, P()),
    "scatter of sums": (
        lambda a: lax.psum_scatter(a, "y", scatter_dimension=1, tiled=True),
        ALONE,
        BOTH,
    ),
    "exchange": (lambda a: lax.all_to_all(a, "y", 1, 0, tiled=True), ALONE, P(("x", "y"), None)),
    "permutation": (lambda a: lax.ppermute(a, "x", [(0, 1), (1, 0)]), BOTH, BOTH),
    "permutation that leaves some out": (lambda a: lax.ppermute(a, "x", [(0, 1)]), BOTH, BOTH),
    "own number": (lambda a: a + lax.axis_index("y").astype(a.dtype), BOTH, BOTH),
}
"""Functions of a mesh with axes x and y, how their argument is cut, and how their result is."""


def mesh_of(axes: Mapping[str, int], first: int = 0) -> Mesh:
    """A mesh of this process's devices, beginning with number `first`."""
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[first : first + count])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def value_spec(value: Any, spec: PartitionSpec) -> ValueSpec:
    """An array as a fragment's argument or result."""
    named = [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]
    named += [()] * (len(value.shape) - len(named))
    return ValueSpec(tuple(value.shape), mlir_type(value.dtype), tuple(named))


class OnMesh:
    """A function of each device's parts: compiled natively, and by `jax.jit`.

    Args:
        function: of one device.
        arguments: whole arrays.
        mesh: the devices.
        given: how the arguments are cut.
        wanted: how the results are cut.
        backend: compiles it.
        donated: numbers of arguments.
    """

    def __init__(
        self,
        function: Any,
        arguments: Sequence[Any],
        mesh: Mesh,
        given: Sequence[PartitionSpec],
        wanted: Any,
        backend: Backend | None = None,
        donated: tuple[int, ...] = (),
    ) -> None:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=tuple(given), out_specs=wanted, check_vma=False)
        self.mesh = mesh
        self.jitted = jax.jit(mapped)
        results = jax.tree.leaves(jax.eval_shape(mapped, *arguments))
        self.fragment = FragmentModule(
            "fragment",
            "mesh",
            self.jitted.lower(*arguments).as_text(),
            tuple(value_spec(a, s) for a, s in zip(arguments, given, strict=True)),
            tuple(value_spec(r, s) for r, s in zip(results, jax.tree.leaves(wanted), strict=True)),
            donated,
        )
        self.arguments = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, given, strict=True)
        ]
        self.native: Any = (backend or NativeCpuBackend()).compile(self.fragment, mesh)

    def program(self) -> RegisteredProgram:
        """The native program that `native` calls, with the memory that its devices share."""
        return NativeCpuBackend().register(self.native.artefact, self.fragment.mesh, self.mesh)

    def check(self, tolerance: float = 1e-6) -> None:
        """Compare the results of both, on every device."""
        wanted = jax.tree.leaves(self.jitted(*self.arguments))
        for got, want in zip(self.native(*self.arguments), wanted, strict=True):
            assert got.dtype == want.dtype
            assert got.sharding.is_equivalent_to(want.sharding, want.ndim)
            for mine, its in zip(got.addressable_shards, want.addressable_shards, strict=True):
                a, b = (np.asarray(x.data, np.float64) for x in (mine, its))
                np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def values(*dims: int, dtype: str = "float32") -> np.ndarray:
    """Random numbers, the same for the same dims."""
    return (np.random.default_rng(0).standard_normal(dims) * 3).astype(jnp.dtype(dtype))


def memory_of_mesh(program: RegisteredProgram) -> int:
    """The address of the memory that the devices of a program share."""
    barrier = ctypes.c_void_p.from_address(program.memory.ctypes.data + SLOT["barrier"]).value
    return ctypes.c_void_p.from_address(barrier + MESH_AT).value


@contextlib.contextmanager
def giving_up_after(program: RegisteredProgram, back_offs: int) -> Iterator[None]:
    """Within it, a device that waits for the others of its mesh gives up after so many back-offs.

    Calls that must succeed lie outside: on a busy machine no short limit is safe.
    """
    limit = ctypes.c_int64.from_address(memory_of_mesh(program) + BACK_OFF_LIMIT)
    limit.value = back_offs
    try:
        yield
    finally:
        limit.value = MAX_BACK_OFFS


def call_on(program: Any, device: jax.Device) -> jax.Array:
    """The result of a program's call on one device of its mesh, without the other ones."""
    result = jax.ShapeDtypeStruct((1, 3), np.float32)
    call = jax.jit(lambda a: program(a, results=[result])[0], out_shardings=SingleDeviceSharding(device))
    return call(jax.device_put(values(1, 3), device))
