"""Complex numbers as pairs of floats: kernels have no complex type.

Each complex value becomes its real and imaginary part, and operations become those of `complex_functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape, array
from mpmd.compile.passes.expand import complex_functions
from mpmd.compile.passes.expand.functions import Number
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import (
    Rewriter,
    RewriteSite,
    Rule,
    TrackingBuilder,
    is_splat,
    literal_of,
    reducer,
)

Parts = tuple[HloInstruction, HloInstruction]

_CONTROL = frozenset(["call", "while", "conditional", "async-start"])
_REAL = {"c64": "f32", "c128": "f64"}
_MOVED = (
    "all-gather",
    "all-to-all",
    "bitcast",
    "broadcast",
    "collective-broadcast",
    "collective-permute",
    "concatenate",
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "gather",
    "pad",
    "reshape",
    "reverse",
    "select",
    "slice",
    "transpose",
)
_CALLING = ("map", "reduce", "reduce-window", "scatter", "select-and-scatter", "sort")
_JOINING = ("all-reduce", "reduce-scatter")


class ComplexToPairs(ComputationPass):
    """Computes with real and imaginary parts instead of complex numbers.

    multiply(x: c64, y: c64)
      -> complex(xr*yr - xi*yi, xr*yi + xi*yr), xr = real(x), xi = imag(x) ...

    real(complex(a, b)) becomes a.  Parts of parameters and of results of control flow remain, and complex
    numbers that are combined for results and for control flow.  Computations on scalars, as of reductions,
    take and return pairs.

    Requires: no schedule; calls are inlined.
    Ensures: no arithmetic, movement, product, reduction or order of complex numbers is left.
    Cost: linear.
    Source: the definitions, in the forms that do not overflow or cancel early.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        """Rewrites one computation; those that work on scalars of a reduction follow with the reduction."""
        if any(c.info.called and c.opcode not in _CONTROL for c in computation.callers):
            return False
        return _split(computation)


def _split(computation: HloComputation) -> bool:
    of_real = any(i.opcode in ("real", "imag") for i in computation)
    if not of_real and not any(_is_complex(leaf) for i in computation for _, leaf in i.shape.leaves()):
        return False
    return Rewriter(computation).run(RULES, lambda i: True)


def _is_complex(shape: Shape) -> bool:
    return shape.is_array and shape.dtype in _REAL


def _parts(build: TrackingBuilder, value: HloInstruction) -> Parts:
    """Real and imaginary parts; of a real number itself and zeros."""
    if not _is_complex(value.shape):
        return value, build.full(0, value.shape.dtype, value.shape.dims)
    if value.opcode == "complex":
        return value.operands[0], value.operands[1]
    return build.add("real", value), build.add("imag", value)


def _pair(build: TrackingBuilder, value: HloInstruction) -> complex_functions.Pair:
    real, imaginary = _parts(build, value)
    return Number(build, real), Number(build, imaginary)


def _joined(build: TrackingBuilder, real: HloInstruction, imaginary: HloInstruction) -> HloInstruction:
    return build.add("complex", real, imaginary)


def _touches(site: RewriteSite) -> bool:
    return any(_is_complex(s) for s in (site.shape, *(o.shape for o in site.operands)))


# -- elementwise
def _unary(function: Callable[[complex_functions.Pair], complex_functions.Pair]) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction | None:
        if not _touches(site):
            return None
        a, b = function(_pair(site.build, site.operands[0]))
        return _joined(site.build, a.value, b.value)

    return rule


def _binary(
    function: Callable[[complex_functions.Pair, complex_functions.Pair], complex_functions.Pair],
) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction | None:
        if not _touches(site):
            return None
        a, b = function(*(_pair(site.build, o) for o in site.operands))
        return _joined(site.build, a.value, b.value)

    return rule


def _part(number: int) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction | None:
        (value,) = site.operands
        if value.opcode == "complex" or not _is_complex(value.shape):
            return _parts(site.build, value)[number]
        return None

    return rule


