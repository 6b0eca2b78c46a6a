"""Rules for data movement, gather and scatter whose sharded dims allow a local part on each device.

Movement is local where the sharded dims are unchanged.  Of a gather and a scatter each device reads, and adds
to, its own rows of the table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpmd.compile.hlo.attributes import GatherDims, ScatterDims
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.evaluator.values import identity_of, simple_opcode
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.literals import integer_range
from mpmd.compile.hlo.shape import Shape, array
from mpmd.compile.lowering.site import LoweringSite, Rule
from mpmd.compile.lowering.spmd.moves import begin, own_part, own_place, parts
from mpmd.compile.lowering.stablehlo_program import Axis, Sharding, Spread

Made = HloInstruction | Sequence[HloInstruction]


def _spread(site: LoweringSite) -> Spread:
    spread = site.operation.spread
    assert spread is not None
    return spread


def with_attributes(site: LoweringSite, **attributes: Any) -> LoweringSite:
    operation = dataclasses.replace(site.operation, attributes={**site.operation.attributes, **attributes})
    return LoweringSite(site.lowering, site.build, operation, site.operands, site.values)


def constant(site: LoweringSite, plain: Rule) -> Made | None:
    """A repeated value is the same everywhere; of other constants each device keeps its part."""
    value, (sharding,) = site.required("value"), _spread(site).results
    if value.size > 1 and any(value.strides):
        return own_part(site.build, site.build.constant(value), sharding)
    return site.build.broadcast(site.build.constant(value.reshape(-1)[0]), site.shape.dims)


def iota(site: LoweringSite, plain: Rule) -> Made | None:
    """Counting begins where the device's part does, in integers: floats are rounded once."""
    dim, (sharding,) = site.required("iota_dimension"), _spread(site).results
    if not sharding[dim]:
        return plain(site)
    build, shape = site.build, site.shape
    dtype = shape.dtype if shape.info.is_integral else "s32"
    first = build.convert(begin(build, sharding[dim], shape.dims[dim]), dtype)
    counted = build.iota(dtype, shape.dims, dim)
    return build.convert(build.add("add", counted, build.broadcast(first, shape.dims)), shape.dtype)


def broadcast(site: LoweringSite, plain: Rule) -> Made | None:
    """Dims of the operand are sharded as the corresponding dims of the result; dims of size 1 are whole."""
    (sharding,), (result,) = _spread(site).operands, _spread(site).results
    dims, sizes = site.required("broadcast_dimensions"), _spread(site).shapes[0].dims
    whole = _spread(site).whole.shapes[0].dims
    fits = all(
        c == result[d] if sizes[i] == whole[d] else not c for i, (c, d) in enumerate(zip(sharding, dims))
    )
    return plain(site) if fits else None


def transpose(site: LoweringSite, plain: Rule) -> Made | None:
    (sharding,), (result,) = _spread(site).operands, _spread(site).results
    return plain(site) if tuple(sharding[d] for d in site.required("permutation")) == result else None


def reshape(site: LoweringSite, plain: Rule) -> Made | None:
    """Each axis must shard the same elements before and after."""
    spread = _spread(site)
    before = _places(spread.shapes[0], spread.operands[0])
    return plain(site) if before == _places(spread.whole.shapes[0], spread.results[0]) else None


def _places(shape: Shape, sharding: Sharding) -> dict[Axis, int]:
    """For each axis, the number of contiguous runs into which it and all dims before it divide the array."""
    places = {}
    for dim, axes in enumerate(sharding):
        runs = math.prod(shape.dims[:dim])
        for axis in axes:
            runs *= axis.size
            places[axis] = runs
    return places


def bitcast_convert(site: LoweringSite, plain: Rule) -> Made | None:
    """Elements of the same width keep their positions; otherwise the last dim changes and must be whole."""
    (sharding,), (result,) = _spread(site).operands, _spread(site).results
    rank = min(len(sharding), len(result))
    return (
        plain(site)
        if sharding[:rank] == result[:rank] and not any((*sharding[rank:], *result[rank:]))
        else None
    )


