"""mpmd-forget-empty-shardings."""

from __future__ import annotations

from collections.abc import Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding import shardings


class ForgetEmptyShardings(FunctionPass):
    """Gives replicated values one type.

        m1, tensor<8xf32>, sharding=<@mesh, [{}]>   -->   m1, tensor<8xf32>

    Propagation gives some replicated values a sharding, and others none.  Fragments that differ
    in nothing else must be one program, and may donate their operands to each other.

    Requires: shardings are part of types.
    Ensures: a type with a sharding has one that shards something.  Cost: linear in values.
    Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Arguments, then the results of every op, and the arguments of loops."""
        plain: dict[ir.Type, ir.Type] = {}
        _forget(f.args, plain)
        for op in ir.walk(f, (ir.Fragment, ir.Transfer, ir.For)):
            _forget(op.results, plain)
            if isinstance(op, ir.For):
                _forget(op.args, plain)
        ir.return_types_changed(f)


def _forget(values: Iterable[ir.Value], plain: dict[ir.Type, ir.Type]) -> None:
    """Gives replicated values types without shardings; `plain` caches the result for each type."""
    for value in values:
        kind = value.type
        if not isinstance(kind, ir.MeshTensor) or kind.sharding is None:
            continue
        if kind not in plain:
            same = shardings.is_same(kind.sharding, None)
            plain[kind] = ir.MeshTensor.get(kind.mesh, kind.tensor, None, kind.memory_kind) if same else kind
        if plain[kind] != kind:
            ir.set_type(value, plain[kind])