def _abs(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    return complex_functions.magnitude(_pair(site.build, site.operands[0])).value


def _compare(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    (a, b), (c, d) = (_parts(site.build, o) for o in site.operands)
    both = [site.build.like(site.at, pair) for pair in ((a, c), (b, d))]
    return site.build.add("and" if site.at.direction == "EQ" else "or", *both)


def _convert(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    dtype = _REAL.get(site.shape.dtype)
    real, imaginary = _parts(site.build, site.operands[0])
    if dtype is None:
        return site.build.convert(real, site.shape.dtype)
    return _joined(site.build, site.build.convert(real, dtype), site.build.convert(imaginary, dtype))


def _constant(site: RewriteSite) -> HloInstruction | None:
    literal = literal_of(site.at)
    if literal is None or not _is_complex(site.shape):
        return None
    parts = (np.array(part) for part in (literal.real, literal.imag))
    return _joined(site.build, *(site.build.constant(part) for part in parts))


def _iota(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    real = site.build.iota(_REAL[site.shape.dtype], site.shape.dims, site.at.iota_dimension)
    return _joined(site.build, *_parts(site.build, real))


# -- movement and products
def _moved(site: RewriteSite) -> HloInstruction | None:
    """The same movement of both parts, within a device or between some; positions and choices are shared."""
    if not _touches(site) or site.shape.is_tuple:
        return None
    shape = site.shape.with_dtype(_REAL[site.shape.dtype])
    return _joined(site.build, *(site.build.like(site.at, side, shape) for side in _sides(site)))


def _sides(site: RewriteSite) -> tuple[list[HloInstruction], list[HloInstruction]]:
    """Operands of an operation on real parts, and of one on imaginary parts; real ones are in both."""
    sides: tuple[list[HloInstruction], list[HloInstruction]] = [], []
    for operand in site.operands:
        parts = _parts(site.build, operand) if _is_complex(operand.shape) else (operand, operand)
        for side, part in zip(sides, parts):
            side.append(part)
    return sides


def _product(site: RewriteSite) -> HloInstruction | None:
    if not _touches(site):
        return None
    build, shape = site.build, site.shape.with_dtype(_REAL[site.shape.dtype])
    (a, b), (c, d) = (_parts(build, o) for o in site.operands)

    def times(x: HloInstruction, y: HloInstruction) -> HloInstruction:
        return build.like(site.at, (x, y), shape)

    if is_splat(b, 0):  # a real number
        return _joined(build, times(a, c), times(a, d))
    if is_splat(d, 0):
        return _joined(build, times(a, c), times(b, c))
    real = build.add("subtract", times(a, c), times(b, d))
    return _joined(build, real, build.add("add", times(a, d), times(b, c)))


# -- computations on scalars
def _calling(site: RewriteSite) -> HloInstruction | None:
    """An operation that applies a computation to scalars: both parts of each array, one after the other."""
    if not any(_is_complex(o.shape) for o in site.operands):
        return None
    if site.at.opcode == "select-and-scatter" or (site.at.opcode == "map" and _is_complex(site.shape)):
        return None
    build, opcode = site.build, site.at.opcode
    if _is_separate(site):
        return _apart(site)
    operands = [part for o in site.operands for part in (_parts(build, o) if _is_complex(o.shape) else (o,))]
    called = [_on_pairs(c, sides=2 if opcode == "sort" else 1) for c in site.at.called]
    attributes: dict[str, Any] = dict(site.at.attributes)
    call = build.add(opcode, *operands, called=called, **attributes)
    count = 1 if call.shape.is_array else len(call.shape.elements)
    values = [call] if call.shape.is_array else [build.element(call, k) for k in range(count)]
    results = []
    for _, leaf in site.shape.leaves():
        first = values.pop(0)
        results.append(_joined(build, first, values.pop(0)) if _is_complex(leaf) else first)
    return build.tuple(results) if site.shape.is_tuple else results[0]


def _is_separate(site: RewriteSite) -> bool:
    """Whether a computation does the same to each part: a sum, or the replacement by a scatter."""
    if site.at.opcode not in ("reduce", "reduce-window", "scatter", *_JOINING) or not site.shape.is_array:
        return False
    return reducer(site.at.to_apply) == "add" or _replaces(site)


def _replaces(site: RewriteSite) -> bool:
    return site.at.opcode == "scatter" and site.at.to_apply.root is site.at.to_apply.parameters[1]


def _apart(site: RewriteSite) -> HloInstruction:
    module, dtype = site.build.computation.module, _REAL[site.shape.dtype]
    if _replaces(site):
        second = HloBuilder.create(module, f"second_{dtype}")
        parameters = [second.parameter(array(dtype)) for _ in range(2)]
        computation = second.build(parameters[1])
    else:
        computation = scalar_computation(module, "add", dtype)
    attributes: dict[str, Any] = dict(site.at.attributes)
    sides = [
        site.build.add(site.at.opcode, *side, called=(computation,), **attributes) for side in _sides(site)
    ]
    return _joined(site.build, *sides)


def _joining(site: RewriteSite) -> HloInstruction | None:
    return _apart(site) if _touches(site) and _is_separate(site) else None


def _on_pairs(computation: HloComputation, sides: int) -> HloComputation:
    """A computation that takes and returns pairs.

    Args:
        computation: on scalars.
        sides: how many parameters belong to an array and are adjacent: two for a comparison.
    """
    build = HloBuilder.create(computation.module, f"{computation.name}_pairs")
    known: dict[HloInstruction, HloInstruction] = {}
    for start in range(0, len(computation.parameters), sides):
        group = computation.parameters[start : start + sides]
        if not _is_complex(group[0].shape):
            known.update({p: build.parameter(p.shape) for p in group})
            continue
        scalar = array(_REAL[group[0].shape.dtype])
        real, imaginary = ([build.parameter(scalar) for _ in group] for _ in range(2))
        known.update({p: build.add("complex", a, b) for p, a, b in zip(group, real, imaginary)})
    root = computation.copy_into(build.computation, known)[computation.root]
    values = []
    for value in root.operands if root.opcode == "tuple" else [root]:
        is_pair = _is_complex(value.shape)
        values += [build.add(part, value) for part in ("real", "imag")] if is_pair else [value]
    split = build.build(build.tuple(values) if len(values) > 1 or root.opcode == "tuple" else values[0])
    _split(split)
    return split


RULES: dict[str, tuple[Rule, ...]] = {
    **{name: (_unary(function),) for name, function in complex_functions.UNARY.items()},
    **{name: (_binary(function),) for name, function in complex_functions.BINARY.items()},
    **dict.fromkeys(_MOVED, (_moved,)),
    **dict.fromkeys(_CALLING, (_calling,)),
    **dict.fromkeys(_JOINING, (_joining,)),
    "abs": (_abs,),
    "compare": (_compare,),
    "constant": (_constant,),
    "convert": (_convert,),
    "convolution": (_product,),
    "dot": (_product,),
    "imag": (_part(1),),
    "iota": (_iota,),
    "real": (_part(0),),
}
