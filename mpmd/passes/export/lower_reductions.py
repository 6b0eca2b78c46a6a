"""mpmd-lower-reductions."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dead_ops import erase_dead_ops
from mpmd.passes.propagation.defer_reductions import NAME
from mpmd.sharding.inside import split_of
from mpmd.sharding.shards import axes_of
from mpmd.sharding.sums import sums, without


class LowerReductions(FunctionPass):
    """Writes the sums of deferred reductions as collectives of the devices.

        s<[{"data"}, {}]> = m1[] by=defer_reductions (p<[{"data"}, {}, {}]>) { reduce add p over dim 0 }
        ->
        s<[{"data"}, {}]> = m1[] by=defer_reductions (p<..>) { device by device: reduce_scatter over "data" }

    A value that is split along the axis of its terms is reduced into its parts; a compiler that is given the
    sum may reduce all of it on every device.

    Requires: shardings are part of types.
    Ensures: a sum stays as it is if its value is split in another way than its terms are, along other axes.
    Cost: linear in the fragments.  Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Each fragment of sums."""
        for fragment in ir.fragments(f):
            if fragment.inferred_by == [NAME]:
                _lower(fragment, axes_of(f.topology[fragment.mesh]))


def _lower(fragment: ir.Fragment, sizes: dict[str, int]) -> None:
    operands = dict(zip(fragment.args, fragment.inputs))
    found = []
    for op in ir.ops(fragment.body):
        if op.operation.name == "stablehlo.reduce" and op.operands[0] in operands:
            kind = _kind_of(op.results[0], fragment)
            terms = operands[op.operands[0]].type
            if kind is not None and terms.sharding is not None:
                axes, *rest = split_of(terms.sharding, len(terms.shape))
                if axes and tuple(rest) == without(split_of(kind.sharding, len(kind.shape)), axes):
                    found.append((op, kind, axes, terms.sharding))
    if not found:
        return
    mesh = str(ir.sdy.TensorShardingAttr(found[0][3]).mesh_or_ref)
    program = sums([kind for _, kind, _, _ in found], [axes for _, _, axes, _ in found], sizes, mesh)
    (main,) = ir.funcs(program)
    given = dict(zip(main.args, [op.operands[0] for op, _, _, _ in found]))
    _, totals = ir.clone_body(main.body, given, ir.before(found[-1][0]))
    for (op, _, _, _), total in zip(found, totals):
        ir.replace_uses(op.results[0], total)
    erase_dead_ops(fragment.body)


def _kind_of(total: ir.Value, fragment: ir.Fragment) -> ir.MeshTensor | None:
    """The type of the result that a sum is, perhaps added to a start."""
    returned = fragment.returned
    for value in (total, *(op.results[0] for op in ir.users(total) if op.operation.name == "stablehlo.add")):
        if value in returned:
            return fragment.results[returned.index(value)].type
    return None
