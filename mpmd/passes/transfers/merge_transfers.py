"""Passes that join transfers, put them where they can start, and drop those that come back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import moving
from mpmd.sharding.shardings import axes_by_dim, local_bytes


class CombineBeforeTransfer(FunctionPass):
    """Combines values before they are sent, if they are only sent to be combined.

        s = transfer a@m1 to m0
        t = transfer b@m1 to m0              f = m1[] (a, b) { x = add a b; ret x }
        f = m0[] (s, t) { x = add a b; ret x }  -->  t = transfer f to m0

    Such sums occur where a value of m0 is used more than once on m1: its gradients are added where it was
    produced.  The pass moves unnamed fragments whose operands are transfers from one mesh, used by nothing
    else, if fewer values and no more bytes are sent then.

    Requires: no shardings in types; meshes with equal axes.  A fragment with effects stays on its mesh.
    Ensures: the number of transfers does not grow.  Cost: linear.
    Source: ours.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """First fragment first: the transfer of a sum may be an operand of the next."""
        for fragment in ir.ops(f, ir.Fragment):
            is_free = not fragment.is_user and ir.is_movable(fragment)
            if is_free and (source := _better_mesh(fragment, f.topology)):
                _move(fragment, source)


def _better_mesh(fragment: ir.Fragment, topology: ir.TopologyAttr) -> str | None:
    """The mesh of all operands, if the fragment is better placed there."""
    transfers = _operand_transfers(fragment)
    if len(transfers) < len(fragment.inputs):
        return None
    if any(user != fragment for op in transfers for user in ir.users(op)):
        return None
    sources = {op.tensor.type.mesh for op in transfers}
    kinds = [v.type for op in transfers for v in (op.tensor, op.result)] + [r.type for r in fragment.results]
    if len(sources) != 1 or any(kind.on_host or kind.sharding is not None for kind in kinds):
        return None
    mesh = topology[fragment.mesh]
    sent, instead = (
        [local_bytes(v.type, mesh) for v in values]
        for values in (dict.fromkeys(fragment.inputs), fragment.results)
    )
    if len(instead) >= len(sent) or sum(instead) > sum(sent):
        return None
    return str(sources.pop())


def _operand_transfers(fragment: ir.Fragment) -> list[ir.Transfer]:
    """The operands that are transfers, an operand that is passed twice counted twice."""
    return [op for value in fragment.inputs if isinstance(op := ir.producer(value), ir.Transfer)]


def _move(fragment: ir.Fragment, mesh: str) -> None:
    """Builds the fragment on another mesh, from the sources of its operands, and sends its results."""
    transfers = _operand_transfers(fragment)
    inputs = [op.tensor for op in transfers]
    where = ir.before(fragment)

    def body(arguments: list[ir.Value], into: ir.InsertionPoint) -> list[ir.Value]:
        return ir.clone_body(fragment.body, dict(zip(fragment.args, arguments)), into)[1]

    moved = ir.make_fragment(
        mesh, inputs, [r.type.on(mesh) for r in fragment.results], where, body,
        inferred_by=fragment.inferred_by, location=fragment.location,
    )  # fmt: skip
    if fragment.call_counter is not None:
        moved.call_counter = fragment.call_counter
    sent = [ir.make_transfer(r, old.type, where) for r, old in zip(moved.results, fragment.results)]
    ir.replace(fragment, [op.result for op in sent])
    for op in dict.fromkeys(transfers):
        ir.erase(op)


MAX_ELEMENTS = 1
_MARK = "concat_transfer"


@dataclasses.dataclass
class TransferGroup:
    """Results of one fragment for one consumer; `transfers[i]` sends element i."""

    consumer: ir.Fragment
    target_kind: str | None
    transfers: list[ir.Transfer]

    @property
    def tensor(self) -> ir.RankedTensorType:
        return self.transfers[0].tensor.type.tensor

    @property
    def joined(self) -> ir.Type:
        """The type of all values in one, on no mesh."""
        return ir.RankedTensorType.get([len(self.transfers), *self.tensor.shape], self.tensor.element_type)


