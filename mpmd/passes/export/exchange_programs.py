"""Programs that exchange between devices: the sums and gathers that fragments do not do themselves."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import erase_dead_ops
from mpmd.passes.propagation.defer_reductions import REDUCTION
from mpmd.passes.propagation.hoist_gathers import GATHERING
from mpmd.sharding.device_program import REDUCES_TERMS, DeviceProgram, Sum, sums
from mpmd.sharding.shardings import axes_of, innermost, split_axes, split_of, without


class IssueReductions(FunctionPass):
    """Moves each deferred reduction to where its mesh would wait for another one.

        b3 = m1["s3"(1)] (...)                b3 = m1["s3"(1)] (...)
        t  = transfer ... to m1               r  = m1[] by=defer_reductions (b3)
        b1 = m1["s1"(1)] (t)         ->       t  = transfer ... to m1
        r  = m1[] by=defer_reductions (b3)    b1 = m1["s1"(1)] (t)

    A mesh of several stages has its last gradients of one while others still compute.  Where it must wait
    then, a reduction costs no time; elsewhere it would delay work that other meshes wait for.  Waits are
    those of a step whose named fragments all take as long, and whose transfers take no time.

    Requires: the order of user fragments is final; inferred ones are as late as possible.
    Ensures: a reduction moves only to earlier, and to behind all that it reads.
    Cost: linear in the ops, times reductions.
    Source: ours; torchtitan schedules them as REDUCE_GRAD.
    """

    runs_on = "entry"

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order, so that reductions in one wait stay in order."""
        place = {op: i for i, op in enumerate(ir.ops(f))}
        waiting = _waiting(f)
        for fragment in ir.fragments(f):
            if fragment.inferred_by != [REDUCTION]:
                continue
            last_maker = max(
                (place[op] for v in fragment.inputs if (op := ir.producer(v)) is not None), default=0
            )
            for other in waiting[fragment.mesh]:
                if last_maker < place[other] < place[fragment]:
                    ir.move_before(fragment, other)
                    break


def _waiting(f: ir.Func) -> dict[str, list[ir.Fragment]]:
    """For each mesh its named fragments, in order, that wait for values when the mesh has nothing to do."""
    waiting = collections.defaultdict[str, list[ir.Fragment]](list)
    free = collections.defaultdict[str, int](int)
    ends: dict[ir.Op, int] = {}
    for op in ir.ops(f):
        ready = max((ends[maker] for v in ir.read_by(op) if (maker := ir.producer(v)) in ends), default=0)
        if isinstance(op, ir.Fragment) and op.is_user:
            if ready > free[op.mesh]:
                waiting[op.mesh].append(op)
            ready = free[op.mesh] = max(ready, free[op.mesh]) + 1
        ends[op] = ready
    return waiting


class LowerGathers(FunctionPass):
    """Writes gathers of weights as collectives over the axes that no longer split them.

        g<[{}, {}]> = m1[] by=hoist_gathers (w<[{"fsdp"}, {}]>) { w }
        ->  g<[{}, {}]> = m1[] by=hoist_gathers (w<..>) { device by device: all_gather over "fsdp" }

    A compiler that is given the two shardings may gather over more devices: over replicas, too, XLA sends
    half as many bytes again on {replica: 2, fsdp: 2}.

    Requires: shardings are part of types.
    Ensures: a weight stays as it is if it is not gathered, or if an axis that still splits a dim of it lies
        within one that does not.
    Cost: linear in the fragments of gathers.  Source: ours.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.inferred_by == [GATHERING]:
                _lower(fragment, axes_of(f.topology[fragment.mesh]))


def _lower(fragment: ir.Fragment, sizes: dict[str, int]) -> None:
    types = {arg: value.type for arg, value in zip(fragment.args, fragment.inputs)}
    returned, lowered = fragment.returned, list[int]()
    program: DeviceProgram | None = None
    for number, (value, result) in enumerate(zip(returned, fragment.results)):
        source, target = types.get(value), result.type
        if source is None or source.sharding is None:
            continue
        before = split_of(source.sharding, len(source.shape))
        after = split_of(target.sharding, len(target.shape))
        gathered = split_axes(before) - split_axes(after)
        inner = innermost(before, sorted(gathered))
        if gathered and set(inner) == gathered and without(before, sorted(gathered)) == after:
            mesh = str(ir.sdy.TensorShardingAttr(source.sharding).mesh_or_ref)
            program = program or DeviceProgram(sizes, mesh)
            part = program.take(list(source.shape), str(source.element_type), before)
            for axis, dim in reversed(inner.items()):
                part.all_gather(axis, dim)
            program.give(part, list(target.shape), after)
            lowered.append(number)
    if program is not None:
        (main,) = ir.funcs(program.module())
        given = dict(zip(main.args, [returned[number] for number in lowered]))
        _, whole = ir.clone_body(main.body, given, ir.at_end(fragment.body))
        for number, value in zip(lowered, whole):
            returned[number] = value
        fragment.returned = returned


class LowerReductions(FunctionPass):
    """Writes sums over the devices of a mesh as collectives, at the end of the step or in each microbatch.

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
    replaced: list[tuple[ir.Value, ir.Value, Sum]] = []
    mesh = ""
    for op in ir.ops(fragment.body):
        if op.operation.name == "stablehlo.reduce" and op.operands[0] in operands:
            kind = _kind_of(op.results[0], fragment)
            terms = operands[op.operands[0]].type
            if kind is not None and terms.sharding is not None:
                axes, *rest = split_of(terms.sharding, len(terms.shape))
                if axes and tuple(rest) == without(split_of(kind.sharding, len(kind.shape)), axes):
                    replaced.append((op.operands[0], op.results[0], Sum(kind, (axes,))))
                    mesh = _mesh_of(terms.sharding)
    _replace(replaced, sizes, mesh)
    erase_dead_ops(fragment.body)


def _kind_of(total: ir.Value, fragment: ir.Fragment) -> ir.MeshTensor | None:
    """The type of the result that a sum is, perhaps added to a start."""
    returned = fragment.returned
    for value in (total, *(op.results[0] for op in ir.users(total) if op.operation.name == "stablehlo.add")):
        if value in returned:
            return fragment.results[returned.index(value)].type
    return None


def _replace(replaced: Sequence[tuple[ir.Value, ir.Value, Sum]], sizes: Mapping[str, int], mesh: str) -> None:
    """Computes some values from their terms by collectives, right before the last of them."""
    if replaced:
        (main,) = ir.funcs(sums([total for _, _, total in replaced], sizes, mesh))
        given = dict(zip(main.args, [terms for terms, _, _ in replaced]))
        _, totals = ir.clone_body(main.body, given, ir.before(ir.producer(replaced[-1][1])))
        for (_, value, _), total in zip(replaced, totals):
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
    for total, alike in kinds.items():
        if len(alike) == 1:
            _lower_in_microbatch(total, next(iter(alike.values())), sizes[total])


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
