"""Ops of StableHLO rewritten to fewer or better ones: what unrolled loops leave, and transposed products."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.cleanup import stablehlo_arithmetic as arithmetic
from mpmd.passes.cleanup import stablehlo_slices as slices
from mpmd.passes.cleanup.stablehlo_arithmetic import Facts

Rewrite = Callable[[ir.Op, Facts], ir.Value | None]
"""Returns the replacement of an op's result, which may be that of a new op; None: does not apply."""

Table = Mapping[str, tuple[Rewrite, ...]]
"""Op name -> what may apply to it."""


def _table() -> dict[str, tuple[Rewrite, ...]]:
    table: dict[str, tuple[Rewrite, ...]] = dict.fromkeys(arithmetic.SCALAR_OPS, (arithmetic.fold_scalars,))
    more: dict[str, tuple[Rewrite, ...]] = {
        "add": (arithmetic.add_zero, arithmetic.constant_last),
        "subtract": (arithmetic.subtract_nothing, arithmetic.nothing_left),
        "multiply": (
            arithmetic.multiply_by_one,
            arithmetic.nothing_left,
            arithmetic.constant_last,
        ),
        "divide": (arithmetic.divide_by_one,),
        "maximum": (arithmetic.constant_last,),
        "minimum": (arithmetic.constant_last,),
        "and": (
            arithmetic.with_neutral,
            arithmetic.nothing_left,
            arithmetic.constant_last,
        ),
        "or": (arithmetic.with_neutral, arithmetic.constant_last),
        "xor": (arithmetic.constant_last,),
        "select": (arithmetic.fold_select,),
        "convert": (arithmetic.same_type,),
        "reshape": (
            arithmetic.same_type,
            arithmetic.reshape_of_reshape,
            slices.reshape_of_splat,
        ),
        "transpose": (arithmetic.transpose,),
        "broadcast_in_dim": (arithmetic.broadcast,),
        "dynamic_slice": (slices.static_slice,),
        "slice": (slices.simpler_slice,),
        "dynamic_update_slice": (slices.update_all, slices.concatenate_updates),
        "concatenate": (slices.flatten_concatenate,),
    }
    for name, rewrites in more.items():
        table["stablehlo." + name] = table.get("stablehlo." + name, ()) + rewrites
    return table


REWRITES = _table()
_FOLDS = {
    **dict.fromkeys(arithmetic.FOLDED_OPS, (arithmetic.fold,)),
    "stablehlo.add": (arithmetic.fold,),
}
_WITH_CONSTANTS = {
    name: (*_FOLDS.get(name, ()), *REWRITES.get(name, ())) for name in dict.fromkeys((*REWRITES, *_FOLDS))
}