class MergeTransfers(FunctionPass):
    """Sends small values that travel from one fragment to another as one value.

        f, g = m1["f"] (a) { x = add a a; y = neg a; ret x, y }
        s = transfer f to m2
        t = transfer g to m2
        h = m2["h"] (s, t) { z = mul s t; ret z }
        -->
        f, g, k = m1["f"] (a) { x = add a a; y = neg a; c = concat (reshape x) (reshape y); ret x, y, c }
        n = transfer k to m2 {concat_transfer}
        s = transfer f to m2
        t = transfer g to m2
        h = m2["h"] (s, t, n) { v = reshape n[0:1]; o = reshape n[1:2]; z = mul v o; ret z }

    Joined are values of one tensor type and at most one element, with one consumer fragment and one kind
    of memory there, that are in device memory and not sharded.  Old results, transfers and operands stay,
    unused; dedup, cse and fragment-dce remove them.

    Requires: values are defined before they are used; shardings are in types.  Ensures: the same.  Cost:
        linear.
    Source: openxla/shardy MPMD, `merge_transfers`.
    """

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        """Producers in program order.  Both sides are rebuilt, so fragments are known by their position."""
        fragments = ir.fragments(f)
        place = {fragment: i for i, fragment in enumerate(fragments)}

        def rebuilt(old: ir.Fragment, new: ir.Fragment) -> None:
            i = place.pop(old)
            fragments[i], place[new] = new, i

        for i in range(len(fragments)):
            groups = groups_of(fragments[i])
            if groups:
                consumers = [place[group.consumer] for group in groups]
                joined = _join_in_producer(fragments[i], groups, rebuilt)
                for group, value, position in zip(groups, joined, consumers):
                    _separate_in_consumer(fragments[position], group, value, rebuilt)


def groups_of(producer: ir.Fragment) -> list[TransferGroup]:
    """Groups that can be merged, in order of first appearance."""
    groups: dict[tuple[ir.Type, ir.Fragment, str | None], TransferGroup] = {}
    for result in producer.results:
        if not is_eligible(result.type):
            continue
        for transfer in ir.users(result):
            if not isinstance(transfer, ir.Transfer) or _MARK in transfer.attributes:
                continue
            for consumer in dict.fromkeys(ir.users(transfer)):
                if isinstance(consumer, ir.Fragment):
                    kind = transfer.result.type.memory_kind
                    group = TransferGroup(consumer, kind, [])
                    group = groups.setdefault((result.type.tensor, consumer, kind), group)
                    group.transfers.append(transfer)
    return [group for group in groups.values() if len(group.transfers) > 1]


def is_eligible(kind: ir.Type) -> bool:
    """Whether it is small, in device memory, and not sharded."""
    if not isinstance(kind, ir.MeshTensor) or kind.on_host or math.prod(kind.shape) > MAX_ELEMENTS:
        return False
    return kind.sharding is None or not any(axes_by_dim(kind.sharding))


def _join_in_producer(
    producer: ir.Fragment, groups: list[TransferGroup], rebuilt: Callable[[ir.Fragment, ir.Fragment], None]
) -> list[ir.Value]:
    """Returns each group as one more result, and sends it; the received values."""
    returned, types = producer.returned, [r.type for r in producer.results]
    inner = dict(zip(producer.results, returned))
    for group in groups:
        returned.append(_concatenated([inner[t.tensor] for t in group.transfers], group, producer))
        types.append(ir.MeshTensor.get(producer.mesh, group.joined))
    producer.returned = returned
    joined: ir.Fragment = ir.rebuild(producer, list(producer.inputs), types)
    _extend(joined, "res_attrs", "out_shardings", len(groups))
    rebuilt(producer, joined)
    ir.replace(producer, list(joined.results)[: -len(groups)])
    arrived = []
    for group, result in zip(groups, list(joined.results)[-len(groups) :]):
        mesh = group.transfers[0].result.type.mesh
        target = ir.MeshTensor.get(mesh, group.joined, memory_kind=group.target_kind)
        transfer = ir.make_transfer(result, target, ir.after(joined))
        ir.put(transfer, _MARK, ir.UnitAttr.get(ir.context()))
        arrived.append(transfer.result)
    return arrived


def _concatenated(values: list[ir.Value], group: TransferGroup, producer: ir.Fragment) -> ir.Value:
    one = ir.RankedTensorType.get([1, *group.tensor.shape], group.tensor.element_type)
    end, location = ir.at_end(producer.body), producer.location
    parts = [ir.create("stablehlo.reshape", [v], [one], end, location=location).result for v in values]
    zero = {"dimension": ir.i64(0)}
    return ir.create("stablehlo.concatenate", parts, [group.joined], end, zero, location).result


