"""hlo-batch-norm-expander."""

from __future__ import annotations

from typing import cast

from mpmd.compile.hlo.builder import scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.passes.hlo_pass import ComputationPass
from mpmd.compile.passes.rewriter import Rewriter, RewriteSite, Rule


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
        """Rewrites one computation."""
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
        """One value per feature, everywhere."""
        return self.build.broadcast(vector, self.dims, (self.feature,))

    def sum(self, value: HloInstruction) -> HloInstruction:
        """The sum for each feature."""
        module = self.build.computation.module
        zero = self.build.full(0, self.dtype, ())
        return self.build.reduce([value], [zero], self.over, scalar_computation(module, "add", self.dtype))

    def mean(self, value: HloInstruction) -> HloInstruction:
        """The mean for each feature."""
        total = self.sum(value)
        return self.op("divide", total, self.build.full(self.count, self.dtype, total.shape.dims))

    def op(self, opcode: str, *values: HloInstruction) -> HloInstruction:
        """An elementwise operation."""
        return self.build.add(opcode, *values)

    def shifted(self, variance: HloInstruction) -> HloInstruction:
        """Variance + epsilon."""
        return self.op("add", variance, self.build.full(self.epsilon, self.dtype, variance.shape.dims))

    def results(self, *values: HloInstruction) -> HloInstruction:
        """The values in the types of the operation's results."""
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
