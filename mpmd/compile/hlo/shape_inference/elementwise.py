"""Shapes of elementwise operations."""

from __future__ import annotations

from mpmd.compile.hlo.opcodes import OPCODES, TRANSCENDENTAL, Category
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.hlo.shape_inference.rule import Query, Rule, check, check_dims, logical, same

_FLOAT = frozenset(
    ["ceil", "floor", "round-nearest-afz", "round-nearest-even", "is-finite", "reduce-precision"]
)
_BITS = frozenset(["and", "or", "xor", "not"])
_INTEGER = frozenset(
    ["shift-left", "shift-right-arithmetic", "shift-right-logical", "popcnt", "count-leading-zeros", "mulhi"]
)
_COMPLEX_PART = {"c64": "f32", "c128": "f64"}
_COMPLEX_OF = {part: whole for whole, part in _COMPLEX_PART.items()}


def _check_type(query: Query, shape: Shape) -> None:
    kind = shape.info.kind
    opcode = query.opcode
    if opcode in TRANSCENDENTAL:
        check(kind in ("float", "complex"), f"{opcode} takes floating-point or complex values, got {shape}")
    elif opcode in _FLOAT:
        check(kind == "float", f"{opcode} takes floating-point values, got {shape}")
    elif opcode in _BITS:
        check(kind in ("pred", "signed", "unsigned"), f"{opcode} takes booleans or integers, got {shape}")
    elif opcode in _INTEGER:
        check(kind in ("signed", "unsigned"), f"{opcode} takes integers, got {shape}")


def unary(query: Query) -> Shape:
    shape = query.array(0)
    _check_type(query, shape)
    return shape


def binary(query: Query) -> Shape:
    """Both operands' shape."""
    a, b = query.array(0), query.array(1)
    same(query, a, b, "operands")
    _check_type(query, a)
    return a


def reduce_precision(query: Query) -> Shape:
    for name, least in (("exponent_bits", 1), ("mantissa_bits", 0)):
        bits = query.attribute(name)
        check(least <= bits < 1 << 31, f"{name} of reduce-precision must be at least {least}, got {bits}")
    return unary(query)


def compare(query: Query) -> Shape:
    a, b = query.array(0), query.array(1)
    same(query, a, b, "operands")
    direction = query.attribute("direction")
    if a.info.kind == "complex":
        check(direction in ("EQ", "NE"), f"complex values compare only by EQ and NE, not {direction}")
    return logical("pred", a.dims)


def is_finite(query: Query) -> Shape:
    return logical("pred", unary(query).dims)


def convert(query: Query) -> Shape:
    return logical(query.claim().dtype, query.array(0).dims)


def bitcast_convert(query: Query) -> Shape:
    """Stated element type; a wider or narrower one splits or joins along the last dim."""
    source, claim = query.array(0), query.claim()
    old, new = source.info.bits, claim.info.bits
    if old == new:
        return logical(claim.dtype, source.dims)
    if old > new:
        return logical(claim.dtype, (*source.dims, old // new))
    last = source.dims[-1] if source.dims else 0
    check(
        last == new // old, f"bitcast-convert to {claim.dtype} needs a last dim of {new // old}, got {source}"
    )
    return logical(claim.dtype, source.dims[:-1])


def complex_part(query: Query) -> Shape:
    """Real or imaginary part; a real operand is its own real part."""
    shape = query.array(0)
    check(
        shape.info.kind in ("float", "complex"),
        f"{query.opcode} takes floating-point or complex values, got {shape}",
    )
    return logical(_COMPLEX_PART.get(shape.dtype, shape.dtype), shape.dims)


def absolute(query: Query) -> Shape:
    shape = query.array(0)
    return logical(_COMPLEX_PART.get(shape.dtype, shape.dtype), shape.dims)


def make_complex(query: Query) -> Shape:
    a, b = query.array(0), query.array(1)
    same(query, a, b, "operands")
    check(a.dtype in _COMPLEX_OF, f"complex takes f32 or f64 parts, got {a}")
    return logical(_COMPLEX_OF[a.dtype], a.dims)


def select(query: Query) -> Shape:
    """The shape of both arms; the predicate is a scalar or has their dims."""
    predicate, a, b = query.operands
    check(predicate.dtype == "pred", f"the first operand of select must be pred, got {predicate}")
    same(query, a, b, "operands 1 and 2")
    if predicate.dims:
        check(
            predicate.dims == a.dims,
            f"the predicate of select must be a scalar or have dims {a.dims}, got {predicate}",
        )
    return a


def clamp(query: Query) -> Shape:
    """The middle operand's shape; the bounds are scalars or have its shape."""
    value = query.array(1)
    for index in (0, 2):
        bound = query.array(index)
        fits = bound.dtype == value.dtype and bound.dims in ((), value.dims)
        check(fits, f"bound {index} of clamp must be {value.dtype}[] or {value}, got {bound}")
    return value


def mapped(query: Query) -> Shape:
    first = query.array(0)
    for index in range(len(query.operands)):
        dims = query.array(index).dims
        check(dims == first.dims, f"operands of map must have equal dims, got {first.dims} and {dims}")
    check_dims(query, "dimensions", query.attribute("dimensions"), first.rank)
    (computation,) = query.called
    check(
        len(computation.parameters) == len(query.operands),
        f"map over {len(query.operands)} operands calls {computation.name} with "
        f"{len(computation.parameters)} parameters",
    )
    return logical(computation.root.shape.dtype, first.dims)


def stochastic_convert(query: Query) -> Shape:
    """Stated element type, the operand's dims; random bits of the same width."""
    source, bits = query.array(0), query.array(1)
    fits = bits.dims == source.dims and bits.info.kind == "unsigned" and bits.info.bits == source.info.bits
    check(fits, f"stochastic-convert of {source} needs random bits of its dims and width, got {bits}")
    return logical(query.claim().dtype, source.dims)


RULES: dict[str, Rule] = {
    **{name: unary for name, info in OPCODES.items() if info.category is Category.UNARY},
    **{name: binary for name, info in OPCODES.items() if info.category is Category.BINARY},
    "abs": absolute,
    "bitcast-convert": bitcast_convert,
    "clamp": clamp,
    "compare": compare,
    "complex": make_complex,
    "copy": lambda query: query.operands[0],
    "convert": convert,
    "imag": complex_part,
    "is-finite": is_finite,
    "map": mapped,
    "real": complex_part,
    "reduce-precision": reduce_precision,
    "select": select,
    "stochastic-convert": stochastic_convert,
}
