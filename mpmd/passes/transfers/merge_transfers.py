"""mpmd-merge-transfers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.sharding.shards import axes_by_dim

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
        """The type of each value."""
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

        def rebuilt(old: ir.Fragment, made: ir.Fragment) -> None:
            i = place.pop(old)
            fragments[i], place[made] = made, i

        for i in range(len(fragments)):
            groups = groups_of(fragments[i])
            if groups:
                consumers = [place[group.consumer] for group in groups]
                joined = _join_in_producer(fragments[i], groups, rebuilt)
                for group, value, position in zip(groups, joined, consumers):
                    _separate_in_consumer(fragments[position], group, value, rebuilt)


def groups_of(producer: ir.Fragment) -> list[TransferGroup]:
    """Groups that can be merged, in order of first appearance."""
    found: dict[tuple[ir.Type, ir.Fragment, str | None], TransferGroup] = {}
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
                    group = found.setdefault((result.type.tensor, consumer, kind), group)
                    group.transfers.append(transfer)
    return [group for group in found.values() if len(group.transfers) > 1]


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
    made: ir.Fragment = ir.rebuild(producer, list(producer.inputs), types)
    _extend(made, "res_attrs", "out_shardings", len(groups))
    rebuilt(producer, made)
    ir.replace(producer, list(made.results)[: -len(groups)])
    arrived = []
    for group, result in zip(groups, list(made.results)[-len(groups) :]):
        mesh = group.transfers[0].result.type.mesh
        target = ir.MeshTensor.get(mesh, group.joined, memory_kind=group.target_kind)
        transfer = ir.make_transfer(result, target, ir.after(made))
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
    made: ir.Fragment = ir.rebuild(consumer, [*consumer.inputs, value], [r.type for r in consumer.results])
    _extend(made, "arg_attrs", "in_shardings", 1)
    rebuilt(consumer, made)
    ir.replace(consumer, list(made.results))


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
