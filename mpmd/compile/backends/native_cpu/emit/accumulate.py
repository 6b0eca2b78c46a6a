"""Accumulators of reductions: several vectors at once, so that their latency overlaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.emit.operations import emit_combine
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.llvm.builder import FunctionBuilder
from mpmd.compile.backends.native_cpu.llvm.types import Value, constant, lanes_of, vector
from mpmd.compile.backends.native_cpu.storage import REGISTER, narrow, round_to
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.kernels.plan import Apply, KernelPlan, ReduceNode, arguments

_EXTREMES = ("maximum", "minimum")


def sum_dtype(dtype: str) -> str:
    """The dtype in which a reduction's partial results are kept in memory."""
    return "f32" if dtype in ("bf16", "f16") else dtype


def reduce_node(plan: KernelPlan, number: int) -> ReduceNode:
    """A node that is known to be a reduction."""
    node = plan.nodes[number]
    assert isinstance(node, ReduceNode)
    return node


def identity(node: ReduceNode, lanes: int) -> Value:
    """The neutral value of a reduction in every lane."""
    return constant(REDUCTIONS[node.op].identity(node.dtype), vector(REGISTER[node.dtype], lanes))


def dot_factors(target: CpuTarget, plan: KernelPlan, number: int) -> tuple[int, ...]:
    """Numbers of the bf16 values, one or two, whose products a reduction adds up in f32; none if it does not.

    One instruction multiplies such pairs and adds two neighbouring products to a sum: that of `x` with ones
    is the sum of `x`, which need not be widened.  It takes denormals for zero, as every thread of XLA does.
    """
    node = reduce_node(plan, number)
    if not target.bf16_dot or target.vector_bytes != 64 or node.op != "add" or node.dtype != "f32":
        return ()
    arg = plan.nodes[node.arg]
    multiplied = isinstance(arg, Apply) and arg.op == "multiply"
    factors = arguments(arg) if multiplied else (node.arg,)
    narrow = [_widened(plan, n) for n in factors]
    return tuple(n for n in narrow if n is not None) if None not in narrow else ()


def _widened(plan: KernelPlan, number: int) -> int | None:
    """The bf16 value along the row that a value was converted from."""
    node = plan.nodes[number]
    if not isinstance(node, Apply) or node.op != "convert" or plan.rank - 1 not in plan.depends[number]:
        return None
    return node.args[0] if plan.nodes[node.args[0]].dtype == "bf16" else None


def _add_pairs(scope: Scope, factors: Sequence[int], total: Value, mask: Value | None) -> Value:
    """Add the products of one vector of bf16 values to half as many sums."""
    f, raw = scope.f, []
    type_ = vector("bfloat", 2 * lanes_of(total.type))
    for number in factors:
        value = scope.wide(number)
        if mask is not None:
            value = f.select(mask, value, constant(0, value.type))
        raw.append(f.cast("bitcast", narrow(f, value, "bf16"), type_))
    if len(raw) == 1:
        raw.append(constant(1.0, type_))
    return f.intrinsic("llvm.x86.avx512bf16.dpbf16ps.256", total.type, total, raw[0], raw[1])


