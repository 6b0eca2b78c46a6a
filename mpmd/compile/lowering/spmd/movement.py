"""Local parts of data movement: local where sharded dims are unchanged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.program import Axis, Sharding, Spread
from mpmd.compile.lowering.site import LoweringSite, Rule
from mpmd.compile.lowering.spmd.moves import begin, own_part

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
    found = {}
    for dim, axes in enumerate(sharding):
        runs = math.prod(shape.dims[:dim])
        for axis in axes:
            runs *= axis.size
            found[axis] = runs
    return found


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
}
