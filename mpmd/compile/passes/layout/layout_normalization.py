"""Programs without layouts: arrays whose order in memory is not row-major become transposed row-major ones.

Kernels and rules then read dims alone.  Parameters, results and library calls keep the order that they state;
broadcasts and reshapes take forms whose dims keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpmd.compile.hlo.attributes import SliceDims
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass, HloPass
from mpmd.compile.passes.layout.physical import is_bitcast, order_of, physical
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule, inverse


class BroadcastCanonicalizer(ComputationPass):
    """Canonicalises broadcasts to keep the order of dims.

    broadcast(x: [2,3]), dimensions={2,0}  ->  broadcast(transpose(x): [3,2]), dimensions={0,2}

    Requires: no schedule.
    Ensures: the dimensions of each broadcast ascend.
    Cost: linear.
    Source: XLA's broadcast canonicaliser: emitters then handle one order only.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"broadcast": (_sorted,)}, lambda i: not i.shape.dynamic)


def _sorted(site: RewriteSite) -> HloInstruction | None:
    dims = site.at.dimensions
    if list(dims) == sorted(dims):
        return None
    order = sorted(range(len(dims)), key=dims.__getitem__)
    value = site.build.transpose(site.operands[0], order)
    return site.build.broadcast(value, site.shape.dims, sorted(dims))


class ReshapeDecomposer(ComputationPass):
    """Replaces each reshape by a bitcast, and by a copy where data moves.

    reshape(x: f32[4,6]{0,1}): f32[24]{0}  ->  bitcast(copy(x): f32[4,6]{1,0}): f32[24]{0}

    Requires: layouts are assigned; no schedule.
    Ensures: no reshape is left; only those whose order in memory changes have copies.
    Cost: linear.
    Source: XLA's reshape decomposer.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reshape": (_decompose,)}, lambda i: not i.shape.dynamic)


def _decompose(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    source, target = x.shape.filled(), site.shape.filled()
    if is_bitcast(source, target):
        return site.build.add("bitcast", x, shape=target)
    plain, wanted = source.with_default_layout(), target.with_default_layout()
    if is_bitcast(source, wanted):
        return _copied(site, site.build.add("bitcast", x, shape=wanted), target)
    moved = _copied(site, x, plain)
    if is_bitcast(plain, target):
        return site.build.add("bitcast", moved, shape=target)
    return _copied(site, site.build.add("bitcast", moved, shape=wanted), target)


def _copied(site: RewriteSite, value: HloInstruction, shape: Shape) -> HloInstruction:
    return value if value.shape is shape else site.build.add("copy", value, shape=shape)


class LayoutRemoval(HloPass):
    """Describes all arrays row-major, for a backend whose kernels read and write any order.

    p = f32[4,6]{0,1} parameter(0); negate(p)
        ->  q = f32[6,4]{1,0} parameter(0); negate(transpose(q))

    Parameters and results of the program keep their layout in memory: their dims are those of memory, and a
    transpose separates them from the program.  Inside only bitcasts depend on the order; they become
    transposes around a reshape.  Later passes fuse these into the readers and writers of the arrays.

    Requires: no schedule; layouts of library calls are fixed.
    Ensures: every array but theirs is row-major or has no layout.
    Cost: linear.
    Source: the inverse of XLA's layout assignment.
    """

    def rewrite(self, module: HloModule) -> bool:
        parameters, result = module.entry_shapes()
        shapes = [i.shape for i in module.instructions() if not _is_of_library(i)]
        if not any(_is_strange(shape) for shape in (*parameters, result, *shapes)):
            return False
        for parameter, shape in zip(module.entry.parameters, parameters):
            parameter.shape = shape
        bitcasts = {
            i: (i.operands[0].shape.filled(), i.shape.filled())
            for i in module.instructions()
            if i.opcode == "bitcast"
        }
        for bitcast, (source, target) in bitcasts.items():
            _without_order(bitcast, source, target)
        for instruction in module.instructions():
            if not _is_of_library(instruction):
                instruction.shape = _row_major(instruction.shape)
        build = HloBuilder(module.entry)
        for parameter, shape in zip(module.entry.parameters, parameters):
            _relay_parameter(build, parameter, shape)
        root = _laid(build, module.entry.root, result)
        if root is not module.entry.root:
            module.entry.set_root(root)
        module.parameter_layouts = tuple(p.shape.filled() for p in module.entry.parameters)
        module.result_layout = module.entry.root.shape.filled()
        return True


def _is_of_library(instruction: HloInstruction) -> bool:
    """Whether the layout of a value is fixed by the library call that computes it."""
    while instruction.opcode == "get-tuple-element":
        instruction = instruction.operands[0]
    return instruction.opcode == "custom-call"


def _is_strange(shape: Shape) -> bool:
    return any(s.layout is not None and not s.layout.is_row_major for _, s in shape.leaves() if s.is_array)


def _row_major(shape: Shape) -> Shape:
    """The shape with every array row-major and unpacked; memory spaces stay."""
    if shape.is_tuple:
        return tuple_of([_row_major(e) for e in shape.elements])
    if not shape.is_array or shape.layout is None or shape.layout.is_row_major:
        return shape
    order = tuple(reversed(range(shape.rank)))
    return shape.with_layout(Layout(order, shape.layout.memory_space))


def _without_order(bitcast: HloInstruction, source: Shape, target: Shape) -> None:
    """Rewrite a bitcast from one shape to another as logical movement of elements."""
    (x,), computation = bitcast.operands, bitcast.parent
    if not (_is_strange(source) or _is_strange(target)):
        return
    build = HloBuilder(computation)
    build.metadata = bitcast.metadata
    lying = build.transpose(x, order_of(source))
    if source.dtype == target.dtype:
        lying = build.reshape(lying, physical(target).dims)
    else:  # rows of another type
        lying = build.add("bitcast", lying, shape=physical(target))
    computation.replace(bitcast, build.transpose(lying, inverse(order_of(target))))


def _relay_parameter(build: HloBuilder, parameter: HloInstruction, shape: Shape) -> None:
    """Give a parameter the dims of its memory, and its users the old dims."""
    if not _is_strange(shape):
        return
    users, was_root = list(parameter.users), parameter.is_root
    parameter.shape = physical(shape)
    seen = build.transpose(parameter, inverse(order_of(shape)))
    for user in users:
        for number in user.operand_indices(parameter):
            user.replace_operand(number, seen)
    if was_root:
        build.computation.set_root(seen)


def _laid(build: HloBuilder, value: HloInstruction, wanted: Shape) -> HloInstruction:
    if not _is_strange(wanted):
        return value
    if wanted.is_array:
        return build.transpose(value, order_of(wanted))
    parts = [
        value.operands[k]
        if value.opcode == "tuple"
        else build.add("get-tuple-element", value, shape=value.shape.elements[k], index=k)
        for k in range(len(wanted.elements))
    ]
    return build.tuple([_laid(build, part, shape) for part, shape in zip(parts, wanted.elements)])


class LayoutNormalization(ComputationPass):
    """Describes arrays by their dims in memory, row-major.

    add(x: f32[10,20,30]{2,0,1}, y)  ->  bitcast(add(bitcast(x): f32[20,10,30]{2,1,0}, bitcast(y)))

    A copy that changes the layout becomes a transpose; one that need not move anything, and a transpose that
    does not, a bitcast.  Products, indexed accesses, loops and calls keep their layouts: bitcasts separate
    them.

    Requires: layouts are assigned, reshapes are bitcasts; no schedule.
    Ensures: elementwise work, data movement and reductions have row-major results and operands.
    Cost: linear.
    Source: XLA's layout normalisation.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run(_RULES, lambda i: i.shape.is_array and not i.shape.dynamic)


