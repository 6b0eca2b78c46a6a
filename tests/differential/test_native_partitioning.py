"""Operations on sharded dims as native code on up to eight devices: the numbers of `jax.jit`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError
from tests.support.native_meshes import mesh_of, value_spec
from tests.support.partitioned_functions import FUNCTIONS

pytestmark = pytest.mark.usefixtures("plain_xla")

MESHES = ({"x": 2}, {"x": 2, "y": 2}, {"x": 8}, {"x": 4, "y": 2})
QUICK = (
    "embedding",
    "embedding_gradient",
    "take_along_gradient",
    "scatter_points",
    "sort",
    "cumsum",
    "max_pool_gradient",
    "threefry",
    "uneven",
)


def cut(shape, axes, first=0):
    """Every axis along the first dim, from one on, that it divides."""
    names = [[] for _ in shape]
    parts = [1] * len(shape)
    for axis, size in axes.items():
        for d in [*range(first, len(shape)), *range(first)]:
            if shape[d] % (parts[d] * size) == 0:
                names[d].append(axis)
                parts[d] *= size
                break
    return P(*(tuple(n) if n else None for n in names))


def check(names, axes, first=0):
    """Compile functions as one fragment, and compare its results on every device."""
    functions, groups = zip(*(FUNCTIONS[name] for name in names), strict=True)
    arguments, tree = jax.tree.flatten([tuple(map(np.asarray, g)) for g in groups])

    def together(*flat):
        return jax.tree.leaves(
            [f(*a) for f, a in zip(functions, jax.tree.unflatten(tree, flat), strict=True)]
        )

    wanted, mesh = jax.jit(together)(*arguments), mesh_of(axes)
    given_specs = [cut(a.shape, axes, min(first, max(a.ndim - 1, 0))) for a in arguments]
    specs = [cut(w.shape, axes, min(first, max(w.ndim - 1, 0))) for w in wanted]
    fragment = FragmentModule(
        "fragment",
        "mesh",
        jax.jit(together, keep_unused=True).lower(*arguments).as_text(),
        tuple(value_spec(a, s) for a, s in zip(arguments, given_specs, strict=True)),
        tuple(value_spec(w, s) for w, s in zip(wanted, specs, strict=True)),
    )
    native = NativeCpuBackend().compile(fragment, mesh)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, given_specs, strict=True)]
    for got, want, spec in zip(native(*placed), wanted, specs, strict=True):
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)
        whole = np.asarray(want)
        for shard in got.addressable_shards:
            np.testing.assert_allclose(shard.data, whole[shard.index], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "axes", [MESHES[-1], *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[:-1])], ids=str
)
@pytest.mark.parametrize("first", [0, 1])
def test_operations_on_sharded_dims_are_native(axes, first):
    check(QUICK, axes, first)


@pytest.mark.slow
@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_every_operation_is_native(name, axes):
    for first in (0, 1):
        check([name], axes, first)


def test_what_has_no_native_code_is_refused(monkeypatch):
    given = (np.eye(8, dtype=np.float32),)
    monkeypatch.setitem(FUNCTIONS, "eigenvalues", (jax.numpy.linalg.eigvalsh, given))
    with pytest.raises(CompileError, match="no kernel calls lapack_"):
        check(["eigenvalues"], MESHES[0])
