"""Accumulators of reductions: several vectors at once, so that their latency overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.kernels.operations import (
    emit_combine,
    extreme_number,
    leaves_nan_out,
    nan_among,
    no_nan,
    with_nan,
)
from mpmd.compile.backends.native_cpu.kernels.places import Lanes
from mpmd.compile.backends.native_cpu.kernels.scope import Scope
from mpmd.compile.backends.native_cpu.storage import REGISTER, round_to
from mpmd.compile.kernels.kernel_plan import KernelPlan, ReduceNode
from mpmd.compile.kernels.operations import REDUCTIONS
from mpmd.compile.llvm.function_builder import FunctionBuilder
from mpmd.compile.llvm.llvm_types import Value, constant, lanes_of, vector


def sum_dtype(dtype: str) -> str:
    """The dtype in which a reduction's partial results are kept in memory."""
    return "f32" if dtype in ("bf16", "f16") else dtype


def reduce_node(plan: KernelPlan, number: int) -> ReduceNode:
    node = plan.nodes[number]
    assert isinstance(node, ReduceNode)
    return node


def identity(node: ReduceNode, lanes: int) -> Value:
    return constant(REDUCTIONS[node.op].identity(node.dtype), vector(REGISTER[node.dtype], lanes))


class Accumulators:
    """The running values of the reductions of one pass over a row.

    For each reduction `unroll` vectors, and one scalar for the tail of targets without cheap masks; where
    maxima and minima leave NaN out, a mask of the NaN seen.

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
        self.nodes = {number: reduce_node(plan, number) for number in reductions}
        self.unroll = unroll
        self.each = unroll + 1
        self.start: list[Value] = []
        for node in self.nodes.values():
            self.start += [identity(node, lanes)] * unroll + [identity(node, 1)]
        self.masks: dict[int, int] = {}  # number of the value that is the mask of a reduction
        for number, node in self.nodes.items():
            type_ = vector(REGISTER[node.dtype], lanes)
            if leaves_nan_out(f, node.op, type_):
                self.masks[number] = len(self.start)
                self.start.append(no_nan(type_))

    def add(self, scopes: Sequence[tuple[Lanes, Scope]], values: Sequence[Value]) -> list[Value]:
        """The values after one round of vectors."""
        f, result = self.f, list(values)
        for k, (number, node) in enumerate(self.nodes.items()):
            round_values = []
            for u, (part, scope) in enumerate(scopes):
                value = scope.wide(node.arg)
                if part.mask is not None:
                    value = f.select(part.mask, value, identity(node, part.count))
                at = k * self.each + (self.unroll if part.count == 1 else u)
                if number in self.masks:
                    result[at] = extreme_number(f, node.op, result[at], value)
                else:
                    result[at] = emit_combine(f, node.op, result[at], value, node.dtype)
                round_values.append(value)
            if number in self.masks:
                result[self.masks[number]] = nan_among(f, result[self.masks[number]], round_values)
        return result

    def finish(self, values: Sequence[Value]) -> dict[int, Value]:
        f, results = self.f, {}
        for k, (number, node) in enumerate(self.nodes.items()):

            def combine(a: Value, b: Value, node: ReduceNode = node) -> Value:
                return emit_combine(f, node.op, a, b, node.dtype)

            *vectors, scalar = values[k * self.each : (k + 1) * self.each]
            while len(vectors) > 1:
                vectors = [combine(vectors[0], vectors[1]), *vectors[2:]]
            total = f.lane_fold(vectors[0], combine) if lanes_of(vectors[0].type) > 1 else vectors[0]
            if not f.target.mask_registers:
                total = combine(total, scalar)
            if number in self.masks:
                total = with_nan(f, values[self.masks[number]], total)
            results[number] = round_to(f, total, node.dtype)
        return results
