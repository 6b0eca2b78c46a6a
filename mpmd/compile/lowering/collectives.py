"""Lowering of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import tuple_of
from mpmd.compile.lowering.site import LoweringSite, Rule, plain


def _groups(site: LoweringSite) -> ReplicaGroups:
    """The groups; rows shorter than the table end in -1."""
    table = site.required("replica_groups")
    return ReplicaGroups(tuple(tuple(int(v) for v in row if v >= 0) for row in table))


def _channel(site: LoweringSite) -> int | None:
    return site.attribute("channel_handle") or None


def _joined(site: LoweringSite) -> dict[str, Any]:
    return {
        "replica_groups": _groups(site),
        "channel_id": _channel(site),
        "use_global_device_ids": bool(site.attribute("use_global_device_ids", False)),
    }


def all_reduce(site: LoweringSite) -> Sequence[HloInstruction]:
    """The reduction over a group, with the result on all its members."""
    return site.parts(site.build.add("all-reduce", *site.operands, called=(site.region(),), **_joined(site)))


def all_gather(site: LoweringSite) -> Sequence[HloInstruction]:
    """The members' arrays one after the other, on all members."""
    gathered = site.build.add(
        "all-gather",
        *site.operands,
        shape=site.shape if len(site.operands) == 1 else tuple_of(site.operation.shapes),
        dimensions=(site.required("all_gather_dim"),),
        **_joined(site),
    )
    return site.parts(gathered)


def reduce_scatter(site: LoweringSite) -> HloInstruction:
    """The reduction over a group, each member keeping its part."""
    return site.build.add(
        "reduce-scatter",
        *site.operands,
        shape=site.shape,
        dimensions=(site.required("scatter_dimension"),),
        called=(site.region(),),
        **_joined(site),
    )


def all_to_all(site: LoweringSite) -> Sequence[HloInstruction]:
    """Part j of member i goes to member j: split along one dim, joined along another.

    HLO exchanges along the split dim; where the parts are joined along another dim, they are moved there
    after.
    """
    split, joined, count = (site.required(n) for n in ("split_dimension", "concat_dimension", "split_count"))
    groups, channel = _groups(site), _channel(site)
    out = []
    for value in site.operands:
        exchanged = site.build.add(
            "all-to-all", value, dimensions=(split,), replica_groups=groups, channel_id=channel
        )
        out.append(rejoin(site.build, exchanged, split, joined, count))
    return out


def rejoin(build: HloBuilder, value: HloInstruction, split: int, joined: int, count: int) -> HloInstruction:
    """Parts that are stored one after the other along `split`, stored one after the other along `joined`."""
    if split == joined:
        return value
    dims = value.shape.dims
    parts = (*dims[:split], count, dims[split] // count, *dims[split + 1 :])
    apart = build.reshape(value, parts)
    order = [d for d in range(len(parts)) if d != split]
    place = order.index(joined if joined < split else joined + 1)
    order.insert(place, split)
    moved = build.transpose(apart, order)
    result = [d // count if i == split else d * count if i == joined else d for i, d in enumerate(dims)]
    return build.reshape(moved, result)


def collective_permute(site: LoweringSite) -> HloInstruction:
    pairs = tuple((int(s), int(t)) for s, t in site.required("source_target_pairs"))
    return site.build.add(
        "collective-permute", site.operands[0], source_target_pairs=pairs, channel_id=_channel(site)
    )


def collective_broadcast(site: LoweringSite) -> HloInstruction:
    """The first member's array on all members."""
    return site.build.add(
        "collective-broadcast", site.operands[0], replica_groups=_groups(site), channel_id=_channel(site)
    )


RULES: dict[str, Rule] = {
    "stablehlo.all_gather": all_gather,
    "stablehlo.all_reduce": all_reduce,
    "stablehlo.all_to_all": all_to_all,
    "stablehlo.collective_broadcast": collective_broadcast,
    "stablehlo.collective_permute": collective_permute,
    "stablehlo.partition_id": plain("partition-id"),
    "stablehlo.reduce_scatter": reduce_scatter,
    "stablehlo.replica_id": plain("replica-id"),
}
