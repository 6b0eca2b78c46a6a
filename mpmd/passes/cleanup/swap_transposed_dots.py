"""mpmd-swap-transposed-dots."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass


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
    made = ir.create(
        "stablehlo.dot_general", [right, left], [transpose.results[0].type], ir.before(transpose),
        attributes, dot.location,
    )  # fmt: skip
    ir.replace(transpose, [made.results[0]])
    ir.erase(dot)