def _separate_in_consumer(
    consumer: ir.Fragment,
    group: TransferGroup,
    value: ir.Value,
    rebuilt: Callable[[ir.Fragment, ir.Fragment], None],
) -> None:
    """Passes the joined value to the consumer, which slices its arguments out of it."""
    index = {t.tensor: i for i, t in enumerate(group.transfers)}
    sent = {t.result: index[t.tensor] for t in group.transfers}
    arg = ir.append_arg(consumer.body, like=value, kind=group.joined)
    where = ir.before(consumer.body.operations[0])
    for operand, old in zip(consumer.inputs, consumer.args):
        if operand in sent:
            ir.replace_uses(old, _element(arg, sent[operand], group, where, consumer.location))
    separated: ir.Fragment = ir.rebuild(
        consumer, [*consumer.inputs, value], [r.type for r in consumer.results]
    )
    _extend(separated, "arg_attrs", "in_shardings", 1)
    rebuilt(consumer, separated)
    ir.replace(consumer, list(separated.results))


def _element(
    joined: ir.Value, i: int, group: TransferGroup, where: ir.InsertionPoint, location: ir.Location
) -> ir.Value:
    rank = len(group.tensor.shape)
    bounds = {
        "start_indices": [i] + [0] * rank,
        "limit_indices": [i + 1, *group.tensor.shape],
        "strides": [1] * (rank + 1),
    }
    attributes = {name: ir.DenseI64ArrayAttr.get(ns, ir.context()) for name, ns in bounds.items()}
    one = ir.RankedTensorType.get([1, *group.tensor.shape], group.tensor.element_type)
    piece = ir.create("stablehlo.slice", [joined], [one], where, attributes, location).result
    return ir.create("stablehlo.reshape", [piece], [group.tensor], where, location=location).result


def _extend(fragment: ir.Fragment, dicts: str, shardings: str, count: int) -> None:
    """Attributes with one entry per value get entries for `count` more; shardings must not be there yet."""
    if dicts in fragment.attributes:
        ir.put_attribute_dicts(fragment, dicts, [*ir.attribute_dicts(fragment, dicts, 0), *[{}] * count])
    ir.put(fragment, shardings, None)


class MoveTransfersToProducer(FunctionPass):
    """Moves each transfer right after the op that defines its operand, or to the begin of the function.

        f = m1["f"] (a) { x = add a a; ret x }              t = transfer b to m2
        g = m1["g"] (f) { y = neg f; ret y }                f = m1["f"] (a) { x = add a a; ret x }
        s = transfer f to m2                          -->   s = transfer f to m2
        t = transfer b to m2                                u = transfer s to m3
        u = transfer s to m3                                g = m1["g"] (f) { y = neg f; ret y }

    Several transfers of one op, or of arguments, end in reverse order.

    Requires: values are defined before they are used.  Ensures: the same.  Cost: linear.
    Source: openxla/shardy MPMD, `move_transfers_to_producer`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """In program order: a transfer of a transfer follows it."""
        with moving(f):
            for transfer in ir.ops(f, ir.Transfer):
                maker = ir.producer(transfer.tensor)
                if maker is None:
                    ir.move_to_start(transfer, f.body)
                else:
                    ir.move_after(transfer, maker)


class RemoveTransferCycles(FunctionPass):
    """Uses a value itself instead of sending it away and back.

        s = transfer a to m2
        t = transfer s to m3                s = transfer a to m2
        u = transfer t to m1         -->    t = transfer s to m3
        v = transfer u to m2                return a, s
        return u, v

    A transfer is replaced by the closest value on its chain of transfers whose type (mesh,
    tensor, sharding, memory) is that of its result.  A path through host memory is kept: it may be there
    to save device memory.  Transfers that become unused stay; fragment-dce removes them.

    Requires: nothing.  Ensures: no such cycle is left.  Cost: linear times the length of chains.
    Source: openxla/shardy MPMD, `remove_transfer_cycles`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Last transfer first."""
        for transfer in reversed(ir.ops(f, ir.Transfer)):
            origin = value_that_comes_back(transfer)
            if origin is not None:
                ir.replace(transfer, [origin])


def value_that_comes_back(transfer: ir.Transfer) -> ir.Value | None:
    """The closest value on a transfer's chain with the type of its result; None if there is none."""
    op: ir.Op | None = transfer
    while isinstance(op, ir.Transfer):
        value = op.tensor
        if value.type.on_host:
            return None
        if value.type == transfer.result.type:
            return value
        op = ir.producer(value)
    return None
