"""A fragment's arguments and results as JAX values; shared by all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mpmd.compile.fragment import ValueSpec
from mpmd.compile.hlo import Shape
from mpmd.errors import CompileError

_BITS = (2, 4, 8, 16, 32, 64)
_FLOATS8 = ("E3M4", "E4M3", "E4M3B11FNUZ", "E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0FNU")
_NUMPY = {
    "i1": "bool",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    **{f"{sign}i{bits}": f"{'u' if sign else ''}int{bits}" for sign in ("", "u") for bits in _BITS},
    **{f"f8{kind}": f"float8_{kind.lower()}" for kind in _FLOATS8},
    "f4E2M1FN": "float4_e2m1fn",
}


def numpy_dtype(element_type: str) -> np.dtype[Any]:
    """The NumPy dtype of an MLIR element type.

    Raises:
        CompileError: there is none.
    """
    if element_type not in _NUMPY:
        raise CompileError(
            f"no array has elements of type {element_type}\n  expected: one of {', '.join(_NUMPY)}"
        )
    return jax.numpy.dtype(_NUMPY[element_type])


_MLIR = {
    "pred": "i1",
    "c64": "complex<f32>",
    "c128": "complex<f64>",
    **{f"{sign}{bits}": f"{'u' if sign == 'u' else ''}i{bits}" for sign in "su" for bits in _BITS},
    **{f"f8{kind.lower()}": f"f8{kind}" for kind in _FLOATS8},
    "f4e2m1fn": "f4E2M1FN",
}


def value_spec(shape: Shape) -> ValueSpec:
    """An array of an HLO program as a value on one device."""
    return ValueSpec(shape.dims, _MLIR.get(shape.dtype, shape.dtype), ((),) * shape.rank)


def named_sharding(mesh: Mesh, value: ValueSpec) -> NamedSharding:
    """The JAX sharding of a value on the devices of a mesh."""
    spec = PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in value.spec))
    if value.memory_kind is None:
        return NamedSharding(mesh, spec)
    return NamedSharding(mesh, spec, memory_kind=value.memory_kind)


def array_types(mesh: Mesh, values: Sequence[ValueSpec]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(v.shape, numpy_dtype(v.dtype), sharding=named_sharding(mesh, v)) for v in values
    ]
