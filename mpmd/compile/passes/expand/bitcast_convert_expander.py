"""hlo-bitcast-convert-expander."""

from __future__ import annotations

from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, TrackingBuilder


class BitcastConvertExpander(ComputationPass):
    """Joins and splits the bits of elements by shifts, where their width changes.

    bitcast-convert(x: u32[4,2]) to u64[4]  ->  convert(x[:,0]) | convert(x[:,1]) << 32

    A bitcast to another type becomes a bitcast-convert of the elements in their order.

    Requires: no schedule; arrays are row-major.
    Ensures: each bitcast-convert keeps the width of its elements.
    Cost: linear.
    Source: the least significant part comes first, as XLA has it.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation."""
        rules = {"bitcast-convert": (_expand,), "bitcast": (_convert_elements,)}
        return Rewriter(computation).run(rules, lambda i: not i.shape.dynamic)


def _convert_elements(site: RewriteSite) -> HloInstruction | None:
    """bitcast(x: f32[4]) to u16[2,4] → reshape(bitcast-convert(x) to u16[4,2])."""
    (x,), shape, build = site.operands, site.shape, site.build
    if not (x.shape.is_array and shape.is_array) or x.shape.dtype == shape.dtype:
        return None
    old, new = x.shape.info.bits, shape.info.bits
    if "pred" in (x.shape.dtype, shape.dtype) and old != new:
        return None
    dims = x.shape.dims if new == old else (*x.shape.dims, old // new)
    if new > old:
        x, dims = build.reshape(x, (shape.size, new // old)), (shape.size,)
    made = build.add("bitcast-convert", x, shape=array(shape.dtype, dims))
    return made if dims == shape.dims else build.reshape(made, shape.dims)


def _expand(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    old, new = x.shape.info, site.shape.info
    if old.bits == new.bits or "complex" in (old.kind, new.kind):
        return None
    if "pred" in (old.kind, new.kind):
        return None
    build = site.build
    plain = _bits(build, x, f"u{old.bits}")
    made = _joined(build, plain, new.bits) if old.bits < new.bits else _split(build, plain, new.bits)
    return _bits(build, made, site.shape.dtype)


def _bits(build: TrackingBuilder, value: HloInstruction, dtype: str) -> HloInstruction:
    """The same bits as elements of another type of that width."""
    if value.shape.dtype == dtype:
        return value
    return build.add("bitcast-convert", value, shape=value.shape.with_dtype(dtype))


def _joined(build: TrackingBuilder, value: HloInstruction, width: int) -> HloInstruction:
    """Elements of `width` bits from those along the last dim."""
    narrow, dims = value.shape.info.bits, value.shape.dims
    wide = build.convert(value, f"u{width}")
    total: HloInstruction | None = None
    for i in range(width // narrow):
        starts, limits = (0,) * (len(dims) - 1), dims[:-1]
        part = build.reshape(build.slice(wide, (*starts, i), (*limits, i + 1)), dims[:-1])
        if i:
            part = build.add("shift-left", part, build.full(i * narrow, f"u{width}", dims[:-1]))
        total = part if total is None else build.add("or", total, part)
    assert total is not None
    return total


def _split(build: TrackingBuilder, value: HloInstruction, width: int) -> HloInstruction:
    """The parts of each element, `width` bits each, along a new last dim."""
    wide, dims = value.shape.info.bits, value.shape.dims
    parts = []
    for i in range(wide // width):
        by = build.full(i * width, value.shape.dtype, dims)
        part = build.add("shift-right-logical", value, by) if i else value
        parts.append(build.reshape(build.convert(part, f"u{width}"), (*dims, 1)))
    return build.concatenate(parts, len(dims))
