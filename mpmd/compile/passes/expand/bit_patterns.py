"""Operations defined by the bits of numbers: bitcasts, rounding to fewer bits, comparisons in total order.

Kernels shift and mask integers; these operations become that.  The largest elements of a row are a sort in
total order, which is written here, too.
"""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, array
from mpmd.compile.passes.expand.functions import Number
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
        rules = {"bitcast-convert": (_expand_bitcast,), "bitcast": (_convert_elements,)}
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
    converted = build.add("bitcast-convert", x, shape=array(shape.dtype, dims))
    return converted if dims == shape.dims else build.reshape(converted, shape.dims)


def _expand_bitcast(site: RewriteSite) -> HloInstruction | None:
    (x,) = site.operands
    old, new = x.shape.info, site.shape.info
    if old.bits == new.bits or "complex" in (old.kind, new.kind):
        return None
    if "pred" in (old.kind, new.kind):
        return None
    build = site.build
    plain = _bits(build, x, f"u{old.bits}")
    bits = _joined(build, plain, new.bits) if old.bits < new.bits else _split(build, plain, new.bits)
    return _bits(build, bits, site.shape.dtype)


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


_LAYOUT = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}
"""Bits of the exponent and of the mantissa."""


class ReducePrecisionExpander(ComputationPass):
    """Rounds to fewer bits with integers.

    reduce-precision(x: f32), 5 bits of exponent, 3 of mantissa
      -> bits + (the rounding of the last kept bit to even), without the dropped bits; infinity where the
      exponent
      is too large, zero where it is too small

    f32 is rounded to bf16 by two conversions.

    Requires: no schedule.
    Ensures: no reduce-precision is left, but of types other than f16, bf16, f32 and f64.
    Cost: linear.
    Source: the definition of XLA's operation: to nearest even, denormal results become zeros.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reduce-precision": (_expand_precision,)}, lambda i: True)


def _expand_precision(site: RewriteSite) -> HloInstruction | None:
    dtype = site.shape.dtype
    wanted = tuple(int(str(site.at.attributes[f"{part}_bits"])) for part in ("exponent", "mantissa"))
    build, (x,) = site.build, site.operands
    if dtype not in _LAYOUT:
        return None
    if wanted == _LAYOUT[dtype]:
        return x
    if (dtype, wanted) == ("f32", _LAYOUT["bf16"]):
        return build.convert(build.convert(x, "bf16"), dtype)
    kind = f"u{site.shape.info.bits}"
    bits = build.add("bitcast-convert", x, shape=site.shape.with_dtype(kind))
    rounding = _Rounding(site, bits, kind)
    rounded, is_nan = rounding.rounded(*wanted), build.compare(x, x, "NE")
    if not wanted[1]:  # no mantissa is left to distinguish NaN from infinity
        rounded = build.select(is_nan, rounding.infinite(), rounded)
    result = build.add("bitcast-convert", rounded, shape=site.shape)
    return build.select(is_nan, x, result) if wanted[1] else result


class _Rounding:
    """Integers that are the bits of floats."""

    def __init__(self, site: RewriteSite, bits: HloInstruction, kind: str) -> None:
        self.build = site.build
        self.bits = bits
        self.kind = kind
        self.exponent, self.mantissa = _LAYOUT[site.shape.dtype]

    def full(self, value: int) -> HloInstruction:
        literal = self.bits.shape.with_dtype(self.kind).numpy_dtype.type(value)
        return self.build.broadcast(self.build.constant(literal), self.bits.shape.dims)

    def sign(self) -> HloInstruction:
        return self.build.add("and", self.bits, self.full(1 << (self.exponent + self.mantissa)))

    def infinite(self) -> HloInstruction:
        return self.build.add("or", self.sign(), self.full(((1 << self.exponent) - 1) << self.mantissa))

    def rounded(self, exponent: int, mantissa: int) -> HloInstruction:
        build, bits = self.build, self.bits
        gone = self.mantissa - mantissa
        if gone > 0:
            last = build.add("shift-right-logical", bits, self.full(gone))
            odd = build.add("and", last, self.full(1))
            half = self.full((1 << (gone - 1)) - 1)
            bits = build.add("add", bits, build.add("add", odd, half))
            bits = build.add("and", bits, self.full(((1 << (self.exponent + mantissa + 1)) - 1) << gone))
        if exponent >= self.exponent:
            return bits
        sign = self.sign()
        mask = (1 << self.exponent) - 1
        power = build.add("and", bits, self.full(mask << self.mantissa))
        bias, narrow_bias = mask >> 1, (1 << (exponent - 1)) - 1
        least, most = (bias + k for k in (1 - narrow_bias - 1, narrow_bias))
        over = build.compare(power, self.full(most << self.mantissa), "GT")
        under = build.compare(power, self.full(least << self.mantissa), "LE")
        return build.select(over, self.infinite(), build.select(under, sign, bits))


class StochasticConvertExpander(ComputationPass):
    """Rounds away from zero where random bits are below the fraction.

    stochastic-convert(x: f32, bits: u32) to s8
      -> convert(select(bits < |x - trunc(x)| * 2^32, trunc(x) + sign(x), x)) to s8

    Infinities and NaN have no fraction: they convert as usual.

    Requires: no schedule.
    Ensures: no stochastic-convert to integers is left.
    Cost: linear.
    Source: the definition.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"stochastic-convert": (_expand_stochastic,)}, lambda i: True)


