"""A plan as the epilogue of a matrix product: operations on sums while they are in L1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpmd.compile.backends.native_cpu.emit.loop import store_all, stored_nodes
from mpmd.compile.backends.native_cpu.emit.places import Lanes
from mpmd.compile.backends.native_cpu.emit.scope import Scope
from mpmd.compile.backends.native_cpu.emit.together import vectors_at_once
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Position
from mpmd.compile.kernels.index import dim, linear, strides_of
from mpmd.compile.kernels.plan import KernelPlan, Load
from mpmd.compile.llvm.builder import FunctionBuilder
from mpmd.compile.llvm.target import CpuTarget
from mpmd.compile.llvm.types import Value, lanes_of
from mpmd.errors import CompileError


@dataclass(frozen=True)
class PlanEpilogue:
    """The epilogue that a plan of kind `loop` over `batch..., m, n` describes.

    Attributes:
        plan: the plan; not normalised.
        sums: number of the operand for the product's sums.  It is read as a dense array of the
            accumulators' dtype, and is not an argument of the kernel.
    """

    plan: KernelPlan
    sums: int

    @property
    def pointers(self) -> tuple[str, ...]:
        """One pointer per operand but the sums, `p` and the operand's number."""
        return tuple(f"p{k}" for k in range(len(self.plan.operands)) if k != self.sums)

    def check(self, gemm: Gemm) -> None:
        """Refuse a plan that does not fit a product.

        Raises:
            CompileError: the space, a reduction, or the way the sums are read.
        """
        plan, space = self.plan, (*gemm.batch, gemm.m, gemm.n)
        if plan.kind != "loop" or plan.extents != space:
            raise CompileError(
                f"epilogue {plan.name} is a {plan.kind} kernel over {plan.extents}; "
                f"the product needs a loop over {space}"
            )
        dense = linear([dim(d) for d in range(plan.rank)], strides_of(space))
        for node in plan.nodes:
            if isinstance(node, Load) and node.operand == self.sums and node.index != dense:
                raise CompileError(f"epilogue {plan.name} reads the sums at {node.index}, not at {dense}")
        if plan.operands[self.sums].dtype != gemm.accumulator:
            raise CompileError(
                f"epilogue {plan.name} reads the sums as {plan.operands[self.sums].dtype}; "
                f"they are {gemm.accumulator}"
            )

    def vectors_at_once(self, target: CpuTarget) -> int:
        """How many vectors of sums are best given to `emit` together."""
        return vectors_at_once(self.plan, target, stored_nodes(self.plan.stores))

    def emit(self, f: FunctionBuilder, parts: Sequence[tuple[Value, Position]]) -> None:
        plan = self.plan
        scopes: list[Scope] = []
        pointers = {k: f.arguments[f"p{k}"] for k in range(len(plan.operands)) if k != self.sums}
        for sums, at in parts:
            dims = dict(enumerate((*at.batch, at.row)))
            lanes = Lanes(plan.rank - 1, at.column, lanes_of(sums.type), at.mask)
            scope = Scope(f, plan, pointers, dims=dims, lanes=lanes)
            for number, node in enumerate(plan.nodes):
                if isinstance(node, Load) and node.operand == self.sums:
                    scope.define(number, sums)
            scopes.append(scope)
        store_all(scopes)
