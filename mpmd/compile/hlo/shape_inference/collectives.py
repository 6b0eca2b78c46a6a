"""Shapes of collectives, per device."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import ReplicaGroups
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.hlo.shape_inference.rule import Query, Rule, check, check_dims, check_reducer, logical


def _one_or_tuple(shapes: Sequence[Shape]) -> Shape:
    return shapes[0] if len(shapes) == 1 else tuple_of(shapes)


def _group_size(query: Query) -> int | None:
    """The number of devices in a group, if it is known; with empty groups it is unknown here."""
    groups: ReplicaGroups = query.attribute("replica_groups") or ReplicaGroups()
    if groups.iota is not None:
        return groups.iota[1]
    listed = groups.explicit or groups.mesh_groups
    if not listed:
        return None
    sizes = {len(g) for g in listed}
    check(len(sizes) == 1, f"groups of {query.opcode} must have equal sizes, got {groups}")
    return sizes.pop()


def _stated_size(query: Query) -> int | None:
    """The number of devices in a group, where the listed ids are devices or the module cannot add others.

    A group of one device is listed where the counts of replicas and partitions are not known yet.
    """
    size = _group_size(query)
    joined = query.attribute("channel_id") is not None and not query.attribute("use_global_device_ids", False)
    return None if joined or size == 1 else size


def _dim(query: Query, shape: Shape) -> int:
    dims = query.attribute("dimensions")
    check(len(dims) == 1, f"{query.opcode} takes one dim, got {dims}")
    check_dims(query, "dimensions", dims, shape.rank)
    return int(dims[0])


def all_reduce(query: Query) -> Shape:
    for operand in query.operands:
        check_reducer(query, query.called[0], [operand])
    return _one_or_tuple(query.operands)


def _scaled(query: Query, shape: Shape, claim: Shape, grow: bool) -> Shape:
    """`shape` with its gathered (or scattered) dim times (or over) the group's size."""
    dim, size = _dim(query, shape), _stated_size(query)
    check(size != 0, f"groups of {query.opcode} must have devices")
    check(
        claim.is_array and claim.rank == shape.rank, f"{query.opcode} of {shape} must keep its rank: {claim}"
    )
    if size is None:
        large, small = (claim.dims[dim], shape.dims[dim]) if grow else (shape.dims[dim], claim.dims[dim])
        size = large // small if small else 1
    old = shape.dims[dim]
    check(grow or old % size == 0, f"dim {dim} of {shape} does not split over {size} devices")
    new = old * size if grow else old // size
    return logical(shape.dtype, (*shape.dims[:dim], new, *shape.dims[dim + 1 :]))


def _claims(query: Query) -> tuple[Shape, ...]:
    if query.stated is None and _stated_size(query) is not None:
        return query.operands
    claim = query.claim()
    parts = claim.elements if claim.is_tuple else (claim,)
    check(
        len(parts) == len(query.operands),
        f"{query.opcode} must give {len(query.operands)} values, got {claim}",
    )
    return parts


def all_gather(query: Query) -> Shape:
    return _one_or_tuple([_scaled(query, s, c, True) for s, c in zip(query.operands, _claims(query))])


def reduce_scatter(query: Query) -> Shape:
    return _one_or_tuple([_scaled(query, s, c, False) for s, c in zip(query.operands, _claims(query))])


def all_to_all(query: Query) -> Shape:
    """The operands' shapes: a tuple of parts, or one array whose dim is exchanged."""
    if query.attribute("dimensions"):
        dim, size = _dim(query, query.array(0)), _group_size(query)
        check(
            size is None or (size > 0 and query.operands[0].dims[dim] % size == 0),
            f"dim {dim} of {query.operands[0]} does not split over {size} devices",
        )
        return _one_or_tuple(query.operands)
    return tuple_of(query.operands)


def same(query: Query) -> Shape:
    return _one_or_tuple(query.operands)


def permute(query: Query) -> Shape:
    """The operands' shapes; with slices in place (input, output, starts in both) the output's."""
    if query.attribute("slice_sizes") is None:
        return _one_or_tuple(query.operands)
    check(
        len(query.operands) == 4,
        f"{query.opcode} with slice_sizes takes input, output and the starts in both, got "
        f"{len(query.operands)} operands",
    )
    return query.operands[1]


def stated(query: Query) -> Shape:
    return query.claim()


RULES: dict[str, Rule] = {
    "all-reduce": all_reduce,
    "all-reduce-start": all_reduce,
    "all-reduce-done": lambda query: query.operands[0],
    "all-gather": all_gather,
    "all-gather-start": stated,
    "all-gather-done": lambda query: query.operands[0].subshape((1,)),
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "ragged-all-to-all": stated,
    "collective-broadcast": same,
    "collective-permute": permute,
    "collective-permute-start": stated,
    "collective-permute-done": lambda query: query.operands[0].subshape((1,)),
}