def _is_plain(shape: Shape) -> bool:
    return shape.layout is None or shape.layout.is_row_major


def _normal(site: RewriteSite, value: HloInstruction) -> HloInstruction:
    if _is_plain(value.shape):
        return value
    shape = physical(value.shape)
    if value.opcode == "bitcast" and value.operands[0].shape is shape:
        return value.operands[0]
    return site.build.add("bitcast", value, shape=shape)


def _back(site: RewriteSite, value: HloInstruction) -> HloInstruction:
    """The replacement of a value by its dims in memory."""
    return value if value.shape is site.shape else site.build.add("bitcast", value, shape=site.shape)


def _needs(site: RewriteSite) -> bool:
    return not _is_plain(site.shape) or any(not _is_plain(o.shape) for o in site.operands)


def _place(site: RewriteSite) -> dict[int, int]:
    """Logical dim of the result → its position in memory."""
    return {d: i for i, d in enumerate(order_of(site.shape))}


def _elementwise(site: RewriteSite) -> HloInstruction | None:
    layouts = {o.shape.layout for o in site.operands if not o.shape.is_scalar} | {site.shape.layout}
    ranks = {o.shape.rank for o in site.operands if not o.shape.is_scalar}
    if not _needs(site) or len(layouts) != 1 or ranks - {site.shape.rank}:
        return None
    computed = site.same(*(_normal(site, o) for o in site.operands), shape=physical(site.shape))
    return _back(site, computed)


