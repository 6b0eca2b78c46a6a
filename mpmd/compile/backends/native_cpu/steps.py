"""Thunks as steps of a native program: kernels get code, slices get addresses, waiting follows from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mpmd.compile.backends.native_cpu.attention.kernel import AttentionKernel
from mpmd.compile.backends.native_cpu.emit.epilogue import PlanEpilogue
from mpmd.compile.backends.native_cpu.emit.kernels import KernelSequence, plan_kernels
from mpmd.compile.backends.native_cpu.gemm.kernel import GemmKernel, gemm_kernel
from mpmd.compile.backends.native_cpu.gemm.problem import Gemm, Matrix
from mpmd.compile.backends.native_cpu.program import (
    Address,
    Choose,
    Program,
    Run,
    Step,
    While,
    sequence_steps,
)
from mpmd.compile.backends.native_cpu.storage import BYTES
from mpmd.compile.backends.native_cpu.target import CpuTarget
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.buffers.packing import aligned
from mpmd.compile.kernels.builder import PlanBuilder
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.matmul import MatmulPlan, View
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    ConditionalThunk,
    CopyThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
    conflict,
)


@dataclass(frozen=True)
class NativeProgram:
    """Steps, and the memory they work in.

    Attributes:
        program: its table holds the parameters, the results and the arena.
        arena_bytes: bytes of the arena: constants, temporaries of the program, partial sums of kernels.
        constants: what the arena begins with.
    """

    program: Program
    arena_bytes: int
    constants: bytes


def native_program(
    name: str, thunks: Sequence[Thunk], assignment: BufferAssignment, target: CpuTarget
) -> NativeProgram:
    """The program of a sequence of thunks.

    Args:
        name: symbol of its entry.
        thunks: what it does.
        assignment: where its values lie.
        target: the CPU.
    """
    lowering = _Lowering(assignment, target)
    steps = lowering.steps(thunks)
    constants = bytearray(assignment.constant_bytes)
    for value in assignment.constants:
        place = assignment.slices[value]
        literal = value.instruction.literal
        assert literal is not None and not isinstance(literal, tuple)
        data = literal.tobytes()
        constants[place.offset : place.offset + len(data)] = data
    pointers = lowering.arena + 1
    return NativeProgram(
        Program(name, pointers, tuple(steps)), lowering.scratch + lowering.scratch_bytes, bytes(constants)
    )


class _Lowering:
    """The work on one program."""

    def __init__(self, assignment: BufferAssignment, target: CpuTarget) -> None:
        self.assignment = assignment
        self.target = target
        self.arena = len(assignment.allocations) - 2
        self.constant_bytes = aligned(assignment.constant_bytes)
        self.scratch = self.constant_bytes + aligned(assignment.arena_bytes)
        self.scratch_bytes = 0
        self._kernels: dict[str, KernelSequence] = {}
        self._products: dict[str, GemmKernel] = {}
        self._attentions: dict[str, AttentionKernel] = {}

    def address(self, place: Slice, elements: int = 0, dtype: str = "u8") -> Address:
        """Where a slice is at run time, and so many elements further."""
        offset = place.offset + elements * BYTES[dtype]
        if place.allocation == self.arena:  # the constants
            return Address(self.arena, offset)
        if place.allocation > self.arena:
            return Address(self.arena, self.constant_bytes + offset)
        return Address(place.allocation, offset)

    def steps(self, thunks: Sequence[Thunk]) -> list[Step]:
        """Steps in order; a kernel waits only if one since the last wait touches what it touches."""
        steps: list[Step] = []
        running: list[Thunk] = []
        for thunk in thunks:
            if isinstance(thunk, WhileThunk | ConditionalThunk):
                steps.append(self._control(thunk))
                running = [thunk]
                continue
            made, scratch = self._runs(thunk)
            control = bool(running) and isinstance(running[-1], WhileThunk | ConditionalThunk)
            waits = scratch or control or any(conflict(thunk, other) for other in running)
            if made:
                made[0] = replace(made[0], waits=waits)
            running = [thunk] if waits or len(made) > 1 else [*running, thunk]
            steps += made
        return steps

    def _control(self, thunk: WhileThunk | ConditionalThunk) -> Step:
        if isinstance(thunk, WhileThunk):
            condition, body = self.steps(thunk.condition), self.steps(thunk.body)
            return While(tuple(condition), self.address(thunk.flag), tuple(body))
        branches = tuple(tuple(self.steps(b)) for b in thunk.branches)
        return Choose(self.address(thunk.selector), branches)

    def _runs(self, thunk: Thunk) -> tuple[list[Run], bool]:
        """The runs of a thunk, and whether they use the scratch memory that all kernels share."""
        if isinstance(thunk, CopyThunk):
            thunk = _copy_kernel(thunk)
        if isinstance(thunk, MatmulThunk):
            return [self._matmul(thunk)], False
        if isinstance(thunk, AttentionThunk):
            return [self._attention(thunk)], False
        assert isinstance(thunk, KernelThunk)
        key = thunk.plan.text()
        sequence = self._kernels.get(key)
        if sequence is None:
            plan = replace(thunk.plan, name=f"kernel{len(self._kernels)}")
            sequence = self._kernels[key] = plan_kernels(plan, self.target)
        temporaries, offset = [], self.scratch
        for temporary in sequence.temporaries:
            temporaries.append(Address(self.arena, offset))
            offset += aligned(temporary.bytes)
        self.scratch_bytes = max(self.scratch_bytes, offset - self.scratch)
        operands = [self.address(s) for s in thunk.operands]
        return sequence_steps(sequence, operands, temporaries), bool(temporaries)

    def _matmul(self, thunk: MatmulThunk) -> Run:
        plan = thunk.plan
        key = plan.text()
        kernel = self._products.get(key)
        if kernel is None:
            kernel = self._products[key] = self._gemm(plan, f"product{len(self._products)}")
        addresses = {
            "a": self.address(thunk.a, plan.a.offset, plan.a.dtype),
            "b": self.address(thunk.b, plan.b.offset, plan.b.dtype),
        }
        for number, place in thunk.operands.items():
            addresses["c" if plan.epilogue is None else f"p{number}"] = self.address(place)
        return Run(kernel, {p: addresses[p] for p in kernel.pointers})

    def _attention(self, thunk: AttentionThunk) -> Run:
        plan, key = thunk.plan, thunk.plan.text()
        kernel = self._attentions.get(key)
        if kernel is None:
            name = f"attention{len(self._attentions)}"
            kernel = self._attentions[key] = AttentionKernel(name, plan, self.target)
        views = {f"{side}{k}": getattr(s, side) for k, s in enumerate(plan.scores) for side in "ab"}
        views |= {f"{side}{k}": getattr(m, side) for k, m in enumerate(plan.mixtures) for side in "wc"}
        addresses = {}
        for name, place in (*thunk.inputs.items(), *thunk.outputs.items()):
            view = views.get(name)
            addresses[name] = self.address(place, view.offset, view.dtype) if view else self.address(place)
        return Run(kernel, addresses)

    def _gemm(self, plan: MatmulPlan, name: str) -> GemmKernel:
        def matrix(view: View) -> Matrix:
            return Matrix(view.dtype, view.row, view.column, view.batch)

        gemm = Gemm(plan.m, plan.n, plan.k, matrix(plan.a), matrix(plan.b), matrix(plan.c), plan.batch)
        if plan.epilogue is None:
            return gemm_kernel(name, gemm, self.target)
        epilogue = PlanEpilogue(replace(plan.epilogue, name=f"{name}_epilogue"), plan.sums)
        epilogue.check(gemm)
        return gemm_kernel(name, gemm, self.target, epilogue)


def _copy_kernel(copy: CopyThunk) -> KernelThunk:
    """A copy as a kernel, in the widest elements that fit."""
    dtype = next(d for d in ("u32", "u16", "u8") if copy.source.size % BYTES[d] == 0)
    count = copy.source.size // BYTES[dtype]
    build = PlanBuilder("copy", (count,))
    source = build.operand("source", dtype, count)
    build.store(build.operand("target", dtype, count), dim(0), build.load(source, dim(0)))
    return KernelThunk(copy.name, build.finish(), (copy.source, copy.target))
