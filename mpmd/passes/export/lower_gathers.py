"""mpmd-lower-gathers."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.propagation.hoist_gathers import GATHERING
from mpmd.sharding.device_program import DeviceProgram
from mpmd.sharding.shards import axes_of
from mpmd.sharding.splits import innermost, split_axes, split_of, without


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
        """Each fragment of gathers."""
        for fragment in ir.fragments(f):
            if fragment.inferred_by == [GATHERING]:
                _lower(fragment, axes_of(f.topology[fragment.mesh]))


def _lower(fragment: ir.Fragment, sizes: dict[str, int]) -> None:
    types = {arg: value.type for arg, value in zip(fragment.args, fragment.inputs)}
    returned, found = fragment.returned, list[int]()
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
            found.append(number)
    if program is not None:
        (main,) = ir.funcs(program.module())
        given = dict(zip(main.args, [returned[number] for number in found]))
        _, whole = ir.clone_body(main.body, given, ir.at_end(fragment.body))
        for number, value in zip(found, whole):
            returned[number] = value
        fragment.returned = returned