def _reordered(change: Callable[[RewriteSite, dict[int, int]], dict[str, Any]]) -> Rule:
    """A rule for movement whose operands have the result's layout: attributes follow the dims."""

    def rule(site: RewriteSite) -> HloInstruction | None:
        arrays = [o for o in site.operands if o.shape.rank == site.shape.rank]
        if _is_plain(site.shape) or any(o.shape.layout is not site.shape.layout for o in arrays):
            return None
        attributes = change(site, _place(site))
        operands = [_normal(site, o) for o in site.operands]
        starts = {"dynamic-slice": 1, "dynamic-update-slice": 2}.get(site.at.opcode)
        if starts is not None:
            operands[starts:] = [operands[starts + d] for d in order_of(site.shape)]
        return _back(site, site.same(*operands, shape=physical(site.shape), **attributes))

    return rule


def _dimensions(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    return {"dimensions": tuple(sorted(place[d] for d in site.at.dimensions))}


def _padding(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    return {"padding": tuple(site.at.padding[d] for d in order_of(site.shape))}


def _slice(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    dims, order = site.at.slice_dims, order_of(site.shape)
    parts = (tuple(values[d] for d in order) for values in (dims.starts, dims.limits, dims.strides))
    return {"slice": SliceDims(*parts)}


def _sizes(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    return {"slice_sizes": tuple(site.at.slice_sizes[d] for d in order_of(site.shape))}


def _nothing(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    return {}


def _iota(site: RewriteSite, place: dict[int, int]) -> dict[str, Any]:
    return {"iota_dimension": place[site.at.iota_dimension]}


def _constant(site: RewriteSite) -> HloInstruction | None:
    literal = site.at.literal
    if _is_plain(site.shape) or literal is None or isinstance(literal, tuple):
        return None
    return _back(site, site.build.constant(literal.transpose(order_of(site.shape))))


def _transpose(site: RewriteSite) -> HloInstruction | None:
    """A transpose by dims in memory; a bitcast where these do not move."""
    (x,) = site.operands
    order = site.at.dimensions
    if not _needs(site):
        return None
    places = {d: i for i, d in enumerate(order_of(x.shape))}
    moves = [places[order[d]] for d in order_of(site.shape)]
    return _back(site, site.build.transpose(_normal(site, x), moves))


def _copy(site: RewriteSite) -> HloInstruction | None:
    """A copy to another layout → transpose."""
    (x,) = site.operands
    if x.shape.layout is site.shape.layout or x.shape.layout is None:
        return None
    if is_bitcast(x.shape, site.shape):
        return site.build.add("bitcast", x, shape=site.shape)
    places = {d: i for i, d in enumerate(order_of(x.shape))}
    moves = [places[d] for d in order_of(site.shape)]
    return _back(site, site.build.transpose(_normal(site, x), moves))


def _broadcast(site: RewriteSite) -> HloInstruction | None:
    if not _needs(site):
        return None
    (x,) = site.operands
    place = _place(site)
    dims = [place[site.at.dimensions[d]] for d in order_of(x.shape)]
    value = _normal(site, x)
    if dims != sorted(dims):
        order = sorted(range(len(dims)), key=dims.__getitem__)
        value, dims = site.build.transpose(value, order), sorted(dims)
    return _back(site, site.build.broadcast(value, site.shape.physical_dims, dims))


def _reduce(site: RewriteSite) -> HloInstruction | None:
    """A reduction by dims in memory; its result is transposed if necessary."""
    if not _needs(site) or len(site.operands) != 2:
        return None
    x, init = site.operands
    order = order_of(x.shape)
    dims = tuple(i for i, d in enumerate(order) if d in site.at.dimensions)
    reduced = site.same(_normal(site, x), init, dimensions=dims)
    left = [d for d in range(x.shape.rank) if d not in site.at.dimensions]
    come = [left.index(d) for d in order if d in left]
    moves = [come.index(d) for d in order_of(site.shape)]
    return _back(site, site.build.transpose(reduced, moves))


_MOVES: dict[str, Rule] = {
    "concatenate": _reordered(_dimensions),
    "reverse": _reordered(_dimensions),
    "pad": _reordered(_padding),
    "slice": _reordered(_slice),
    "dynamic-slice": _reordered(_sizes),
    "dynamic-update-slice": _reordered(_nothing),
    "iota": _reordered(_iota),
    "constant": _constant,
    "transpose": _transpose,
    "copy": _copy,
    "broadcast": _broadcast,
    "reduce": _reduce,
}
_ELEMENTWISE = [
    name for name, info in OPCODES.items() if info.category in ELEMENTWISE and name not in ("copy", "map")
]
_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys(_ELEMENTWISE, (_elementwise,)),
    **{opcode: (rule,) for opcode, rule in _MOVES.items()},
}
