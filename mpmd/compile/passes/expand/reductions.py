"""Reductions that kernels lack: of several arrays at once, by other than one plain operation, of batch norms.

An argmax, two arrays reduced together, becomes a maximum and the least index that has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator
from mpmd.compile.hlo.evaluator.values import identity_of
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.functions import applied, is_inlinable
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule, TrackingBuilder, reducer

Values = Sequence[HloInstruction]


class ReductionExpander(ComputationPass):
    """Reduces by any computation, and several arrays at once, by joining neighbours until one is left.

    reduce(x: [n], y: [n]), to_apply=f
      -> (x, y) = f(the even elements, the odd ones): n/2 of each; again, until there is one of each

    An element that has no neighbour waits until the end.  The order is kept: f need only be associative.

    Requires: no schedule; calls are inlined.
    Ensures: no reduction is left except by an operation of two numbers, and those of computations that are
        not elementwise.
    Cost: as many copies of the computation as the length has bits; at run time linear.
    Source: a tree of halves, as every vector machine sums.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reduce": (_expand,)}, lambda i: True)


def is_special(site: RewriteSite) -> bool:
    """Whether a reduction needs more than one operation of two numbers, and is elementwise."""
    computation = site.at.to_apply
    return (len(site.operands) > 2 or reducer(computation) is None) and is_inlinable(computation)


def result_of(site: RewriteSite, values: Values) -> HloInstruction:
    return site.build.tuple(values) if site.shape.is_tuple else values[0]


def broadcast_to_results(site: RewriteSite, inits: Values) -> list[HloInstruction]:
    shape = site.shape.elements[0] if site.shape.is_tuple else site.shape
    return [site.build.broadcast(i, shape.dims) for i in inits]


def _expand(site: RewriteSite) -> HloInstruction | None:
    count = len(site.operands) // 2
    arrays, inits = site.operands[:count], site.operands[count:]
    build, computation = site.build, site.at.to_apply
    if count > 1 and 0 in arrays[0].shape.dims:
        return result_of(site, broadcast_to_results(site, inits))
    if not is_special(site):
        return None
    values = list(arrays)
    for d in sorted(site.at.dimensions, reverse=True):  # the last first, as elements are counted
        values = _joined(build, computation, values, d)
    begin = broadcast_to_results(site, inits)
    values = [build.reshape(v, begin[0].shape.dims) for v in values]
    return result_of(site, applied(build, computation, [*begin, *values]))


def _joined(
    build: TrackingBuilder, computation: HloComputation, values: list[HloInstruction], d: int
) -> list[HloInstruction]:
    waiting: list[HloInstruction] = []
    while (size := values[0].shape.dims[d]) > 1:
        if size % 2:
            last = [along(build, v, d, size - 1, size) for v in values]
            waiting = applied(build, computation, [*last, *waiting]) if waiting else last
        even = [along(build, v, d, 0, size - size % 2, 2) for v in values]
        odd = [along(build, v, d, 1, size - size % 2, 2) for v in values]
        values = applied(build, computation, [*even, *odd])
    return applied(build, computation, [*values, *waiting]) if waiting else values


def along(
    build: TrackingBuilder, value: HloInstruction, d: int, start: int, limit: int, step: int = 1
) -> HloInstruction:
    dims = value.shape.dims
    if (start, limit, step) == (0, dims[d], 1):
        return value
    starts, limits, steps = [0] * len(dims), list(dims), [1] * len(dims)
    starts[d], limits[d], steps[d] = start, limit, step
    return build.slice(value, starts, limits, steps)


_ORDERS = frozenset(("parameter", "compare", "and", "or", "not", "select", "tuple"))
"""Operations whose result depends only on the order of their parameters."""
_PLACES = frozenset(f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64))
_VALUES = _PLACES | {"pred", "bf16", "f16", "f32", "f64"}


