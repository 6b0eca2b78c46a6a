"""What propagation and Shardy would trip over: shardings and computations that say nothing."""

from __future__ import annotations

from collections.abc import Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding import shardings


class DropSubAxes(FunctionPass):
    """Restricts the shardings of values between fragments to whole axes.

        f = m1["f"] in_shardings=[[{"x":(1)2}, {"y"}]] (a) {...}  -->  in_shardings=[[{}, {"y"}]]

    Propagation splits an axis where a dim is split, as that of a batch into microbatches.  JAX cannot
    express such shardings of arrays; inside of fragments they may stay.

    Requires: shardings are attributes of fragments and transfers.
    Ensures: none of these names part of an axis.  Cost: linear in operands and results.
    Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.ops(f, (ir.Fragment, ir.Transfer)):
            for name in ("in_shardings", "out_shardings", shardings.ARGUMENT):
                old = shardings.read(op, name)
                new = [shardings.drop_sub_axes(sharding) for sharding in old]
                if new != old:
                    shardings.write(op, name, new)


class ForgetEmptyComputations(FunctionPass):
    """Removes the user's names from fragments that only change shardings.

        f = m1["f"(1)] cc=0 (a) {ret a}  ->  f = m1[] by=extract_reshards (a) {ret a}

    A computation may be reduced to its arguments (the backward of an addition is, for one) and still be
    needed, if argument and result have different shardings.  Without a name it can be merged with its
    neighbours, and is reported as a reshard.

    Requires: shardings are part of types.
    Ensures: each user fragment computes something.  Cost: linear in fragments.
    Source: ours; the dialect fails with an internal error when it validates reshards.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_user and not ir.ops(fragment.body):
                fragment.origins = []
                fragment.stage = None
                fragment.inferred_by = ["extract_reshards"]


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
