"""The only door to what JAX and jaxlib do not promise: `jax._src`, generated names, experimental APIs.

Everything here is looked up once, at import or first use, and each name says what is done without it.
"""

from __future__ import annotations

from jax.core import ShapedArray
from jaxlib.mlir._mlir_libs._mlir import register_operation
from jaxlib.mlir.dialects import _func_ops_gen, _mpmd_ops_gen

func_dialect = _func_ops_gen._Dialect
mpmd_dialect = _mpmd_ops_gen._Dialect

__all__ = ["ShapedArray", "func_dialect", "mpmd_dialect", "register_operation"]