def concatenate(site: LoweringSite, plain: Rule) -> Made | None:
    """The concatenated dim must be whole."""
    spread = _spread(site)
    alike = len({*spread.operands, *spread.results}) == 1
    return plain(site) if alike and not spread.results[0][site.required("dimension")] else None


def reverse(site: LoweringSite, plain: Rule) -> Made | None:
    """Reversed dims must be whole."""
    (sharding,), (result,) = _spread(site).operands, _spread(site).results
    return (
        plain(site)
        if sharding == result and not any(sharding[d] for d in site.required("dimensions"))
        else None
    )


def pad(site: LoweringSite, plain: Rule) -> Made | None:
    """Padded dims must be whole."""
    spread = _spread(site)
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    changed = [any(side) for side in zip(*(site.required(name) for name in names))]
    sharding = spread.operands[0]
    fits = sharding == spread.results[0] and not any(c and ch for c, ch in zip(sharding, changed))
    return plain(site) if fits else None


def slice_locally(site: LoweringSite, plain: Rule) -> Made | None:
    """Dims that are sliced must be whole."""
    spread, (result,) = _spread(site), _spread(site).results
    sizes, local = spread.shapes[0].dims, site.operands[0].shape.dims
    starts, limits, strides = (list(site.required(n)) for n in ("start_indices", "limit_indices", "strides"))
    if spread.operands[0] != result:
        return None
    for d, axes in enumerate(result):
        if axes:
            if (starts[d], limits[d], strides[d]) != (0, sizes[d], 1):
                return None
            limits[d] = local[d]
    return plain(with_attributes(site, limit_indices=tuple(limits)))


def dynamic_slice(site: LoweringSite, plain: Rule) -> Made | None:
    """Dims that are sliced must be whole."""
    spread = _spread(site)
    sizes = list(site.required("slice_sizes"))
    sharding = spread.operands[0]
    if sharding != spread.results[0]:
        return None
    for d, axes in enumerate(sharding):
        if axes:
            if sizes[d] != spread.shapes[0].dims[d]:
                return None
            sizes[d] = site.operands[0].shape.dims[d]
    return plain(with_attributes(site, slice_sizes=tuple(sizes)))


def dynamic_update_slice(site: LoweringSite, plain: Rule) -> Made | None:
    """Dims that are updated in part must be whole."""
    spread = _spread(site)
    value, update = spread.operands[:2]
    if not value == update == spread.results[0]:
        return None
    sizes = zip(value, spread.shapes[0].dims, spread.shapes[1].dims)
    return None if any(axes and n != m for axes, n, m in sizes) else plain(site)


@dataclass(frozen=True)
class _Indexed:
    """A gather or a scatter, in common terms.

    Attributes:
        table: whole sizes of the array that is indexed.
        sharding: of the table.
        sizes: whole sizes of a window.
        mapped: dims of the table that the elements of an index address.
        batching: dims of the table that are paired with dims of the indices.
        index_batching: those dims of the indices.
        vector_dim: the dim of the indices that holds an index vector.
        index_sharding: of the indices.
        window_dims: dims of the windows' array that correspond to dims of the table.
        window_sharding: of the windows' array.
    """

    table: tuple[int, ...]
    sharding: Sharding
    sizes: tuple[int, ...]
    mapped: tuple[int, ...]
    batching: tuple[int, ...]
    index_batching: tuple[int, ...]
    vector_dim: int
    index_sharding: Sharding
    window_dims: dict[int, int]
    window_sharding: Sharding

    @property
    def scattered(self) -> list[int]:
        """Sharded dims of the table of which an index selects one element."""
        chosen = [d for d in self.mapped if self.sharding[d]]
        return [d for d in chosen if d not in self.window_dims.values()]

    @property
    def index_dims(self) -> list[int]:
        return [d for d in range(len(self.index_sharding)) if d != self.vector_dim]

    def fits(self) -> bool:
        """Whether devices can work on their own parts."""
        of_windows = {d: self.window_sharding[w] for w, d in self.window_dims.items()}
        for d, axes in enumerate(self.sharding):
            if d in of_windows:
                if of_windows[d] != axes or (axes and self.sizes[d] != self.table[d]):
                    return False
            elif d in self.batching:
                if self.index_sharding[self.index_batching[self.batching.index(d)]] != axes:
                    return False
            elif axes and d not in self.mapped:
                return False
        if self.vector_dim < len(self.index_sharding) and self.index_sharding[self.vector_dim]:
            return False
        counted = [c for w, c in enumerate(self.window_sharding) if w not in self.window_dims]
        return counted == [self.index_sharding[d] for d in self.index_dims]

    def local_sizes(self) -> tuple[int, ...]:
        of_windows = self.window_dims.values()
        return tuple(
            n // parts(axes) if d in of_windows else n
            for d, (n, axes) in enumerate(zip(self.sizes, self.sharding))
        )