def _expand_stochastic(site: RewriteSite) -> HloInstruction | None:
    given, random = site.operands
    if not site.shape.info.is_integral or random.shape.info.kind != "unsigned":
        return None
    x = Number(site.build, given).to("f64" if given.shape.dtype == "f64" else "f32")
    whole = x.is_("LT", 0).choose(x.of("ceil"), x.of("floor"))
    bound = ((x - whole).abs() * 2.0**random.shape.info.bits).to(random.shape.dtype)
    further = Number(site.build, random).is_("LT", bound)
    return further.choose(whole + x.of("sign"), x).to(site.shape.dtype).value


class ComparisonExpander(ComputationPass):
    """Compares floats in total order as integers.

    compare(x, y), type=TOTALORDER -> compare(order(x), order(y)), order(x) = bits(x) ^ (sign(x) & 0x7fff...)

    Requires: no schedule.
    Ensures: no comparison of floats in total order is left.
    Cost: linear.
    Source: IEEE 754 section 5.10: flipping the bits below the sign of negative numbers orders all, NaN too.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"compare": (_expand_comparison,)}, lambda i: True)


def _expand_comparison(site: RewriteSite) -> HloInstruction | None:
    info = site.operands[0].shape.info
    if site.at.attributes.get("comparison_type") != "TOTALORDER" or info.kind != "float" or info.bits < 8:
        return None
    dtype = f"s{info.bits}"
    a, b = (_ordered(site, x, dtype) for x in site.operands)
    return site.build.compare(a, b, site.at.direction)


def _ordered(site: RewriteSite, x: HloInstruction, dtype: str) -> HloInstruction:
    build = site.build
    bits = build.add("bitcast-convert", x, shape=x.shape.with_dtype(dtype))
    width = bits.shape.info.bits
    sign = build.add("shift-right-arithmetic", bits, build.full(width - 1, dtype, x.shape.dims))
    mask = build.full((1 << (width - 1)) - 1, dtype, x.shape.dims)
    return build.add("xor", bits, build.add("and", sign, mask))


class TopkDecomposer(ComputationPass):
    """Sorts, then takes the first ones.

    (values, indices) = topk(x), k=2  ->  slices of sort(x, iota), stable, largest first

    Requires: no schedule.
    Ensures: no topk is left.
    Cost: linear; at run time n log n for n log k.
    Source: XLA's topk decomposer; equal values keep their order.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"topk": (_decompose,)}, lambda i: True)


def _decompose(site: RewriteSite) -> HloInstruction:
    (x,) = site.operands
    build, dim = site.build, x.shape.rank - 1
    places = build.iota(site.shape.elements[1].dtype, x.shape.dims, dim)
    order = _order(site, x.shape.scalar(), places.shape.scalar())
    ordered = build.add("sort", x, places, dimensions=(dim,), is_stable=True, called=(order,))
    results = [build.element(ordered, i) for i in range(2)]
    return build.tuple(
        [build.slice(r, (0,) * (dim + 1), s.dims) for r, s in zip(results, site.shape.elements)]
    )


def _order(site: RewriteSite, key: Shape, place: Shape) -> HloComputation:
    module = site.build.computation.module
    largest = bool(site.at.attributes["largest"])
    order = HloBuilder.create(module, f"{'descending' if largest else 'ascending'}_{key.dtype}")
    a, b = order.parameter(key), order.parameter(key)
    order.parameter(place), order.parameter(place)
    total = "TOTALORDER" if key.info.kind == "float" else None
    direction = "GT" if largest else "LT"
    return order.build(order.add("compare", a, b, direction=direction, comparison_type=total))
