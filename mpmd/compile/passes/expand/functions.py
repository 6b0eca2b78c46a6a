"""Functions as simpler operations: special functions by formulas, and computations that an operation calls.

Kernels have the elementwise operations of `kernels/operations.py`.  What a `map` or an asynchronous call
applies is written where it is applied, or becomes a plain call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import array
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule, TrackingBuilder


def is_inlinable(computation: HloComputation) -> bool:
    """Whether `applied` supports a computation: elementwise work on scalars, one result or a tuple."""
    return all(_is_simple(i) for i in computation)


def applied(
    build: TrackingBuilder, computation: HloComputation, arguments: Sequence[HloInstruction]
) -> list[HloInstruction]:
    """The results of a computation for every element of its arguments.

    Args:
        build: the builder.
        computation: one that `is_inlinable`.
        arguments: for each parameter an array; all have the same dims.

    Returns:
        An array per element of its result; one if that is not a tuple.
    """
    dims = arguments[0].shape.dims
    values: dict[HloInstruction, HloInstruction] = {}
    for instruction in computation.post_order():
        if instruction.opcode == "tuple":
            continue
        if instruction.opcode == "parameter":
            values[instruction] = arguments[instruction.parameter_number]
        elif instruction.opcode == "constant":
            values[instruction] = build.broadcast(build.constant(instruction.literal), dims)
        elif instruction.opcode == "broadcast":  # of a scalar to a scalar
            values[instruction] = values[instruction.operands[0]]
        else:
            operands = [values[o] for o in instruction.operands]
            values[instruction] = build.like(instruction, operands, array(instruction.shape.dtype, dims))
    root = computation.root
    return [values[o] for o in root.operands] if root.opcode == "tuple" else [values[root]]


def _is_simple(instruction: HloInstruction) -> bool:
    if instruction.opcode == "tuple":
        return instruction.is_root
    if not instruction.shape.is_array or instruction.shape.dims:
        return False
    if instruction.opcode in ("parameter", "constant", "broadcast"):
        return True
    return instruction.is_elementwise and instruction.opcode != "map"


class Number:
    """An array of real numbers, or of truths, in a formula.

    Attributes:
        build: where operations go.
        value: the array.
    """

    __slots__ = ("build", "value")

    def __init__(self, build: TrackingBuilder, value: HloInstruction) -> None:
        self.build = build
        self.value = value

    @property
    def dtype(self) -> str:
        return self.value.shape.dtype

    def full(self, number: float) -> Number:
        return Number(self.build, self.build.full(number, self.dtype, self.value.shape.dims))

    def to(self, dtype: str) -> Number:
        return Number(self.build, self.build.convert(self.value, dtype))

    def _apply(self, opcode: str, *others: Number | float) -> Number:
        operands = [o if isinstance(o, Number) else self.full(o) for o in others]
        return Number(self.build, self.build.add(opcode, self.value, *(o.value for o in operands)))

    def __add__(self, other: Number | float) -> Number:
        return self._apply("add", other)

    def __sub__(self, other: Number | float) -> Number:
        return self._apply("subtract", other)

    def __mul__(self, other: Number | float) -> Number:
        return self._apply("multiply", other)

    def __truediv__(self, other: Number | float) -> Number:
        return self._apply("divide", other)

    def __radd__(self, other: float) -> Number:
        return self.full(other) + self

    def __rsub__(self, other: float) -> Number:
        return self.full(other) - self

    def __rmul__(self, other: float) -> Number:
        return self.full(other) * self

    def __rtruediv__(self, other: float) -> Number:
        return self.full(other) / self

    def __neg__(self) -> Number:
        return self._apply("negate")

    def __and__(self, other: Number) -> Number:
        return self._apply("and", other)

    def __or__(self, other: Number) -> Number:
        return self._apply("or", other)

    def is_(self, direction: str, other: Number | float) -> Number:
        wanted = other if isinstance(other, Number) else self.full(other)
        return Number(self.build, self.build.compare(self.value, wanted.value, direction))

    def choose(self, then: Number, otherwise: Number) -> Number:
        """Where this is true `then`, else `otherwise`."""
        return Number(self.build, self.build.select(self.value, then.value, otherwise.value))

    def of(self, function: str) -> Number:
        return self._apply(function)

    def with_(self, function: str, other: Number | float) -> Number:
        return self._apply(function, other)

    def sqrt(self) -> Number:
        return self._apply("sqrt")

    def abs(self) -> Number:
        return self._apply("abs")

    def with_sign_of(self, other: Number) -> Number:
        bits = self.value.shape.info.bits
        kind, shape = f"u{bits}", self.value.shape.with_dtype(f"u{bits}")
        a, b = (self.build.add("bitcast-convert", v.value, shape=shape) for v in (self, other))
        top = self.build.full(1 << (bits - 1), kind, shape.dims)
        rest = self.build.full((1 << (bits - 1)) - 1, kind, shape.dims)
        sign, magnitude = self.build.add("and", b, top), self.build.add("and", a, rest)
        joined = self.build.add("or", magnitude, sign)
        return Number(self.build, self.build.add("bitcast-convert", joined, shape=self.value.shape))


class SpecialFunctionExpander(ComputationPass):
    """Computes inverse and hyperbolic functions from exponentials, logarithms and angles.

    asinh(x) -> sign(x) * log1p(|x| + |x|^2 / (1 + sqrt(|x|^2 + 1))), of large x log1p(|x|) + log(2)

    Types narrower than f32 are computed in f32.

    Requires: no schedule; complex numbers are pairs.
    Ensures: no such function of real numbers is left.
    Cost: linear.
    Source: the definitions, in forms that neither cancel near zero nor overflow before the result does.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules: dict[str, tuple[Rule, ...]] = {name: (_rule(f),) for name, f in FUNCTIONS.items()}
        return Rewriter(computation).run(rules, lambda i: i.shape.info.kind == "float")


