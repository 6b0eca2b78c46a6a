"""Rules for operations on sharded values that need more than the shapes of one device.

Shardy leaves every operation free of conflicts: operands and result are sharded alike, and where a sharded
dim is summed away, an `sdy.all_reduce` follows: each device holds a term of the sum, which the collective
joins.  A rule here lowers the operation if its local form is the local part of the whole one, or adds
communication, or declines.  Then `whole` is used: every device gathers the operands, does the whole operation
and keeps its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator.values import simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.lowering import operations
from mpmd.compile.lowering.site import LoweringSite, Rule
from mpmd.compile.lowering.spmd import local_parts
from mpmd.compile.lowering.spmd.moves import gathered, joined, local, own_part, resharded
from mpmd.compile.lowering.stablehlo_program import Operation, Sharding, Spread
from mpmd.errors import CompileError

COMPLETE = "complete"
"""Marks a value that is not a partial result, although an `sdy.all_reduce` follows it."""

_IDEMPOTENT = frozenset({"maximum", "minimum", "and", "or"})


def reduces_to(computation: HloComputation, init: HloInstruction) -> str | None:
    """The reduction that joins partial results; None if they cannot be joined.

    Every device begins with the initial value, so it must be an identity of the reduction.
    """
    opcode = simple_opcode(computation)
    if opcode is None or opcode in _IDEMPOTENT:
        return opcode
    if opcode == "xor":
        return None
    while init.opcode in ("broadcast", "reshape", "convert"):
        init = init.operands[0]
    literal = init.literal if init.opcode == "constant" else None
    if literal is None or isinstance(literal, tuple):
        return None
    neutral = 1 if opcode == "multiply" else 0
    return opcode if np.all(np.asarray(literal) == neutral) else None


Made = HloInstruction | Sequence[HloInstruction]

JOINS = frozenset({"sdy.all_reduce", "sdy.reduce_scatter"})

_EXCHANGES = frozenset(
    {
        "sdy.all_gather",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.propagation_barrier",
        "sdy.reshard",
        "sdy.sharding_constraint",
    }
)

_OF_ELEMENTS = operations.ELEMENTWISE.keys() - {"stablehlo.map", "stablehlo.bitcast_convert"}

_SHELLS = frozenset(operations.CONTROL) - {"stablehlo.optimization_barrier"}

_LOCAL_COLLECTIVES = frozenset(
    {
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_broadcast",
        "stablehlo.collective_permute",
        "stablehlo.partition_id",
        "stablehlo.reduce_scatter",
        "stablehlo.replica_id",
    }
)
"""Of a `shard_map`: their bodies are local already."""


def spread_rule(operation: Operation, plain: Rule | None) -> Rule | None:
    """The rule of an operation of a partitioned program.

    Args:
        operation: with `spread`.
        plain: the rule for one device, if there is one.
    """
    spread, name = operation.spread, operation.name
    assert spread is not None
    if name in _EXCHANGES:
        return reshard
    if name == "sdy.all_reduce":
        return all_reduce
    if name == "sdy.reduce_scatter":
        return reduce_scatter
    if plain is None or name in _SHELLS or name in _LOCAL_COLLECTIVES:
        return plain
    if not any(any(sharding) for sharding in (*spread.operands, *spread.results)):
        return plain
    of_part = of_elements if name in _OF_ELEMENTS else _LOCAL.get(name)

    def rule(site: LoweringSite) -> Made:
        lowered = of_part(site, plain) if of_part is not None else None
        return whole(site, plain) if lowered is None or _stays_partial(site) else lowered

    return rule


def _stays_partial(site: LoweringSite) -> bool:
    """Whether nothing joins the partial results: Shardy of jaxlib 0.12 leaves products of scatters so."""
    lowering = site.lowering
    partial = [n for n in site.operation.results if lowering.partial.get(n, COMPLETE) != COMPLETE]
    return any(number not in lowering.joined for number in partial)


LocalRule = Callable[[LoweringSite, Rule], Made | None]
"""The local part of an operation, given its rule for one device; None if there is no such part."""


def whole(site: LoweringSite, plain: Rule) -> Made:
    """All of the operation on every device, which then keeps its part."""
    spread = _spread(site)
    operands = []
    for value, sharding in zip(site.operands, spread.operands, strict=True):
        for dim, axes in enumerate(sharding):
            value = gathered(site.build, value, dim, axes, spread.devices)
        operands.append(value)
    lowered = plain(LoweringSite(site.lowering, site.build, spread.whole, operands, site.values))
    results = [lowered] if isinstance(lowered, HloInstruction) else list(lowered)
    for number in site.operation.results:
        site.lowering.partial[number] = COMPLETE
    return [
        own_part(site.build, value, sharding) for value, sharding in zip(results, spread.results, strict=True)
    ]


def of_elements(site: LoweringSite, plain: Rule) -> Made | None:
    """Each element by itself: operands are sharded as the results are."""
    spread = _spread(site)
    shardings: set[Sharding] = set(spread.results)
    shardings |= {sharding for sharding, shape in zip(spread.operands, spread.shapes) if shape.rank}
    return plain(site) if len(shardings) == 1 else None


def of_values(site: LoweringSite, plain: Rule) -> Made | None:
    """Each value by itself: a result is sharded as its operand is."""
    spread = _spread(site)
    return plain(site) if spread.operands == spread.results else None


# -- communication ----------------------------------------------------------------------------------------


def reshard(site: LoweringSite) -> Made:
    spread = _spread(site)
    (value,) = site.operands
    return resharded(site.build, value, spread.operands[0], spread.results[0], spread.devices)


def all_reduce(site: LoweringSite) -> Made:
    """Partial results of the devices along some axes combined, by their producer's reduction."""
    (value,), axes = site.operands, site.required("axes")
    opcode = site.lowering.partial.get(site.operation.operands[0])
    if opcode is None:
        raise site.error("it does not follow an operation with partial results")
    if opcode == COMPLETE or not axes:
        return value
    reducer = site.lowering.reducer(opcode, value.shape.dtype)
    return site.build.add("all-reduce", value, called=(reducer,), **joined(axes, _spread(site).devices))


