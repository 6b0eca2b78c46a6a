"""The CPU as a target of the driver: its passes, its kernels as LLVM IR, its programs as machine code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd.compile.backends.native_cpu.handler import compile_with_handler
from mpmd.compile.backends.native_cpu.loading import CompiledProgram
from mpmd.compile.backends.native_cpu.mesh_collectives import peer_refusal
from mpmd.compile.backends.native_cpu.overrides import overrides_of
from mpmd.compile.backends.native_cpu.steps import NativeProgram, PlanCode, native_program
from mpmd.compile.backends.native_cpu.storage import MEMORY as TYPES
from mpmd.compile.buffers.assignment import BufferAssignment
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.kernels.planner.elements import PAIRS
from mpmd.compile.kernels.planner.groups import GroupPlan, UpdatePlan
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel
from mpmd.compile.llvm.cpu import MEMORY, CpuTarget, host_target
from mpmd.compile.llvm.engine import assembly_of
from mpmd.compile.options import CompileOptions
from mpmd.compile.pipelines import optimization_pipeline, scheduling_pipeline
from mpmd.compile.thunks.thunk import Thunk
from mpmd.cost.device import HOST
from mpmd.support.passes import Pass


@dataclasses.dataclass(frozen=True)
class NativeCpu:
    """CPUs of one kind; see `Target`.

    Attributes:
        cpu: the processor; by default this process's.
    """

    cpu: CpuTarget = dataclasses.field(default_factory=host_target)

    code_texts = {"llvm": "module.ll", "assembly": "module.s"}
    device = HOST
    memory = MEMORY

    def key(self) -> str:
        return self.cpu.key()

    def passes(self, devices: int, options: CompileOptions) -> list[Pass]:
        """The passes of CPUs; see `Target`."""
        return optimization_pipeline(devices, options.attention_stitching, options.float_jitter, self.device)

    def schedule(self, devices: int) -> list[Pass]:
        """The passes that order instructions; see `Target`."""
        return scheduling_pipeline()

    def refuses(self, instruction: HloInstruction, planned: PlannedKernel | None) -> str:
        """Values of types that native code does not have, groups that no kernel joins; see `Target`."""
        values = [*instruction.operands, instruction]
        for _, shape in (leaf for value in values for leaf in value.shape.leaves()):
            if shape.dtype not in TYPES and shape.dtype not in PAIRS:
                return f"native code has no values of type {shape.dtype}"
        return peer_refusal(planned) if isinstance(planned, CollectivePlan) else ""

    def scratch_bytes(self, planned: PlannedKernel | None) -> int:
        """Partial sums that the threads of a kernel keep; see `Target`."""
        if not isinstance(planned, GroupPlan | UpdatePlan):
            return 0
        return PlanCode(self.cpu).scratch_bytes(planned.plan)

    def program(self, name: str, thunks: Sequence[Thunk], assignment: BufferAssignment) -> NativeProgram:
        """Thunks as steps; see `Target`."""
        return native_program(name, thunks, assignment, PlanCode(self.cpu))

    def compile(
        self, program: NativeProgram, fragment: FragmentModule, options: CompileOptions
    ) -> CompiledProgram:
        """Machine code; see `Target`."""
        return compile_with_handler(
            program.threaded,
            self.cpu,
            arguments=len(fragment.arguments),
            results=len(fragment.results),
            arena=True,
            overrides=overrides_of(fragment, options.kernel_overrides),
        )

    def code_from_bytes(self, data: bytes) -> CompiledProgram:
        """Machine code that was kept; see `Target`."""
        return CompiledProgram.from_bytes(data)

    def code_text(self, code: CompiledProgram, what: str) -> str:
        """LLVM's assembly, or the CPU's."""
        return code.llvm if what == "llvm" else assembly_of(code.llvm, self.cpu)
