"""mpmd-lower-reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.dead_ops import erase_dead_ops
from mpmd.passes.propagation.defer_reductions import REDUCTION
from mpmd.sharding.shards import axes_of
from mpmd.sharding.splits import split_of, without
from mpmd.sharding.sums import REDUCES_TERMS, Sum, sums


class LowerReductions(FunctionPass):
    """Writes sums over the devices of a mesh as collectives: those at the end, and those of microbatches.

        s<[{"data"}, {}]> = m1[] by=defer_reductions (p<[{"data"}, {}, {}]>) { reduce add p over dim 0 }
        ->
        s<[{"data"}, {}]> = m1[] by=defer_reductions (p<..>) { device by device: reduce_scatter over "data" }

    A value that is split along the axis of its terms is reduced into its parts; a compiler that is given the
    sum may reduce all of it on every device.

    Requires: shardings are part of types.
    Ensures: a sum stays as it is if its value is split in another way than its terms are, along other axes;
        so does one in a body that fragments share whose values are split in different ways.
    Cost: linear in the fragments.  Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Each fragment of sums, and each body of microbatches with sums."""
        for fragment in ir.fragments(f):
            if fragment.inferred_by == [REDUCTION]:
                _lower_at_end(fragment, axes_of(f.topology[fragment.mesh]))
        _lower_in_microbatches(f)


def _lower_at_end(fragment: ir.Fragment, sizes: dict[str, int]) -> None:
    operands = dict(zip(fragment.args, fragment.inputs))
    found: list[tuple[ir.Value, ir.Value, Sum]] = []
    mesh = ""
    for op in ir.ops(fragment.body):
        if op.operation.name == "stablehlo.reduce" and op.operands[0] in operands:
            kind = _kind_of(op.results[0], fragment)
            terms = operands[op.operands[0]].type
            if kind is not None and terms.sharding is not None:
                axes, *rest = split_of(terms.sharding, len(terms.shape))
                if axes and tuple(rest) == without(split_of(kind.sharding, len(kind.shape)), axes):
                    found.append((op.operands[0], op.results[0], Sum(kind, (axes,))))
                    mesh = _mesh_of(terms.sharding)
    _replace(found, sizes, mesh)
    erase_dead_ops(fragment.body)


def _kind_of(total: ir.Value, fragment: ir.Fragment) -> ir.MeshTensor | None:
    """The type of the result that a sum is, perhaps added to a start."""
    returned = fragment.returned
    for value in (total, *(op.results[0] for op in ir.users(total) if op.operation.name == "stablehlo.add")):
        if value in returned:
            return fragment.results[returned.index(value)].type
    return None


def _replace(found: Sequence[tuple[ir.Value, ir.Value, Sum]], sizes: Mapping[str, int], mesh: str) -> None:
    """Computes some values from their terms by collectives, right before the last of them."""
    if found:
        (main,) = ir.funcs(sums([total for _, _, total in found], sizes, mesh))
        given = dict(zip(main.args, [terms for terms, _, _ in found]))
        _, totals = ir.clone_body(main.body, given, ir.before(ir.producer(found[-1][1])))
        for (_, value, _), total in zip(found, totals):
            ir.replace_uses(value, total)


def _mesh_of(sharding: ir.Attribute) -> str:
    return str(ir.sdy.TensorShardingAttr(sharding).mesh_or_ref)


def _lower_in_microbatches(f: ir.Func) -> None:
    """Sums of terms that are then added to a total, whose sharding they take."""
    symbols = ir.symbol_table(ir.module_of(f))
    kinds: dict[ir.Value, dict[ir.Attribute | None, ir.MeshTensor]] = {}  # by sharding, on any mesh
    sizes: dict[ir.Value, dict[str, int]] = {}
    for fragment in ir.fragments(f):
        results = dict(zip(fragment.returned, fragment.results))
        returned = [(value, result.type) for value, result in results.items()]
        for call in ir.ops(fragment.body, ir.FuncCall):
            inside = zip(symbols[call.callee.value].returned, call.results)
            returned += [(value, results[result].type) for value, result in inside if result in results]
        for value, kind in returned:
            for total in _sums_of_terms(value):
                kinds.setdefault(total, {})[kind.sharding] = kind
                sizes[total] = axes_of(f.topology[fragment.mesh])
    for total, found in kinds.items():
        if len(found) == 1:
            _lower_in_microbatch(total, next(iter(found.values())), sizes[total])


def _sums_of_terms(value: ir.Value) -> list[ir.Value]:
    """The sums over dims of terms that a value is a total of; their dims may have been joined since."""
    op = ir.producer(value)
    if op is None or op.operation.name != "stablehlo.add":
        return []
    return [term for term in op.operands if _reduction_of(term) is not None]


def _reduction_of(term: ir.Value) -> ir.Op | None:
    op = ir.producer(term)
    if op is not None and op.operation.name == "stablehlo.reshape":
        op = ir.producer(op.operands[0])
    return op if op is not None and REDUCES_TERMS in op.attributes else None


def _lower_in_microbatch(total: ir.Value, kind: ir.MeshTensor, sizes: Mapping[str, int]) -> None:
    reduction = _reduction_of(total)
    constraint = None if reduction is None else ir.producer(reduction.operands[0])
    if reduction is None or not isinstance(constraint, ir.sdy.ShardingConstraintOp):
        return
    terms = constraint.results[0]
    split, of_total = split_of(constraint.sharding, len(terms.type.shape)), split_of(kind.sharding, 0)
    count = len(terms.type.shape) - len(kind.shape) + 1
    axes = [axis for dim in split[:count] for axis in dim]
    if of_total and split[count:] == without(of_total[1:], axes):
        wanted = Sum(kind, split[:count], of_total[0])
        unused = [op for op in (ir.producer(total), reduction) if op is not None]
        _replace([(terms, total, wanted)], sizes, _mesh_of(constraint.sharding))
        for op in dict.fromkeys(unused):
            ir.erase(op)