class SimplifyStablehlo(FunctionPass):
    """Folds known indices, slices and shapes.

        i = add 1 1; b = dynamic_update_slice b0 x at 0; b1 = dynamic_update_slice b y at 1
        s = dynamic_slice b1 at (sub i 1)
        -->  s = y

    The leftovers of unrolled loops are removed: arithmetic on scalar integers, slices at constant indices,
    buffers written piece by piece and read piece by piece.  Floating point is only changed where that is
    exact, except for `x + 0`, which is `x` as in XLA: a zero keeps its sign.  Folds that make the text larger
    are left out: an iota stays.  `sdy.sharding` on an op keeps it.  With `fold_constants` ops of constants
    alone are computed too.

    Requires: nothing.  Ensures: same values; pure unused ops are gone.  Cost: linear in ops and rewrites.
    Source: the effect of StableHLO's target-independent optimization on such programs.

    Attributes:
        fold_constants: compute ops of constants alone, of up to 65536 elements where these differ.
    """

    runs_on = "any"
    fold_constants: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Fragments first."""
        if f.is_external:
            return
        table = _WITH_CONSTANTS if self.fold_constants else REWRITES
        for fragment in ir.fragments(f):
            _simplify(fragment, table)
        _simplify(f, table)


def _simplify(where: ir.Func | ir.Fragment, table: Table) -> None:
    """Removes unused ops and rewrites, until nothing applies; leaves out fragments in a function."""
    while _round(_without_dead_ops(where), table):
        pass


def _round(ops: list[ir.Op], table: Table) -> bool:
    """Rewrites until nothing applies, but for what applies once unused ops are gone; whether anything did."""
    facts = Facts()
    todo = collections.deque(op for op in ops if op.operation.name in table)
    changed, waiting = False, set[ir.Op]()
    while todo:
        op = todo.popleft()
        if changed:
            waiting.discard(op)
            if ir.is_unused(op):
                continue
        again = _rewrite(op, facts, table)
        if again and not changed:  # mostly nothing ever applies
            changed, waiting = True, set(todo)
        for other in again:
            if other not in waiting and other.operation.name in table:
                waiting.add(other)
                todo.append(other)
    return changed


def _rewrite(op: ir.Op, facts: Facts, table: Table) -> list[ir.Op]:
    """Applies the first rewrite that fits; the ops to visit again."""
    if "sdy.sharding" in op.attributes:
        return []
    for rewrite in table[op.operation.name]:
        value = rewrite(op, facts)
        if value is None or value.type != op.results[0].type:
            continue
        users = list(dict.fromkeys(ir.users(op)))
        ir.replace_uses(op.results[0], value)
        maker = ir.producer(value)
        return users if maker is None else [maker, *users]
    return []


def _without_dead_ops(where: ir.Func | ir.Fragment | ir.Block) -> list[ir.Op]:
    """Erases pure ops that nothing uses, last first, at any depth; returns the others, outer before inner.

    Terminators and the contents of fragments are left out.
    """
    left: list[ir.Op] = []
    for op in reversed(ir.ops(where)):
        inside: list[ir.Op] = []
        if len(op.operation.regions) and not isinstance(op, ir.Fragment):
            blocks = [block for region in op.operation.regions for block in region]
            inside = [inner for block in blocks for inner in _without_dead_ops(block)]
        if len(op.results) and ir.is_trivially_dead(op):
            ir.erase(op)
        else:
            left += [*reversed(inside), op]
    return left[::-1]


class SwapTransposedDots(FunctionPass):
    """Computes a transposed matrix product with its factors swapped instead.

        d = dot_general y, x contracting [0] x [0]     (f32[m,n])
        t = transpose d [1, 0]                         (f32[n,m])
        -->
        t = dot_general x, y contracting [0] x [0]     (f32[n,m])

    JAX writes the gradient of a weight in the first form, for which XLA:CPU copies a whole factor before the
    product.  Sums are the same terms in an order that the backend chooses, so that last bits may differ.

    Requires: nothing.  Ensures: no product whose only use is the transpose that swaps its factors' dims.
    Cost: linear.  Source: ours.
    """

    runs_on = "any"

    def rewrite_function(self, f: ir.Func) -> None:
        for op in ir.walk(f):
            if op.operation.name == "stablehlo.transpose":
                dot = ir.producer(op.operands[0])
                if dot is not None and dot.operation.name == "stablehlo.dot_general" and _swaps(op, dot):
                    _swap(op, dot)


def _swaps(transpose: ir.Op, dot: ir.Op) -> bool:
    """Whether the transpose swaps the factors' dims of a product without other users."""
    if "algorithm" in dot.attributes or len(ir.users(dot)) > 1:
        return False
    numbers = ir.stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    batch = len(numbers.lhs_batching_dimensions)
    left = len(dot.operands[0].type.shape) - batch - len(numbers.lhs_contracting_dimensions)
    rank = len(dot.results[0].type.shape)
    wanted = [*range(batch), *range(batch + left, rank), *range(batch, batch + left)]
    return list(ir.DenseI64ArrayAttr(transpose.attributes["permutation"])) == wanted


def _swap(transpose: ir.Op, dot: ir.Op) -> None:
    numbers = ir.stablehlo.DotDimensionNumbers(dot.attributes["dot_dimension_numbers"])
    attributes = dict(dot.attributes.items())
    attributes["dot_dimension_numbers"] = ir.stablehlo.DotDimensionNumbers.get(
        lhs_batching_dimensions=numbers.rhs_batching_dimensions,
        rhs_batching_dimensions=numbers.lhs_batching_dimensions,
        lhs_contracting_dimensions=numbers.rhs_contracting_dimensions,
        rhs_contracting_dimensions=numbers.lhs_contracting_dimensions,
    )
    if "precision_config" in attributes:
        attributes["precision_config"] = ir.ArrayAttr.get(
            list(reversed(list(ir.ArrayAttr(attributes["precision_config"]))))
        )
    left, right = dot.operands
    product = ir.create(
        "stablehlo.dot_general", [right, left], [transpose.results[0].type], ir.before(transpose),
        attributes, dot.location,
    )  # fmt: skip
    ir.replace(transpose, [product.results[0]])
    ir.erase(dot)