class ArgmaxRewriter(ComputationPass):
    """Finds the position of a maximum by two plain reductions, which become one pass over rows each.

    (v, i) = reduce(x, places), to_apply=the larger value, of equal ones the smaller place
      -> v = reduce-maximum(x); i = reduce-minimum(select(x == v or isnan(x), places, largest integer))

    Minima likewise.  The reducer may have any form: if it only compares its parameters, evaluating it for all
    orders of them shows which reduction it is.

    Requires: no schedule; calls are inlined.
    Ensures: no such reduction of a value and its place is left.
    Cost: linear.
    Source: the definition; a NaN is larger and smaller than all numbers, and the first of several counts.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        return Rewriter(computation).run({"reduce": (_rewrite,)}, lambda i: len(i.operands) == 4)


def _rewrite(site: RewriteSite) -> HloInstruction | None:
    x, places, first, start = site.operands
    if x.shape.dtype not in _VALUES or places.shape.dtype not in _PLACES:
        return None
    opcode = _meaning(site.at.to_apply)
    if opcode is None:
        return None
    build, dims, module = site.build, site.at.dimensions, site.build.computation.module
    better = scalar_computation(module, opcode, x.shape.dtype)
    best = build.reduce([x], [build.constant(np.asarray(identity_of(opcode, x.shape.dtype)))], dims, better)
    kept = [d for d in range(x.shape.rank) if d not in dims]
    hit = build.compare(x, build.broadcast(best, x.shape.dims, kept), "EQ")
    if x.shape.info.kind == "float":
        hit = build.add("or", hit, build.compare(x, x, "NE"))
    dtype = places.shape.dtype
    last = build.constant(np.asarray(identity_of("minimum", places.shape.dtype)))
    candidates = build.select(hit, places, build.broadcast(last, places.shape.dims))
    smallest = scalar_computation(module, "minimum", dtype)
    place = build.reduce([candidates], [last], dims, smallest)
    out = best.shape.dims
    begin = [build.broadcast(first, out), build.broadcast(start, out)]
    return build.tuple(applied(build, site.at.to_apply, [*begin, best, place]))


def _meaning(computation: HloComputation) -> str | None:
    """The reduction of the values in a reducer of pairs: maximum or minimum; None if it is neither."""
    if len(computation.parameters) != 4 or not _only_compares(computation):
        return None
    return next((o for o in ("maximum", "minimum") if _is(computation, o)), None)


def _only_compares(computation: HloComputation) -> bool:
    """Whether the result depends only on the order of the two values and of the two positions."""
    a, i, b, j = computation.parameters
    pairs = ({a, b}, {i, j})
    for instruction in computation:
        if instruction.opcode not in _ORDERS:
            return False
        if instruction.opcode == "compare":
            total = instruction.attributes.get("comparison_type") == "TOTALORDER"
            if total or not any(set(instruction.operands) <= pair for pair in pairs):
                return False
    root = computation.root
    return root.opcode == "tuple" and len(root.operands) == 2


def _is(computation: HloComputation, opcode: str) -> bool:
    """Whether a reducer that only compares takes the better value, and of equal ones the smaller position."""
    value, place = (computation.parameters[k].shape for k in range(2))
    values = [0.0, 1.0, *([np.nan] if value.info.kind == "float" else [])]
    cases = [(a, i, b, j) for a in values for b in values for i, j in ((0, 1), (1, 0), (1, 1))]
    types = [s.numpy_dtype for s in (value, place, value, place)]
    columns = [np.array(column).astype(t) for column, t in zip(zip(*cases), types)]
    results = Evaluator().run(computation, columns, checked=False)
    return all(
        _is_better(opcode, case, float(v), int(k)) for case, v, k in zip(cases, results[0], results[1])
    )


def _is_better(opcode: str, case: tuple[float, int, float, int], value: float, place: int) -> bool:
    """Whether a value and its position are the reducer's result for two values and their positions."""
    a, i, b, j = case
    if math.isnan(a) or math.isnan(b):  # of two it may be either
        wanted = ({i} if math.isnan(a) else set()) | ({j} if math.isnan(b) else set())
        return math.isnan(value) and place in wanted
    best = max(a, b) if opcode == "maximum" else min(a, b)
    return value == best and place == min(k for v, k in ((a, i), (b, j)) if v == best)