def gather(site: LoweringSite, plain: Rule) -> Made | None:
    """Rows of other devices are read as what adds nothing; the sum over the devices is the result."""
    spread = site.operation.spread
    assert spread is not None
    dims: GatherDims = site.required("dimension_numbers")
    sizes = tuple(site.required("slice_sizes"))
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    kept = [d for d in range(len(sizes)) if d not in gone]
    indexed = _Indexed(
        spread.shapes[0].dims,
        spread.operands[0],
        sizes,
        dims.start_index_map,
        dims.operand_batching_dims,
        dims.start_indices_batching_dims,
        dims.index_vector_dim,
        spread.operands[1],
        dict(zip(dims.offset_dims, kept)),
        spread.results[0],
    )
    if not indexed.fits():
        return None
    local = with_attributes(site, slice_sizes=indexed.local_sizes())
    if not indexed.scattered:
        return plain(local)
    build = site.build
    table, indices = site.operands
    starts, inside = _own_indices(build, indexed, indices, clamp=True)
    gathered = plain(LoweringSite(site.lowering, build, local.operation, [table, starts], site.values))
    assert isinstance(gathered, HloInstruction)
    counted = [w for w in range(gathered.shape.rank) if w not in indexed.window_dims]
    mask = build.broadcast(inside, gathered.shape.dims, counted)
    opcode = "or" if gathered.shape.dtype == "pred" else "add"
    site.lowering.partial[site.operation.results[0]] = opcode
    nothing = build.full(_neutral(opcode, gathered), gathered.shape.dtype, gathered.shape.dims)
    return build.select(mask, gathered, nothing)


def scatter(site: LoweringSite, plain: Rule) -> Made | None:
    """Rows outside of the own part are dropped; sharded updates leave partial sums."""
    spread = site.operation.spread
    assert spread is not None
    if len(site.operands) != 3:
        return None
    dims: ScatterDims = site.required("scatter_dimension_numbers")
    table, updates = spread.shapes[0].dims, spread.shapes[2].dims
    gone = (*dims.inserted_window_dims, *dims.input_batching_dims)
    kept = [d for d in range(len(table)) if d not in gone]
    windows = dict(zip(dims.update_window_dims, kept))
    sizes = [1] * len(table)
    for w, d in windows.items():
        sizes[d] = updates[w]
    indexed = _Indexed(
        table,
        spread.operands[0],
        tuple(sizes),
        dims.scatter_dims_to_operand_dims,
        dims.input_batching_dims,
        dims.scatter_indices_batching_dims,
        dims.index_vector_dim,
        spread.operands[1],
        windows,
        spread.operands[2],
    )
    if not indexed.fits() or spread.results[0] != spread.operands[0]:
        return None
    value, indices, given = site.operands
    batched = dims.scatter_indices_batching_dims
    summed = [axis for d in indexed.index_dims if d not in batched for axis in indexed.index_sharding[d]]
    if summed:
        opcode = simple_opcode(site.region())
        if opcode is None or opcode == "xor":
            return None
        value = _once(site.build, value, opcode, summed)
        site.lowering.partial[site.operation.results[0]] = opcode
    if indexed.scattered:
        indices, _ = _own_indices(site.build, indexed, indices, clamp=False)
    return plain(
        LoweringSite(site.lowering, site.build, site.operation, [value, indices, given], site.values)
    )


