"""Dims of extent 1 removed: the dims of an array are then those that kernels iterate over."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.hlo.attributes import DotDims
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule


class UnitDimRemoval(ComputationPass):
    """Computes without dims of extent 1, which reshapes add and remove.

    y: f32[1,8,1,4] = exp(x)  ->  y = reshape(exp(reshape(x: f32[8,4])))

    Elementwise work, broadcasts, transposes, reductions and products lose such dims; a product keeps one if
    a side has no other, or if nothing else is summed.  What groups of queries and leading dims of one hide,
    such as the matrices of attention, then has one shape, and neighbouring reshapes cancel.

    Requires: no schedule.
    Ensures: no such instruction has a dim of extent 1 that it needs not.
    Cost: linear.
    Source: XLA removes such dims of products and of reductions for GPUs.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules: dict[str, tuple[Rule, ...]] = dict.fromkeys(_ELEMENTWISE, (_elementwise,))
        others = {"broadcast": _broadcast, "transpose": _transpose, "reduce": _reduce, "dot": _dot}
        rules |= {opcode: (rule,) for opcode, rule in others.items()}
        return Rewriter(computation).run(rules, lambda i: not i.has_control_edges)


_ELEMENTWISE = sorted(o for o, known in OPCODES.items() if known.category in ELEMENTWISE and o != "map")


def _kept(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(d for d, extent in enumerate(dims) if extent != 1)


def _without(site: RewriteSite, value: HloInstruction) -> HloInstruction:
    return site.build.reshape(value, [extent for extent in value.shape.dims if extent != 1])


def _has_unit(value: HloInstruction) -> bool:
    return value.shape.is_array and 1 in value.shape.dims


def _elementwise(site: RewriteSite) -> HloInstruction | None:
    dims = site.shape.dims
    if not _has_unit(site.at) or any(o.shape.dims not in (dims, ()) for o in site.operands):
        return None  # a bitcast-convert to narrower elements has one dim more
    narrow = array(site.shape.dtype, [extent for extent in dims if extent != 1])
    operands = [_without(site, o) if o.shape.dims == dims else o for o in site.operands]
    return site.build.reshape(site.same(*operands, shape=narrow), dims)


def _broadcast(site: RewriteSite) -> HloInstruction | None:
    (operand,) = site.operands
    if not _has_unit(site.at):
        return None
    places = {d: k for k, d in enumerate(_kept(site.shape.dims))}
    dims = tuple(places[site.at.dimensions[d]] for d in _kept(operand.shape.dims))
    narrow = array(site.shape.dtype, [site.shape.dims[d] for d in places])
    stretched = site.same(_without(site, operand), shape=narrow, dimensions=dims)
    return site.build.reshape(stretched, site.shape.dims)


def _transpose(site: RewriteSite) -> HloInstruction | None:
    (operand,) = site.operands
    if not _has_unit(site.at):
        return None
    places = {d: k for k, d in enumerate(_kept(operand.shape.dims))}
    order = tuple(places[d] for d in site.at.dimensions if d in places)
    transposed = site.build.transpose(_without(site, operand), order)
    return site.build.reshape(transposed, site.shape.dims)


def _reduce(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 2 or not _has_unit(site.operands[0]):
        return None
    operand, start = site.operands
    places = {d: k for k, d in enumerate(_kept(operand.shape.dims))}
    if any(d not in places for d in site.at.dimensions):
        return None  # of one element: the simplifier's
    dims = tuple(places[d] for d in site.at.dimensions)
    narrow = array(site.shape.dtype, [extent for extent in site.shape.dims if extent != 1])
    reduced = site.same(_without(site, operand), start, shape=narrow, dimensions=dims)
    return site.build.reshape(reduced, site.shape.dims)


def _dot(site: RewriteSite) -> HloInstruction | None:
    if len(site.operands) != 2:
        return None
    (a, b), dims = site.operands, site.at.dot_dims
    batches = [(x, y) for x, y in zip(dims.lhs_batch, dims.rhs_batch) if a.shape.dims[x] != 1]
    free_a = _needed(a, dims.lhs_free(a.shape.rank))
    free_b = _needed(b, dims.rhs_free(b.shape.rank))
    pairs = list(zip(dims.lhs_contracting, dims.rhs_contracting))
    sums = [(x, y) for x, y in pairs if a.shape.dims[x] != 1] or pairs[-1:]
    left = sorted((*(x for x, _ in (*batches, *sums)), *free_a))
    right = sorted((*(y for _, y in (*batches, *sums)), *free_b))
    if len(left) == a.shape.rank and len(right) == b.shape.rank:
        return None
    narrow = DotDims(
        tuple(left.index(x) for x, _ in sums),
        tuple(right.index(y) for _, y in sums),
        tuple(left.index(x) for x, _ in batches),
        tuple(right.index(y) for _, y in batches),
    )
    kept = [a.shape.dims[d] for d in (*(x for x, _ in batches), *free_a)] + [b.shape.dims[d] for d in free_b]
    factors = [site.build.reshape(x, [x.shape.dims[d] for d in only]) for x, only in ((a, left), (b, right))]
    product = site.same(*factors, shape=array(site.shape.dtype, kept), dot_dims=narrow)
    return site.build.reshape(product, site.shape.dims)


def _needed(side: HloInstruction, free: Sequence[int]) -> tuple[int, ...]:
    """The free dims of a side that are not 1; the last one if all are."""
    longer = tuple(d for d in free if side.shape.dims[d] != 1)
    return longer or tuple(free[-1:])