class BatchNormExpander(ComputationPass):
    """Computes batch normalisation, its inference and its gradient by reductions and elementwise work.

    batch-norm-inference(x, scale, offset, mean, variance)
      -> (x - mean) * rsqrt(variance + epsilon) * scale + offset

    Requires: no schedule.
    Ensures: no batch-norm operation is left; narrow floats are summed in f32.
    Cost: linear.
    Source: Ioffe and Szegedy, "Batch Normalization", 2015; the gradient is the one given there.
    """

    def rewrite_computation(self, computation: HloComputation) -> bool:
        rules: dict[str, tuple[Rule, ...]] = {
            "batch-norm-training": (_training,),
            "batch-norm-inference": (_inference,),
            "batch-norm-grad": (_gradient,),
        }
        return Rewriter(computation).run(rules, lambda instruction: True)


class _Norm:
    """Shared parts of all three operations."""

    def __init__(self, site: RewriteSite) -> None:
        self.site = site
        self.build = site.build
        self.feature = cast(int, site.at.attributes["feature_index"])
        self.epsilon = cast(float, site.at.attributes["epsilon"])
        first = site.operands[0].shape
        self.dtype = "f32" if first.info.bits < 32 else first.dtype
        self.dims = first.dims
        self.over = tuple(d for d in range(first.rank) if d != self.feature)
        self.count = max(first.size // max(first.dims[self.feature], 1), 1)

    def wide(self, number: int) -> HloInstruction:
        """An operand in the type of the computation; a vector as one value per feature everywhere."""
        value = self.build.convert(self.site.operands[number], self.dtype)
        return value if value.shape.rank > 1 or len(self.dims) == 1 else self.spread(value)

    def spread(self, vector: HloInstruction) -> HloInstruction:
        return self.build.broadcast(vector, self.dims, (self.feature,))

    def sum(self, value: HloInstruction) -> HloInstruction:
        module = self.build.computation.module
        zero = self.build.full(0, self.dtype, ())
        return self.build.reduce([value], [zero], self.over, scalar_computation(module, "add", self.dtype))

    def mean(self, value: HloInstruction) -> HloInstruction:
        total = self.sum(value)
        return self.op("divide", total, self.build.full(self.count, self.dtype, total.shape.dims))

    def op(self, opcode: str, *values: HloInstruction) -> HloInstruction:
        return self.build.add(opcode, *values)

    def shifted(self, variance: HloInstruction) -> HloInstruction:
        return self.op("add", variance, self.build.full(self.epsilon, self.dtype, variance.shape.dims))

    def results(self, *values: HloInstruction) -> HloInstruction:
        shapes = self.site.shape.elements
        return self.build.tuple([self.build.convert(v, s.dtype) for v, s in zip(values, shapes)])


def _training(site: RewriteSite) -> HloInstruction | None:
    n = _Norm(site)
    x = n.wide(0)
    mean = n.mean(x)
    centred = n.op("subtract", x, n.spread(mean))
    variance = n.mean(n.op("multiply", centred, centred))
    scaled = n.op("multiply", centred, n.spread(n.op("rsqrt", n.shifted(variance))))
    value = n.op("add", n.op("multiply", scaled, n.wide(1)), n.wide(2))
    return n.results(value, mean, variance)


def _inference(site: RewriteSite) -> HloInstruction | None:
    n = _Norm(site)
    x, scale, offset, mean, variance = (n.wide(i) for i in range(5))
    scaled = n.op("multiply", n.op("subtract", x, mean), n.op("rsqrt", n.shifted(variance)))
    value = n.op("add", n.op("multiply", scaled, scale), offset)
    return site.build.convert(value, site.shape.dtype)


def _gradient(site: RewriteSite) -> HloInstruction | None:
    n = _Norm(site)
    x, scale, mean, variance, upstream = (n.wide(i) for i in range(5))
    centred = n.op("subtract", x, mean)
    shifted = n.shifted(variance)
    inverse = n.op("rsqrt", shifted)
    product = n.op("multiply", upstream, centred)
    to_scale = n.sum(n.op("multiply", product, inverse))
    to_offset = n.sum(upstream)
    slope = n.op("divide", n.op("multiply", centred, n.spread(n.mean(product))), shifted)
    inner = n.op("subtract", n.op("subtract", upstream, n.spread(n.mean(upstream))), slope)
    to_x = n.op("multiply", n.op("multiply", scale, inverse), inner)
    return n.results(to_x, to_scale, to_offset)
