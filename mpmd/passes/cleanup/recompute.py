"""Values computed again where they are used: residuals in a backward, constants in every fragment."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.fragments.editing import in_block_order
from mpmd.passes.fragments.residuals import (
    Maker,
    Residual,
    given,
    ops_to_remake,
    recompute,
    residuals_of,
)


class BackwardPass(FunctionPass):
    """A pass that rewrites one backward fragment after the other, in program order."""

    runs_on = "mpmd"

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_backward:
                self.rewrite_fragment(fragment)

    @abc.abstractmethod
    def rewrite_fragment(self, fragment: ir.Fragment) -> None:
        """Rewrites one backward fragment."""


_NAMES = """
    abs add and broadcast_in_dim clamp compare constant convert divide iota maximum minimum multiply negate
    not or reshape rsqrt select sign slice sqrt subtract transpose xor
"""
CHEAP = frozenset("stablehlo." + name for name in _NAMES.split())
_ROWS = CHEAP | {"stablehlo.exponential", "stablehlo.reduce"}
_PRODUCT = "stablehlo.dot_general"


class RecomputeAttention(BackwardPass):
    """Computes the scores of attention again in a backward fragment, instead of keeping their functions.

        o, p = m1["f"] (q, k, v) { s = dot q k; p = softmax s; o = dot p v; ret o, p }
        g = m1["f"(1)] (p, v, d) { ... }
        -->
        o, p = m1["f"] (q, k, v) { s = dot q k; p = softmax s; o = dot p v; ret o, p }
        g = m1["f"(1)] (p, v, d, q, k) { s = dot q k; p = softmax s; ... }

    A residual is recomputed if batched products, elementwise work and reductions compute it from values that
    the backward fragment reads anyway, and if it is as large as a product that is larger than its factors:
    probabilities, exponentials; and with it other functions of the same products: the sums of rows.  `p` is
    left unused; fragment-dce removes it.  The memory between forward and backward of a microbatch then no
    longer grows with the square of the sequence, and a backend that stitches attention never writes a matrix
    of scores.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.
    Source: recomputation in FlashAttention (Dao et al. 2022).

    Attributes:
        max_ops: operations that one residual may take.
    """

    max_ops: int = 64

    def rewrite_fragment(self, fragment: ir.Fragment) -> None:
        read = [bool(ir.users(argument)) for argument in fragment.args]
        every = residuals_of(fragment)
        residuals = [residual for residual in every if read[residual[0]]]
        makers = {maker: Maker(maker) for maker in {maker for _, _, maker in residuals}}
        have, worth = given(fragment, every), set[ir.Op]()
        for _, value, maker in residuals:  # the products whose results are kept in full
            plan = self._plan(makers[maker], value, have)
            if plan is None:
                have.add(value)
                continue
            size = math.prod(value.type.tensor.shape)
            worth |= {p for p in _products(plan) if size >= math.prod(p.results[0].type.shape)}
        have, plans = given(fragment, every), []
        for position, value, maker in residuals:
            plan = self._plan(makers[maker], value, have)
            if plan is None or not worth.issuperset(_products(plan)):
                have.add(value)
            else:
                plans.append((position, maker, plan))
        if plans:
            recompute(fragment, plans)

    def _plan(self, maker: Maker, value: ir.Value, have: set[ir.Value]) -> list[ir.Op] | None:
        """The ops that compute a residual from available values, None if it is not one of attention."""
        ops = ops_to_remake(maker, value, have, _is_of_rows, self.max_ops)
        return ops if ops and _products(ops) else None


def _products(ops: Iterable[ir.Op]) -> list[ir.Op]:
    return [op for op in ops if op.operation.name == _PRODUCT]


def _is_of_rows(op: ir.Op) -> bool:
    """Whether an op may be between attention's factors and its rows."""
    if op.operation.name == _PRODUCT:
        return _is_score(op)
    return op.operation.name in _ROWS