class Accumulators:
    """The running values of the reductions of one pass over a row.

    For each reduction `unroll` vectors, and one scalar for the tail of targets without cheap masks.  Where
    masks have registers, a maximum or minimum of floats has one besides: the largest number so far takes one
    instruction, and whether one of two vectors has a NaN another one.

    Args:
        f: the function.
        plan: the plan.
        reductions: numbers of the reductions.
        lanes: elements of a vector.
        unroll: vectors of a round.
    """

    def __init__(
        self, f: FunctionBuilder, plan: KernelPlan, reductions: Sequence[int], lanes: int, unroll: int
    ) -> None:
        self.f = f
        self.plan = plan
        self.reductions = list(reductions)
        self.unroll = unroll
        self.lanes = lanes
        self.each = unroll + 1
        self.start: list[Value] = []
        for number in self.reductions:
            node = reduce_node(plan, number)
            wide = lanes // 2 if dot_factors(f.target, plan, number) else lanes
            last = constant(0, vector("i1", lanes)) if self._marks_nan(node) else identity(node, 1)
            self.start += [identity(node, wide)] * unroll + [last]

    def _marks_nan(self, node: ReduceNode) -> bool:
        """Whether NaNs are looked for apart."""
        masks = self.f.target.mask_registers and self.lanes == self.f.target.lanes()
        return masks and node.op in _EXTREMES and REGISTER[node.dtype] == "float"

    def add(self, scopes: Sequence[tuple[Lanes, Scope]], values: Sequence[Value]) -> list[Value]:
        """The values after one round of vectors."""
        f, result = self.f, list(values)
        for k, number in enumerate(self.reductions):
            node = reduce_node(self.plan, number)
            if self._marks_nan(node):
                self._add_extremes(node, scopes, result, k * self.each)
                continue
            factors = dot_factors(f.target, self.plan, number)
            for u, (part, scope) in enumerate(scopes):
                if factors:
                    at = k * self.each + u
                    result[at] = _add_pairs(scope, factors, result[at], part.mask)
                    continue
                value = scope.wide(node.arg)
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                at = k * self.each + (self.unroll if part.count == 1 else u)
                result[at] = emit_combine(f, node.op, result[at], value, node.dtype)
        return result

    def _add_extremes(
        self, node: ReduceNode, scopes: Sequence[tuple[Lanes, Scope]], result: list[Value], first: int
    ) -> None:
        """Add to a maximum or minimum of numbers, and to the mask of where a NaN was."""
        f, vectors = self.f, list[Value]()
        for part, scope in scopes:
            value = scope.wide(node.arg)
            if part.mask is not None:
                value = f.select(part.mask, value, identity(node, part.count))
            vectors.append(value)
        for u, value in enumerate(vectors):
            result[first + u] = self._extreme(node, value, result[first + u])
        mask = result[first + self.unroll]
        for low in range(0, len(vectors), 2):
            pair = vectors[low : low + 2]
            mask = f.or_(mask, f.compare("uno", pair[0], pair[-1]))
        result[first + self.unroll] = mask

    def _extreme(self, node: ReduceNode, value: Value, most: Value) -> Value:
        """The larger or smaller one; of a NaN and a number `most`, which never is a NaN."""
        larger = node.op == "maximum"
        return self.f.larger_number(value, most) if larger else self.f.smaller_number(value, most)

    def _finish_extreme(self, node: ReduceNode, values: Sequence[Value]) -> Value:
        f = self.f
        *vectors, mask = values
        while len(vectors) > 1:
            vectors = [self._extreme(node, vectors[0], vectors[1]), *vectors[2:]]
        most = f.lane_fold(vectors[0], lambda a, b: self._extreme(node, a, b))
        return f.select(f.any_lane(mask), constant(math.nan, most.type), most)

    def finish(self, values: Sequence[Value]) -> dict[int, Value]:
        """Each reduction's result, a scalar."""
        f, results = self.f, {}
        for k, number in enumerate(self.reductions):
            node = reduce_node(self.plan, number)

            def combine(a: Value, b: Value, node: ReduceNode = node) -> Value:
                return emit_combine(f, node.op, a, b, node.dtype)

            own = values[k * self.each : (k + 1) * self.each]
            if self._marks_nan(node):
                results[number] = self._finish_extreme(node, own)
                continue
            *vectors, scalar = own
            while len(vectors) > 1:
                vectors = [combine(vectors[0], vectors[1]), *vectors[2:]]
            total = f.lane_fold(vectors[0], combine) if lanes_of(vectors[0].type) > 1 else vectors[0]
            if not f.target.mask_registers:
                total = combine(total, scalar)
            results[number] = round_to(f, total, node.dtype)
        return results
