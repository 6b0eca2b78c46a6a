"""Types that kernels lack as wider ones that they have, such as eight-bit floats as f32.

Memory keeps the narrow type; arithmetic widens, computes and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.dtypes import DTYPES
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule, reducer

NARROW = tuple(
    name for name, info in DTYPES.items() if info.bits < 8 or (info.bits == 8 and info.kind == "float")
)
_WIDE = {name: {"float": "f32", "signed": "s32", "unsigned": "u32"}[DTYPES[name].kind] for name in NARROW}

_KEEPS_BITS = frozenset(["bitcast-convert", "convert", "copy", "map", "select", "stochastic-convert"])
_CALLING = ("all-reduce", "map", "reduce", "reduce-scatter", "reduce-window", "scatter", "select-and-scatter")
_WHOLE = (
    *_CALLING,
    "batch-norm-grad",
    "batch-norm-inference",
    "batch-norm-training",
    "cholesky",
    "topk",
    "triangular-solve",
)
_PRODUCTS = ("convolution", "dot")
_EXACT = frozenset(["clamp", "copy", "maximum", "minimum", "select"])
_ODD = frozenset(
    [
        "bitcast-convert",
        "count-leading-zeros",
        "mulhi",
        "popcnt",
        "shift-right-arithmetic",
        "shift-right-logical",
    ]
)
"""Operations whose result depends on the width or sign."""
_INLINE = frozenset(["constant", "parameter", "tuple"])
"""Operations in computations on scalars beside elementwise work."""


class NarrowTypeExpander(ComputationPass):
    """Computes in f32, s32 or u32 with types of a byte or less, which kernels only move and convert.

    add(x: f8e4m3fn, y)    ->  convert(add(convert(x) to f32, convert(y) to f32)) to f8e4m3fn
    dot(x: f8e5m2, y): f32 ->  dot(convert(x) to bf16, convert(y) to bf16): f32
    dot(x: pred, y): pred  ->  dot(convert(x) to f32, convert(y) to f32) != 0
    shift-right-logical(x: s4, y)  ->  the same of u4

    Each result is rounded or wrapped once; reductions are kept wide to their end.  Movement, choice and
    sorting stay narrow; the comparison of a sort uses wider numbers.

    Requires: no schedule; calls are inlined.
    Ensures: no elementwise operation, reduction or product works on integers of less or floats of no more
        than 8 bits, but reductions by computations that are not elementwise; no product is one of truths.
    Cost: linear.
    Source: XLA's float normalisation and its widening of sub-byte arithmetic.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; callees of widened operations are widened with them."""
        if not _is_touched(computation):
            return False
        follows = any(c.opcode in _CALLING for c in computation.callers)
        if follows and any(_is_narrow(p.shape) for p in computation.parameters):
            return False
        return Rewriter(computation).run(_RULES, lambda i: True)


def _is_narrow(shape: Shape) -> bool:
    return any(leaf.dtype in _WIDE for _, leaf in shape.leaves())


def _is_touched(computation: HloComputation) -> bool:
    return any(_is_narrow(i.shape) or _is_of_truths(i) for i in computation)


def _is_of_truths(i: HloInstruction) -> bool:
    return i.opcode in _PRODUCTS and i.shape.dtype == "pred"


def _touches(site: RewriteSite) -> bool:
    return any(_is_narrow(s) for s in (site.shape, *(o.shape for o in site.operands)))


def _wide_shape(shape: Shape) -> Shape:
    if shape.is_tuple:
        return tuple_of([_wide_shape(e) for e in shape.elements])
    return shape.with_dtype(_WIDE[shape.dtype]) if shape.dtype in _WIDE else shape


def _wide(build: HloBuilder, value: HloInstruction) -> HloInstruction:
    return build.convert(value, _WIDE.get(value.shape.dtype, value.shape.dtype))


def _back(build: HloBuilder, value: HloInstruction, shape: Shape) -> HloInstruction:
    """A wide result in the types of the narrow one."""
    if shape.is_array:
        return build.convert(value, shape.dtype)
    parts = [_back(build, build.element(value, k), e) for k, e in enumerate(shape.elements)]
    return build.tuple(parts)


def _widen(site: RewriteSite) -> HloInstruction | None:
    """The same operation in wide types, with the computations that it calls."""
    if not _touches(site):
        return None
    if site.at.called and not all(_is_inline(c) for c in site.at.called):
        return None
    build = site.build
    called = [_wide_computation(build.computation.module, c) for c in site.at.called]
    operands = [_wide(build, o) for o in site.operands]
    attributes: dict[str, Any] = dict(site.at.attributes)
    shape = _wide_shape(site.shape)
    return _back(
        build, build.add(site.at.opcode, *operands, shape=shape, called=called, **attributes), site.shape
    )


def _is_inline(computation: HloComputation) -> bool:
    """Whether all of a computation can be widened: plain elementwise work."""
    if not _is_touched(computation):
        return True
    return all(
        i.opcode in _INLINE
        or (i.shape.is_array and OPCODES[i.opcode].category in ELEMENTWISE and i.opcode not in _ODD)
        for i in computation
    )