def _is_score(op: ir.Op) -> bool:
    """Whether a product is batched, and larger than its factors together."""
    numbers = ir.stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    if not numbers.lhs_batching_dimensions:
        return False
    factors = sum(math.prod(o.type.shape) for o in op.operands)
    return math.prod(op.results[0].type.shape) >= factors


class RecomputeCheapResiduals(BackwardPass):
    """Recomputes in a backward fragment residuals that are not worth keeping.

        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d) { z = dot d t; ret z }
        -->
        y, t = m1["f"] (w, x) { t = transpose w; y = dot x t; ret y, t }
        g = m1["f"(1)] (t, d, w) { s = transpose w; z = dot d s; ret z }

    A residual is recomputed if cheap ops (data movement and arithmetic that a compiler fuses into its use)
    compute it from values that the backward fragment reads or can read without longer live ranges: its own
    operands, and arguments of the function.  `t` and its operand are left unused; fragment-dce removes them.
    Where two residuals follow from a value that is none, such as `1 + k` and `1 - k * k` from a `tanh`, that
    value takes the place of one of them.
    Fewer bytes are then live between forward and backward of each microbatch.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.  Source: ours.

    Attributes:
        max_ops: operations that one residual may take.
    """

    max_ops: int = 24

    def rewrite_fragment(self, fragment: ir.Fragment) -> None:
        kept, plans = self._plans(fragment)
        while any(self._keep_source(fragment, residual, kept) for residual in kept):
            kept, plans = self._plans(fragment)
        if plans:
            recompute(fragment, plans)

    def _plans(self, fragment: ir.Fragment) -> tuple[list[Residual], list[Plan]]:
        """The residuals that are kept, and how the others are computed."""
        residuals = residuals_of(fragment)
        have = given(fragment, residuals)
        kept, plans = list[Residual](), list[Plan]()
        makers = {maker: Maker(maker) for maker in {maker for _, _, maker in residuals}}
        for residual in residuals:
            position, value, maker = residual
            plan = ops_to_remake(makers[maker], value, have, _is_cheap, self.max_ops)
            if plan:
                plans.append((position, maker, plan))
            else:
                have.add(value)
                kept.append(residual)
        return kept, plans

    def _keep_source(self, fragment: ir.Fragment, residual: Residual, kept: list[Residual]) -> bool:
        """Keeps what a residual is computed from in its place, if another one then follows, too."""
        position, value, maker = residual
        number = ir.result_index(value)
        found = _function_of_one(maker.returned[number], self.max_ops)
        if found is None or ir.users(value) != [fragment]:
            return False
        source, ops = found
        trial = Maker(maker)
        trial.results.setdefault(source, []).append(value)
        trial.results[trial.returned[number]].remove(value)
        have, follows = given(fragment, residuals_of(fragment)) | {value}, False
        for _, other, its_maker in kept:
            if other != value and its_maker == maker:
                follows |= bool(ops_to_remake(trial, other, have, _is_cheap, self.max_ops))
            have.add(other)
        if not follows:
            return False
        argument = fragment.args[position]
        uses, values = ir.uses(argument), {source: argument}
        where = ir.at_start(fragment.body)
        for op in ops:
            ir.clone_with(op, values, where)
        for user, operand in uses:
            ir.set_operand(user, operand, values[trial.returned[number]])
        maker.returned = [source if i == number else v for i, v in enumerate(trial.returned)]
        return True


Plan = tuple[int, ir.Fragment, list[ir.Op]]
"""The position of a residual, its forward fragment, and the ops that compute it, in order."""


def _function_of_one(value: ir.Value, most: int) -> tuple[ir.Value, list[ir.Op]] | None:
    """The one value of a fragment, of the same type, from which another follows by cheap ops, and these."""
    needed: dict[ir.Op, None] = {}
    sources: dict[ir.Value, None] = {}
    todo = [value]
    while todo:
        inner = todo.pop()
        op = ir.producer(inner)
        if op is None or len(needed) > most or len(sources) > 1:
            return None
        if op in needed:
            continue
        if _is_cheap(op):
            needed[op] = None
            todo += ir.read_by(op)
        else:
            sources[inner] = None
    if len(sources) != 1 or not needed:
        return None
    (source,) = sources
    return (source, in_block_order(needed)) if source.type == value.type else None