def _once(build: HloBuilder, value: HloInstruction, opcode: str, axes: Sequence[Axis]) -> HloInstruction:
    """A value that counts once: the first device has it, the others the identity of the reduction."""
    if opcode not in ("add", "multiply"):
        return value
    neutral = _neutral(opcode, value)
    if _is_all(value, neutral):
        return value
    first = build.compare(own_place(build, axes), build.constant(0, "s32"), "EQ")
    nothing = build.full(neutral, value.shape.dtype, value.shape.dims)
    return build.select(build.broadcast(first, value.shape.dims), value, nothing)


def _neutral(opcode: str, value: HloInstruction) -> float:
    """What a reduction joins with an element without a change: -0 + -0 is -0, 0 + -0 is 0."""
    if opcode == "add" and value.shape.info.kind == "float":
        return -0.0
    return identity_of(opcode, value.shape.dtype)


def _is_all(value: HloInstruction, number: float) -> bool:
    while value.opcode == "broadcast":
        value = value.operands[0]
    literal = value.literal if value.opcode == "constant" else None
    return literal is not None and not isinstance(literal, tuple) and bool((literal == number).all())


def _own_indices(
    build: HloBuilder, indexed: _Indexed, indices: HloInstruction, *, clamp: bool
) -> tuple[HloInstruction, HloInstruction]:
    """Indices relative to the beginning of the device's part, and whether they are inside of it.

    Args:
        build: the builder.
        indexed: the gather or scatter.
        indices: of rows of the whole table.
        clamp: whether an index outside of the whole table means its nearest row, as in a gather.
    """
    indices = _signed(build, indices)
    dtype, shape = indices.shape.dtype, indices.shape.dims
    has_vector = indexed.vector_dim < len(shape)
    low, last, count = [], [], []
    for d in indexed.mapped:
        sharding = indexed.sharding[d] if d in indexed.scattered else ()
        part = indexed.table[d] // parts(sharding)
        low.append(
            build.convert(begin(build, sharding, part), dtype) if sharding else build.constant(0, dtype)
        )
        last.append(build.constant(indexed.table[d] - indexed.sizes[d], dtype))
        count.append(build.constant(part - indexed.sizes[d], dtype))

    def spread_out(values: Sequence[HloInstruction]) -> HloInstruction:
        if not has_vector:
            return build.broadcast(values[0], shape)
        vector = build.concatenate([build.reshape(v, (1,)) for v in values], 0)
        return build.broadcast(vector, shape, (indexed.vector_dim,))

    zero = build.full(0, dtype, shape)
    if clamp:
        indices = build.add("clamp", zero, indices, spread_out(last))
    own = build.add("subtract", indices, spread_out(low))
    inside = build.add("and", build.compare(own, zero, "GE"), build.compare(own, spread_out(count), "LE"))
    if has_vector:
        both = HloBuilder.create(build.computation.module, "and_pred")
        scalar = array("pred", ())
        both.build(both.add("and", both.parameter(scalar), both.parameter(scalar)))
        true = build.constant(True, "pred")
        inside = build.reduce([inside], [true], (indexed.vector_dim,), both.computation)
    return own, inside


def _signed(build: HloBuilder, indices: HloInstruction) -> HloInstruction:
    """The indices as s32 or s64; those that are too large for it stay outside of every table."""
    dtype = "s64" if indices.shape.info.bits > 32 else "s32"
    if indices.shape.dtype == f"u{dtype[1:]}":
        largest = integer_range(dtype)[1]
        indices = build.add("minimum", indices, build.full(largest, indices.shape.dtype, indices.shape.dims))
    return build.convert(indices, dtype)


LOCAL: dict[str, Callable[[LoweringSite, Rule], Made | None]] = {
    "sdy.constant": constant,
    "stablehlo.bitcast_convert": bitcast_convert,
    "stablehlo.broadcast_in_dim": broadcast,
    "stablehlo.concatenate": concatenate,
    "stablehlo.constant": constant,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.iota": iota,
    "stablehlo.pad": pad,
    "stablehlo.reshape": reshape,
    "stablehlo.reverse": reverse,
    "stablehlo.slice": slice_locally,
    "stablehlo.transpose": transpose,
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
}
