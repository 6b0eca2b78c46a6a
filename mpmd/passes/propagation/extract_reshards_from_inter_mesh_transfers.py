"""Changes of sharding, moved out of transfers into fragments, so that transfers copy shard to shard.

A sharding changes on the side where that leaves less to send per device.
"""

from __future__ import annotations

import math

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import in_block_order
from mpmd.sharding import shardings
from mpmd.sharding.shardings import axes_of, local_bytes, local_shape
from mpmd.support import diagnostics


class ExtractReshardsFromInterMeshTransfers(FunctionPass):
    """Moves changes of sharding out of transfers: these then copy shard to shard.

        a: [{"x"}, {}]; t = transfer a to m2 {[{}, {"x"}]}
        ->  t = transfer a to m2 {[{"x"}, {}]};  r = m2[] by=extract_reshards out=[[{}, {"x"}]] (t) { ret t }

    The sharding changes before the transfer if that leaves less to send per device (or if the target is in
    host memory), else after it: in the fragment that produces the value, in the fragments that read it, or,
    for other producers and readers, in a fragment that does only that.

    Requires: shardings are attributes; the user's are enforced.
    Ensures: both ends of each transfer have the same sharding, if the meshes of the topology are equal (but
        for axes of size 1); else nothing happens, with a notice.  Warning: each kind of such a transfer.
        Late error: both ends are in host memory.
    Cost: linear in uses.
    Source: openxla/shardy MPMD, `extract_reshards_from_inter_mesh_transfers`; that other fragments that
        read a value follow when it changes at its producer is ours (there the program becomes invalid).
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Visits each transfer, in order."""
        topology = f.topology
        if len({_shape_of(mesh) for mesh in topology.values()}) > 1:
            diagnostics.notice(
                "reshards stay in transfers, as the meshes of the topology are not equal", f.location
            )
            return
        reports = _Reports(topology)
        for transfer in ir.ops(f, ir.Transfer):
            source = shardings.of_value(transfer.tensor, f)
            target = shardings.of_value(transfer.result, f)
            if shardings.is_same(source, target):
                continue
            from_host, to_host = transfer.tensor.type.on_host, transfer.result.type.on_host
            if from_host and to_host:
                diagnostics.late_error(
                    "Resharding on host not supported with an mpmd.transfer: both ends are in host memory, "
                    f"with the shardings {_text(source)} and {_text(target)}. Give both the same sharding.",
                    transfer.location,
                )
                continue
            reports.add(transfer, source, target)
            shrinks = _local_count(transfer.tensor, source, topology) > _local_count(
                transfer.result, target, topology
            )
            if to_host or (not from_host and shrinks):
                _reshard_before(f, transfer, source, target)
            else:
                _reshard_after(f, transfer, source, target)
        reports.give()


def _shape_of(mesh: ir.sdy.MeshAttr) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name, size in axes_of(mesh).items() if size != 1)


def _local_count(value: ir.Value, sharding: shardings.Sharding | None, topology: ir.TopologyAttr) -> int:
    kind = value.type
    of_sharding = ir.MeshTensor.get(kind.mesh, kind.tensor, sharding, kind.memory_kind)
    return math.prod(local_shape(of_sharding, topology[kind.mesh]))


def _reshard_before(
    f: ir.Func, transfer: ir.Transfer, old: shardings.Sharding | None, new: shardings.Sharding | None
) -> None:
    """Gives the transfer's operand the sharding `new`, in its producer or right before the transfer."""
    value = transfer.tensor
    maker = ir.producer(value)
    new = _replicated_like(old, value) if new is None else new
    if not isinstance(maker, ir.Fragment):
        ir.set_operand(transfer, 0, _identity(value, new, ir.before(transfer)))
        return
    results = list(maker.results)
    shardings.update(maker, "out_shardings", results, {ir.result_index(value): new})
    others = [user for user in dict.fromkeys(ir.users(value)) if user != transfer]
    for user in others:
        if isinstance(user, ir.Fragment):
            _read_as(f, user, value, new)
    others = [user for user in others if not isinstance(user, ir.Fragment)]
    if others:
        old = _replicated_like(new, value) if old is None else old
        back = _identity(value, old, ir.before(in_block_order([transfer, *others])[0]))
        for user in others:
            ir.replace_uses_in(value, back, user)


def _reshard_after(
    f: ir.Func, transfer: ir.Transfer, old: shardings.Sharding | None, new: shardings.Sharding | None
) -> None:
    """Keeps the sharding `old` at the transfer, and changes it in the readers."""
    value = transfer.result
    old = _replicated_like(new, value) if old is None else old
    new = _replicated_like(old, value) if new is None else new
    users = list(dict.fromkeys(ir.users(value)))
    shardings.update(transfer, shardings.ARGUMENT, [value], {0: old})
    for user in users:
        if isinstance(user, ir.Fragment):
            _read_as(f, user, value, old)
    others = [user for user in users if not isinstance(user, ir.Fragment)]
    if others:
        resharded = _identity(value, new, ir.after(transfer))
        for user in others:
            ir.replace_uses_in(value, resharded, user)


def _read_as(f: ir.Func, fragment: ir.Fragment, value: ir.Value, sharding: shardings.Sharding) -> None:
    entries = {i: sharding for i, v in enumerate(fragment.inputs) if v == value}
    shardings.update_operands(fragment, f, entries)


def _replicated_like(sharding: shardings.Sharding | None, value: ir.Value) -> shardings.Sharding:
    """The replicated sharding of the mesh of the other end's sharding."""
    mesh = ir.sdy.TensorShardingAttr(sharding).mesh_or_ref
    return shardings.without_axes(mesh, shardings.rank(value), is_closed=True)


def _identity(value: ir.Value, sharding: shardings.Sharding, where: ir.InsertionPoint) -> ir.Value:
    """`value` with another sharding: the result of a fragment that returns its argument."""
    fragment = ir.make_fragment(
        value.type.mesh, [value], [value.type], where, lambda args, _: args,
        inferred_by=["extract_reshards"], location=value.location,
    )  # fmt: skip
    shardings.write(fragment, "out_shardings", [sharding])
    return fragment.results[0]


class _Reports:
    """One warning per kind of resharding transfer, even if many microbatches have one."""

    def __init__(self, topology: ir.TopologyAttr) -> None:
        self.topology = topology
        self.found: dict[str, list[ir.Location]] = {}

    def add(
        self, transfer: ir.Transfer, old: shardings.Sharding | None, new: shardings.Sharding | None
    ) -> None:
        kind = transfer.tensor.type
        of_old = ir.MeshTensor.get(kind.mesh, kind.tensor, old)
        text = (
            f'of {ir.name_of(transfer.tensor.location) or "a value"} ({kind.tensor}) from mesh "{kind.mesh}" '
            f'to "{transfer.result.type.mesh}", from {_text(old)} to {_text(new)}, '
            f"{local_bytes(of_old, self.topology[kind.mesh])} bytes per device"
        )
        self.found.setdefault(text, []).append(transfer.location)

    def give(self) -> None:
        for text, places in self.found.items():
            times = f" ({len(places)} times)" if len(places) > 1 else ""
            diagnostics.warning(
                f"Found a resharding transfer {text}{times}: it takes a program of its own where no fragment "
                "can do it. Give both ends the same sharding to avoid it.",
                places[0],
            )


def _text(sharding: shardings.Sharding | None) -> str:
    return "replicated" if sharding is None else str(sharding)