def _is_cheap(op: ir.Op) -> bool:
    return op.operation.name in CHEAP and not len(op.operation.regions)


class CopyConstants(FunctionPass):
    """Recomputes a constant in each fragment that reads it.

        f = m1["f"] () { c = const 1; ret c }               f = m1["f"] () { c = const 1; ret c }
        t = transfer f to m2                          -->   t = transfer f to m2
        g = m2["g"] (t, b) { y = mul t b; ret y }           g = m2["g"] (t, b) { d = const 1; y = mul d b; ret
        y }

    A constant that one fragment computes and another one uses is cheaper to compute twice than to keep or to
    send.  The old operand is left, unused.

    Requires: nothing.  Ensures: same values.  Cost: linear in operands, times transfers on the way.
    Source: openxla/shardy MPMD, `copy_constants`.
    """

    def rewrite_function(self, f: ir.Func) -> None:
        """Consumers first, so that a clone is not visited again."""
        for fragment in reversed(ir.fragments(f)):
            for value, arg in zip(fragment.inputs, fragment.args):
                source = value_inside(value)
                constant = None if source is None else ir.producer(source)
                if ir.is_constant(constant):
                    copy = ir.clone(constant, ir.at_start(fragment.body))
                    ir.replace_uses(arg, copy.result)


def value_inside(value: ir.Value) -> ir.Value | None:
    op = ir.producer(value)
    while isinstance(op, ir.Transfer):
        value = op.tensor
        op = ir.producer(value)
    return op.returned[ir.result_index(value)] if isinstance(op, ir.Fragment) else None


class CopyCheapConstants(FunctionPass):
    """Recomputes cheap functions of constants in unnamed work outside of microbatches.

        z = m1[] () { c = const 0; b = broadcast c; ret b }
        f = m1["f"] cc=0 (z)
        u = m1[] (f, z) { s = add f z; ret s }
        -->
        z = m1[] () { c = const 0; b = broadcast c; ret b }
        f = m1["f"] cc=0 (z)
        u = m1[] (f, z) { c = const 0; b = broadcast c; s = add f b; ret s }

    The value need then not be kept, or sent, until it is used.  Its operand is left unused; fragment-dce
    removes it.  Fragments of microbatches are left alone, so that they stay equal.

    Requires: fragments in program order.  Ensures: same values.  Cost: linear times `max_ops`.
    Source: ours, after `copy_constants` of openxla/shardy MPMD.

    Attributes:
        max_ops: operations that one value may take.
    """

    runs_on = "entry"
    max_ops: int = 8

    def rewrite_function(self, f: ir.Func) -> None:
        for fragment in ir.fragments(f):
            if fragment.is_user or fragment.call_counter is not None:
                continue
            first = fragment.body.operations[0]
            for value, arg in zip(fragment.inputs, fragment.args):
                source = value_inside(value)
                ops = [] if source is None else self._plan(source)
                if source is not None and ops:
                    values: dict[ir.Value, ir.Value] = {}
                    for op in ops:
                        ir.clone_with(op, values, ir.before(first))
                    ir.replace_uses(arg, values[source])

    def _plan(self, source: ir.Value) -> list[ir.Op]:
        """The cheap ops that compute a value from nothing, producers first; none if there is no such plan."""
        chosen: dict[ir.Op, None] = {}
        todo = [source]
        while todo:
            op = ir.producer(todo.pop())
            if op is None or op.operation.name not in CHEAP or len(op.operation.regions):
                return []
            chosen.pop(op, None)
            chosen[op] = None
            if len(chosen) > self.max_ops:
                return []
            todo += op.operands
        return list(reversed(chosen))