def reduce_scatter(site: LoweringSite) -> Made:
    spread, reduced = _spread(site), all_reduce(site)
    assert isinstance(reduced, HloInstruction)
    return resharded(site.build, reduced, spread.operands[0], spread.results[0], spread.devices)


# -- products and reductions ------------------------------------------------------------------------------


def dot(site: LoweringSite, plain: Rule) -> Made | None:
    """Contracted dims are sharded alike: the local products are partial sums."""
    spread, dims = _spread(site), site.required("dot_dimension_numbers")
    a, b = spread.operands
    pairs = [*zip(dims.lhs_batch, dims.rhs_batch), *zip(dims.lhs_contracting, dims.rhs_contracting)]
    if any(a[i] != b[j] for i, j in pairs):
        return None
    expected = [a[i] for i in dims.lhs_batch]
    expected += [c for i, c in enumerate(a) if i not in (*dims.lhs_batch, *dims.lhs_contracting)]
    expected += [c for j, c in enumerate(b) if j not in (*dims.rhs_batch, *dims.rhs_contracting)]
    if tuple(expected) != spread.results[0]:
        return None
    if any(a[i] for i in dims.lhs_contracting):
        site.lowering.partial[site.operation.results[0]] = "add"
    return plain(site)


def reduce(site: LoweringSite, plain: Rule) -> Made | None:
    spread, dims = _spread(site), site.required("dimensions")
    count = len(spread.results)
    sharding = spread.operands[0]
    kept = tuple(axes for d, axes in enumerate(sharding) if d not in dims)
    if any(c != sharding for c in spread.operands[:count]) or any(r != kept for r in spread.results):
        return None
    if not any(sharding[d] for d in dims):
        return plain(site)
    opcode = reduces_to(site.region(), site.operands[count]) if count == 1 else None
    if opcode is None:
        return None
    site.lowering.partial[site.operation.results[0]] = opcode
    return plain(site)


def convolution(site: LoweringSite, plain: Rule) -> Made | None:
    """Batches of the input and features of the output may be sharded."""
    spread, dims = _spread(site), site.required("dimension_numbers")
    grouped = site.attribute("feature_group_count", 1) != 1 or site.attribute("batch_group_count", 1) != 1
    (given, kernel), (result,) = spread.operands, spread.results
    wanted: list[tuple[object, ...]] = [()] * len(result)
    wanted[dims.out_batch] = given[dims.lhs_batch]
    wanted[dims.out_feature] = kernel[dims.rhs_output_feature]
    others = [c for d, c in enumerate(given) if d != dims.lhs_batch]
    others += [c for d, c in enumerate(kernel) if d != dims.rhs_output_feature]
    if grouped or any(others) or tuple(wanted) != result:
        return None
    return plain(site)


def along_other_dims(attribute: Callable[[LoweringSite], Sequence[int]]) -> LocalRule:
    """A rule for operations that act along some dims, which must be whole, and on all others elementwise."""

    def rule(site: LoweringSite, plain: Rule) -> Made | None:
        spread, dims = _spread(site), attribute(site)
        shardings = {c for c, s in zip(spread.operands, spread.shapes) if s.rank}
        if len(shardings) != 1:
            return None
        (sharding,) = shardings
        if any(sharding[d] for d in dims):
            return None
        shapes = tuple(local(shape, sharding) for shape in spread.whole.shapes)
        operation = dataclasses.replace(site.operation, shapes=shapes)
        lowered = plain(LoweringSite(site.lowering, site.build, operation, site.operands, site.values))
        results = [lowered] if isinstance(lowered, HloInstruction) else lowered
        wanted = zip(results, spread.results, strict=True)
        return [resharded(site.build, value, sharding, target, spread.devices) for value, target in wanted]

    return rule


def _sorted_dim(site: LoweringSite) -> Sequence[int]:
    return (site.attribute("dimension", -1) % _spread(site).shapes[0].rank,)


def _window_dims(site: LoweringSite) -> Sequence[int]:
    sizes = site.attribute("window_dimensions")
    padding = site.attribute("padding")
    rank = len(sizes)
    names = ("window_strides", "base_dilations", "window_dilations")
    ones = [site.attribute(name) or (1,) * rank for name in names]
    none = [(0, 0)] * rank if padding is None else [tuple(map(int, row)) for row in padding]
    plain_dim = [
        sizes[d] == 1 and none[d] == (0, 0) and all(values[d] == 1 for values in ones) for d in range(rank)
    ]
    return [d for d in range(rank) if not plain_dim[d]]


def _spread(site: LoweringSite) -> Spread:
    spread = site.operation.spread
    if spread is None:
        raise CompileError(f"{site.name} has no global form")
    return spread


_LOCAL: dict[str, LocalRule] = {
    "stablehlo.convolution": convolution,
    "stablehlo.dot_general": dot,
    "stablehlo.optimization_barrier": of_values,
    "stablehlo.reduce": reduce,
    "stablehlo.reduce_window": along_other_dims(_window_dims),
    "stablehlo.sort": along_other_dims(_sorted_dim),
    **local_parts.LOCAL,
}
"""Operations whose local part is not simply that of its elements."""
