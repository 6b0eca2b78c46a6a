"""hlo-argmax-rewriter."""

from __future__ import annotations

import math

import numpy as np

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.evaluator import Evaluator
from mpmd.compile.hlo.evaluator.reducers import identity_of
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.expand.pointwise import applied
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite

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
        """Rewrites one computation."""
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
    found = Evaluator().run(computation, columns, checked=False)
    return all(_is_better(opcode, case, float(v), int(k)) for case, v, k in zip(cases, found[0], found[1]))


def _is_better(opcode: str, case: tuple[float, int, float, int], value: float, place: int) -> bool:
    """Whether a value and its position are the reducer's result for two values and their positions."""
    a, i, b, j = case
    if math.isnan(a) or math.isnan(b):  # of two it may be either
        wanted = ({i} if math.isnan(a) else set()) | ({j} if math.isnan(b) else set())
        return math.isnan(value) and place in wanted
    best = max(a, b) if opcode == "maximum" else min(a, b)
    return value == best and place == min(k for v, k in ((a, i), (b, j)) if v == best)