def _wide_computation(module: HloModule, computation: HloComputation) -> HloComputation:
    """A computation with wide parameters and a wide result; in between it rounds as the narrow one does."""
    if not _is_touched(computation):
        return computation
    opcode = reducer(computation)
    if opcode is not None:
        return scalar_computation(module, opcode, _WIDE[computation.root.shape.dtype])
    build = HloBuilder.create(module, f"{computation.name}_wide")
    values = {p: build.parameter(_wide_shape(p.shape)) for p in computation.parameters}
    for i in computation.post_order():
        if i.opcode == "constant":
            values[i] = _wide(build, build.constant(i.literal))
        elif i.opcode != "parameter":
            values[i] = _wide_step(build, i, [values[o] for o in i.operands])
    return build.build(values[computation.root])


def _wide_step(build: HloBuilder, i: HloInstruction, operands: Sequence[HloInstruction]) -> HloInstruction:
    if i.opcode == "tuple":
        return build.tuple(operands)
    if i.opcode == "convert":
        result = build.convert(operands[0], i.shape.dtype)
        return _wide(build, result)
    attributes: dict[str, Any] = dict(i.attributes)
    result = build.add(i.opcode, *operands, shape=_wide_shape(i.shape), **attributes)
    rounds = i.shape.dtype in _WIDE and i.opcode not in _EXACT
    return _wide(build, build.convert(result, i.shape.dtype)) if rounds else result


# -- operations that differ on more bits
def _as(site: RewriteSite, value: HloInstruction, sign: str) -> HloInstruction:
    """The bits of a narrow integer as a signed (`s`) or unsigned (`u`) number."""
    dtype = f"{sign}{value.shape.info.bits}"
    if value.shape.dtype == dtype:
        return value
    return site.build.add("bitcast-convert", value, shape=value.shape.with_dtype(dtype))


def _right(sign: str) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction | None:
        if not _touches(site):
            return None
        value, amount = site.operands
        wide = _wide(site.build, _as(site, value, sign))
        by = site.build.convert(amount, wide.shape.dtype)  # a negative amount is beyond any width
        return site.build.convert(site.build.add(site.at.opcode, wide, by), site.shape.dtype)

    return rule


def _count(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    build, bits = site.build, site.shape.info.bits
    counted = build.add(site.at.opcode, _wide(build, _as(site, site.operands[0], "u")))
    if site.at.opcode == "count-leading-zeros":
        counted = build.add("subtract", counted, build.full(32 - bits, "u32", site.shape.dims))
    return build.convert(counted, site.shape.dtype)


def _high_half(site: RewriteSite) -> HloInstruction | None:
    """The upper bits of a product that the wide type holds."""
    if not _touches(site):
        return None
    build = site.build
    product = build.add("multiply", *(_wide(build, o) for o in site.operands))
    by = build.full(site.shape.info.bits, product.shape.dtype, site.shape.dims)
    return build.convert(build.add("shift-right-arithmetic", product, by), site.shape.dtype)


def _product(site: RewriteSite) -> HloInstruction | None:
    """Factors in a type that holds them exactly, sums in one that is as wide as the result."""
    if _is_of_truths(site.at):
        return _any_product(site)
    if not _touches(site) or len(site.operands) != 2:
        return None
    build, kinds = site.build, [o.shape.info for o in site.operands]
    if any(k.kind == "complex" for k in kinds):
        return None
    long = max(k.bits for k in (*kinds, site.shape.info)) == 64
    if any(k.kind == "float" for k in kinds):
        # 8 bits of mantissa hold what narrow floats have, and bf16 has the exponents of all
        short = all(k.name == "bf16" or (k.name in _WIDE and k.name != "f8e8m0fnu") for k in kinds)
        total = "f64" if long else "f32"
        factor = "bf16" if short and not long else total
    else:
        unsigned = all(k.kind != "signed" for k in kinds)
        factor = total = f"{'u' if unsigned else 's'}{64 if long else 32}"
    operands = [build.convert(o, factor) for o in site.operands]
    attributes: dict[str, Any] = dict(site.at.attributes)
    product = build.add(site.at.opcode, *operands, shape=site.shape.with_dtype(total), **attributes)
    return build.convert(product, site.shape.dtype)


def _any_product(site: RewriteSite) -> HloInstruction:
    """Whether any product of truths is one: sums of ones round, but never to zero."""
    build = site.build
    operands = [build.convert(o, "f32") for o in site.operands]
    attributes: dict[str, Any] = dict(site.at.attributes)
    product = build.add(site.at.opcode, *operands, shape=site.shape.with_dtype("f32"), **attributes)
    return build.compare(product, build.full(0, "f32", product.shape.dims), "NE")


_UNLIKE: dict[str, Rule] = {
    "count-leading-zeros": _count,
    "mulhi": _high_half,
    "popcnt": _count,
    "shift-right-arithmetic": _right("s"),
    "shift-right-logical": _right("u"),
}
_PLAIN = [n for n, info in OPCODES.items() if info.category in ELEMENTWISE and n not in _KEEPS_BITS]
_RULES: dict[str, tuple[Rule, ...]] = {
    **dict.fromkeys((*_PLAIN, *_WHOLE), (_widen,)),
    **dict.fromkeys(_PRODUCTS, (_product,)),
    **{name: (rule,) for name, rule in _UNLIKE.items()},
}
