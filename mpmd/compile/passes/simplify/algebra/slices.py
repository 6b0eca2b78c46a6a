"""Rules of slice, pad and concatenate: full and empty ones, those of each other.

All are exact.
"""

from __future__ import annotations

from mpmd.compile.hlo.attributes import PadDim, SliceDims
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.rewriter import RewriteSite, Rule
from mpmd.compile.passes.values import is_trivial, literal_of, splat


def slice_nothing(site: RewriteSite) -> HloInstruction | None:
    """A slice of everything → its operand."""
    (x,) = site.operands
    dims = site.at.slice_dims
    whole = not any(dims.starts) and x.shape.logical is site.shape.logical
    return x if whole and all(s == 1 or n <= 1 for s, n in zip(dims.strides, x.shape.dims)) else None


def slice_twice(site: RewriteSite) -> HloInstruction | None:
    """slice(slice(x)) → slice(x)."""
    (inner,) = site.operands
    if inner.opcode != "slice":
        return None
    outer, first = site.at.slice_dims, inner.slice_dims
    starts, limits, strides = [], [], []
    for a, b, step, base, by in zip(outer.starts, outer.limits, outer.strides, first.starts, first.strides):
        count = max(0, -(-(b - a) // step))
        start = base + a * by
        starts.append(start)
        limits.append(start + (count - 1) * step * by + 1 if count else start)
        strides.append(step * by)
    return site.build.slice(inner.operands[0], starts, limits, strides)


def slice_of_concatenate(site: RewriteSite) -> HloInstruction | None:
    """slice(concatenate(x, y, z)) → slice(concatenate(y)), of the parts that are touched."""
    (inner,) = site.operands
    if inner.opcode != "concatenate" or is_trivial(site.at):
        return None
    (dim,) = inner.dimensions
    dims = site.at.slice_dims
    begin, end = dims.starts[dim], dims.limits[dim]
    touched: list[HloInstruction] = []
    offset = first = 0
    for part in inner.operands:
        size = part.shape.dims[dim]
        if offset < end and offset + size > begin:
            if not touched:
                first = offset
            touched.append(part)
        offset += size
    if len(touched) == len(inner.operands):
        return None
    x = site.build.concatenate(touched, dim)
    starts = [a - first if d == dim else a for d, a in enumerate(dims.starts)]
    limits = [b - first if d == dim else b for d, b in enumerate(dims.limits)]
    return site.build.slice(x, starts, limits, dims.strides)


def slice_of_pad(site: RewriteSite) -> HloInstruction | None:
    """slice(pad(x)) → slice(x), where nothing of the padding is taken; only padding → broadcast."""
    (inner,) = site.operands
    if inner.opcode != "pad" or any(p.interior for p in inner.padding) or is_trivial(site.at):
        return None
    x, filler = inner.operands
    dims = site.at.slice_dims
    starts = [a - p.low for a, p in zip(dims.starts, inner.padding)]
    limits = [b - p.low for b, p in zip(dims.limits, inner.padding)]
    if all(a >= 0 and b <= n for a, b, n in zip(starts, limits, x.shape.dims)):
        return site.build.slice(x, starts, limits, dims.strides)
    if any(b <= 0 or a >= n for a, b, n in zip(starts, limits, x.shape.dims)):
        return site.build.broadcast(filler, site.shape.dims)
    return None


def slice_of_broadcast(site: RewriteSite) -> HloInstruction | None:
    """slice(broadcast(x)) → broadcast(slice(x))."""
    (inner,) = site.operands
    if inner.opcode != "broadcast":
        return None
    (x,) = inner.operands
    dims = site.at.slice_dims
    part = SliceDims(
        tuple(dims.starts[d] for d in inner.dimensions),
        tuple(dims.limits[d] for d in inner.dimensions),
        tuple(dims.strides[d] for d in inner.dimensions),
    )
    if part.starts and (part.sizes != x.shape.dims or any(part.starts)):
        x = site.build.slice(x, part.starts, part.limits, part.strides)
    return site.build.broadcast(x, site.shape.dims, inner.dimensions)


def slice_of_iota(site: RewriteSite) -> HloInstruction | None:
    """slice(iota) → iota, where it begins at 0 and leaves nothing out."""
    (inner,) = site.operands
    if inner.opcode != "iota":
        return None
    dim, dims = inner.iota_dimension, site.at.slice_dims
    if dims.starts[dim] or (dims.strides[dim] != 1 and dims.sizes[dim] > 1):
        return None
    return site.build.iota(site.shape.dtype, site.shape.dims, dim)


def pad_nothing(site: RewriteSite) -> HloInstruction | None:
    """A pad by nothing → its operand."""
    x = site.operands[0]
    plain = all(
        p.low == p.high == 0 and (not p.interior or n <= 1) for p, n in zip(site.at.padding, x.shape.dims)
    )
    return x if plain else None


def pad_of_nothing(site: RewriteSite) -> HloInstruction | None:
    """A pad of an empty array, or of copies of the padding → broadcast."""
    x, filler = site.operands
    if is_trivial(x) or (x.opcode == "broadcast" and x.operands[0] is filler):
        return site.build.broadcast(filler, site.shape.dims)
    same = splat(x)
    value = splat(filler)
    if same is None or value is None or same.tobytes() != value.tobytes():
        return None
    return site.build.broadcast(filler, site.shape.dims)


def pad_twice(site: RewriteSite) -> HloInstruction | None:
    """pad(pad(x)) → pad(x), by the same value, without holes, nothing cut off."""
    inner, filler = site.operands
    if inner.opcode != "pad" or not _same_scalar(inner.operands[1], filler):
        return None
    both = (*inner.padding, *site.at.padding)
    if any(p.interior or p.low < 0 or p.high < 0 for p in both):
        return None
    joined = [PadDim(a.low + b.low, a.high + b.high) for a, b in zip(inner.padding, site.at.padding)]
    return site.build.pad(inner.operands[0], filler, joined)


def pad_negative(site: RewriteSite) -> HloInstruction | None:
    """Pad by less than nothing → slice(pad(x))."""
    x, filler = site.operands
    padding = site.at.padding
    if not any(p.low < 0 or p.high < 0 for p in padding):
        return None
    outer = [PadDim(max(p.low, 0), max(p.high, 0), p.interior) for p in padding]
    wide = [p.padded(n) for p, n in zip(outer, x.shape.dims)]
    made = site.build.pad(x, filler, outer)
    starts = [max(-p.low, 0) for p in padding]
    limits = [n - max(-p.high, 0) for p, n in zip(padding, wide)]
    if any(a > b for a, b in zip(starts, limits)):
        starts = [min(a, b) for a, b in zip(starts, limits)]
    return site.build.slice(made, starts, limits)


def _same_scalar(a: HloInstruction, b: HloInstruction) -> bool:
    if a is b:
        return True
    first, second = literal_of(a), literal_of(b)
    return first is not None and second is not None and first.tobytes() == second.tobytes()


def concatenate_one(site: RewriteSite) -> HloInstruction | None:
    """concatenate(x) → x; empty parts are dropped."""
    parts = [p for p in site.operands if not is_trivial(p)]
    if not parts:
        return site.operands[0] if len(site.operands) == 1 else None
    if len(parts) == len(site.operands) > 1:
        return None
    return site.build.concatenate(parts, site.at.dimensions[0])


def concatenate_nested(site: RewriteSite) -> HloInstruction | None:
    """concatenate(x, concatenate(y, z)) → concatenate(x, y, z), where nobody else uses the inner one."""
    dims = site.at.dimensions
    nested = [p.opcode == "concatenate" and p.dimensions == dims and len(p.users) == 1 for p in site.operands]
    if not any(nested):
        return None
    parts: list[HloInstruction] = []
    for part, inside in zip(site.operands, nested):
        parts += part.operands if inside else [part]
    return site.build.concatenate(parts, dims[0])


def concatenate_neighbours(site: RewriteSite) -> HloInstruction | None:
    """concatenate(x[0:2], x[2:5], y) → concatenate(x[0:5], y)."""
    (dim,) = site.at.dimensions
    merged: list[tuple[HloInstruction, SliceDims | None]] = []
    for part in site.operands:
        bounds = part.slice_dims if part.opcode == "slice" else None
        source = part.operands[0] if bounds is not None else part
        last = merged[-1] if merged else None
        if bounds is not None and last is not None and last[1] is not None and last[0] is source:
            joined = _joined(last[1], bounds, dim)
            if joined is not None:
                merged[-1] = (source, joined)
                continue
        merged.append((source, bounds))
    if len(merged) == len(site.operands):
        return None
    made = [x if b is None else site.build.slice(x, b.starts, b.limits, b.strides) for x, b in merged]
    return site.build.concatenate(made, dim)


def _joined(a: SliceDims, b: SliceDims, dim: int) -> SliceDims | None:
    """One slice for two neighbours along a dim."""
    for d in range(len(a.starts)):
        if a.strides[d] != 1 or b.strides[d] != 1:
            return None
        if d == dim:
            if a.limits[d] != b.starts[d]:
                return None
        elif (a.starts[d], a.limits[d]) != (b.starts[d], b.limits[d]):
            return None
    limits = tuple(b.limits[d] if d == dim else n for d, n in enumerate(a.limits))
    return SliceDims(a.starts, limits, a.strides)


def concatenate_splats(site: RewriteSite) -> HloInstruction | None:
    """concatenate(x, broadcast(c)) → pad(x, c), with a constant c; of copies of one scalar → broadcast."""
    sources = [p.operands[0] if p.opcode == "broadcast" else None for p in site.operands]
    first = sources[0]
    if first is not None and first.shape.is_scalar and all(s and _same_scalar(s, first) for s in sources):
        return site.build.broadcast(first, site.shape.dims)
    if len(site.operands) != 2:
        return None
    (dim,) = site.at.dimensions
    for number, filler in enumerate(sources):
        if filler is not None and filler.shape.is_scalar and literal_of(filler) is not None:
            x, size = site.operands[1 - number], site.operands[number].shape.dims[dim]
            amount = PadDim(0, size) if number else PadDim(size, 0)
            padding = [amount if d == dim else PadDim(0, 0) for d in range(site.shape.rank)]
            return site.build.pad(x, filler, padding)
    return None


RULES: dict[str, tuple[Rule, ...]] = {
    "slice": (
        slice_nothing,
        slice_twice,
        slice_of_concatenate,
        slice_of_pad,
        slice_of_broadcast,
        slice_of_iota,
    ),
    "pad": (pad_nothing, pad_of_nothing, pad_twice, pad_negative),
    "concatenate": (concatenate_one, concatenate_nested, concatenate_neighbours, concatenate_splats),
}