def _rule(function: Callable[[Number], Number]) -> Rule:
    def rule(site: RewriteSite) -> HloInstruction:
        x = Number(site.build, site.operands[0])
        if x.dtype in ("f32", "f64"):
            return function(x).value
        return function(x.to("f32")).to(x.dtype).value

    return rule


def _half_square(x: Number) -> Number:
    """Half of exp(x), which is finite as long as the result is."""
    root = (x * 0.5).of("exponential")
    return (root * 0.5) * root


def sinh(x: Number) -> Number:
    size = x.abs()
    grown = size.of("exponential-minus-one")
    near = 0.5 * (grown + grown / (grown + 1.0))
    return size.is_("LT", 20.0).choose(near, _half_square(size)).with_sign_of(x)


def cosh(x: Number) -> Number:
    size = x.abs()
    grown = size.of("exponential")
    return size.is_("LT", 20.0).choose(0.5 * (grown + 1.0 / grown), _half_square(size))


def _is_large(x: Number) -> Number:
    """Whether 1 is negligible beside it; up to there its square is finite."""
    return x.is_("GT", 1e18 if x.dtype == "f64" else 1e9)


def _twice_if_large(x: Number, near: Number, far: Number) -> Number:
    """The logarithm of 1 + near, or for large x of twice 1 + far: one logarithm for both."""
    large = _is_large(x)
    logarithm = large.choose(far, near).of("log-plus-one")
    return large.choose(logarithm + math.log(2), logarithm)


def asinh(x: Number) -> Number:
    size = x.abs()
    square = size * size
    near = size + square / (1.0 + (square + 1.0).sqrt())
    return _twice_if_large(size, near, size).with_sign_of(x)


def acosh(x: Number) -> Number:
    more = x - 1.0
    near = more + (more * (more + 2.0)).sqrt()
    return x.is_("LT", 1.0).choose(x.full(math.nan), _twice_if_large(x, near, more))


def atanh(x: Number) -> Number:
    size = x.abs()
    return (0.5 * (2.0 * size / (1.0 - size)).of("log-plus-one")).with_sign_of(x)


def asin(x: Number) -> Number:
    return x.with_("atan2", ((1.0 - x) * (1.0 + x)).sqrt())


def acos(x: Number) -> Number:
    return ((1.0 - x) * (1.0 + x)).sqrt().with_("atan2", x)


FUNCTIONS: dict[str, Callable[[Number], Number]] = {
    "acos": acos,
    "acosh": acosh,
    "asin": asin,
    "asinh": asinh,
    "atanh": atanh,
    "cosh": cosh,
    "sinh": sinh,
}


_SYNCHRONOUS = {
    "copy-done": "copy",
    "all-reduce-done": "all-reduce",
    "all-gather-done": "all-gather",
    "collective-permute-done": "collective-permute",
    "async-done": "call",
}


class AsyncExpander(ComputationPass):
    """Replaces asynchronous pairs by the synchronous operation: the backend chooses what to overlap.

    copy-done(copy-start(x)) -> copy(x);  async-done(async-start(x), calls=f) -> call(x), to_apply=f

    Requires: no schedule.
    Ensures: no pair of a start and its done is left, but those of send, recv and of starts that other
        instructions read, too.
    Cost: linear.
    Source: the definition of the pairs.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        changed = False
        for done in computation.instructions:
            chain = _chain(done) if done.opcode in _SYNCHRONOUS else []
            if chain and all(len(i.users) == 1 for i in chain):
                _join(computation, done, chain)
                changed = True
        return changed


def _chain(done: HloInstruction) -> list[HloInstruction]:
    """What belongs to the end of a pair, the start last."""
    chain = [done.operands[0]]
    while chain[-1].opcode == "async-update":
        chain.append(chain[-1].operands[0])
    return chain


def _join(computation: HloComputation, done: HloInstruction, chain: list[HloInstruction]) -> None:
    """Replace a pair; the start goes though it may have effects, which the new instruction has."""
    start, opcode = chain[-1], _SYNCHRONOUS[done.opcode]
    attributes: dict[str, Any] = {} if opcode in ("copy", "call") else dict(start.attributes)
    build = HloBuilder(computation)
    build.metadata = done.metadata
    joined = build.add(opcode, *start.operands, shape=done.shape, called=start.called, **attributes)
    for early in start.control_predecessors:
        joined.add_control_predecessor(early)
    computation.replace(done, joined)
    for instruction in chain:
        computation.remove(instruction)


class MapInliner(ComputationPass):
    """Applies the operations of a map to whole arrays.

    map(x, y), to_apply=(a, b) -> add(a, negate(b))  ->  add(x, negate(y))

    Requires: no schedule; calls are inlined.
    Ensures: no map is left whose computation is elementwise.
    Cost: linear.
    Source: an elementwise operation is the same on arrays as on their elements.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"map": (_inline,)}, lambda i: True)


def _inline(site: RewriteSite) -> HloInstruction | None:
    body = site.at.to_apply
    if not is_inlinable(body) or body.root.shape.is_tuple:
        return None
    (value,) = applied(site.build, body, site.operands)
    return value
