"""From a scheduled module with assigned buffers to thunks: one traversal of the schedule.

Several copies that belong to one instant (results of a branch, state of a loop, results of the program) may
be emitted in any order: buffer assignment keeps the targets of all of them apart from the sources of
the others.  Instructions that a target has no code for are listed with the reason: `refusals`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpmd.compile.analysis.dataflow import FORWARDING
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.in_place import may_share
from mpmd.compile.kernels.planner.attention import PlannedAttention
from mpmd.compile.kernels.planner.collectives import CollectivePlan
from mpmd.compile.kernels.planner.dots import DotPlan
from mpmd.compile.kernels.planner.elements import NoPlan
from mpmd.compile.kernels.planner.groups import UpdatePlan
from mpmd.compile.kernels.planner.planned_kernel import PlannedKernel, plan_instruction
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    CollectiveThunk,
    ConditionalThunk,
    CopyThunk,
    DeviceThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
)

SILENT = FORWARDING | {"parameter", "constant", "after-all"}
"""Opcodes without a thunk."""

WITHOUT_KERNEL = SILENT | {"while", "conditional"}
"""Opcodes without a kernel."""


def is_device_number(instruction: HloInstruction) -> bool:
    """Whether an instruction gives the number of the device that runs the program."""
    module = instruction.parent.module
    others = {"partition-id": module.replica_count, "replica-id": module.num_partitions}
    return others.get(instruction.opcode) == 1


Refuses = Callable[[HloInstruction, PlannedKernel | None], str]
"""An instruction and its kernel, if it has one → why a target has no code for it; "" if it has."""


class KernelPlans:
    """The kernels of a module's instructions, each planned once.

    Args:
        refuses: of the target; by default everything that has a plan has code.
        stores_last: see `may_share`.
    """

    def __init__(
        self, refuses: Refuses = lambda instruction, planned: "", *, stores_last: bool = False
    ) -> None:
        self._refuses = refuses
        self._stores_last = stores_last
        self._plans: dict[HloInstruction, PlannedKernel] = {}
        self._read: dict[HloInstruction, tuple[HloInstruction, ...]] = {}

    def of(self, instruction: HloInstruction) -> PlannedKernel:
        """The kernel of an instruction.

        Raises:
            NoPlan: no kernel computes it, or the target has no code for the kernel.
        """
        plan = self._plans.get(instruction)
        if plan is None:
            plan = plan_instruction("kernel", instruction)
            reason = self._refuses(instruction, plan)
            if reason:
                raise NoPlan(reason)
            self._plans[instruction] = plan
        return plan

    def plan_all(self, computations: Sequence[HloComputation]) -> None:
        """Plan everything that needs a kernel; plan instructions again whose operands changed since.

        Raises:
            NoPlan: for the first instruction that has none.
        """
        for computation in computations:
            for instruction in computation:
                if instruction.opcode in WITHOUT_KERNEL or is_device_number(instruction):
                    continue
                operands = tuple(instruction.operands)
                if self._read.get(instruction) != operands:
                    self._plans.pop(instruction, None)
                    self._read[instruction] = operands
                self.of(instruction)

    def planned(self, instruction: HloInstruction) -> PlannedKernel | None:
        """The kernel of an instruction; None if it has none."""
        return self._plans.get(instruction)

    def may_share(self, instruction: HloInstruction, operand: int, result: int) -> bool:
        """Whether a result may be written over an operand."""
        if instruction.opcode in WITHOUT_KERNEL or is_device_number(instruction):
            return False
        planned = self.of(instruction)
        if isinstance(planned, UpdatePlan | PlannedAttention):
            return False
        if isinstance(planned, CollectivePlan):
            own = instruction.operand_indices(instruction.operands[operand]) == [operand]
            return own and planned.may_share(operand, result)
        source = instruction.operands[operand]
        if instruction.opcode == "fusion":
            source = instruction.to_apply.parameters[operand]
        if instruction.operand_indices(instruction.operands[operand]) != [operand]:
            return False
        if source not in planned.arrays:
            return False
        number = planned.arrays.index(source)
        if isinstance(planned, DotPlan):
            # an epilogue reads and writes each position once, after the last sum; factors are read often
            if planned.plan.epilogue is None or source in planned.factors:
                return False
            order = [k for k in range(len(planned.plan.epilogue.operands)) if k != planned.plan.sums]
            return may_share(planned.plan.epilogue, order[number], order[len(planned.arrays) + result])
        place = len(planned.arrays) + result
        return may_share(planned.plan, number, place, stores_last=self._stores_last)


class Emitter:
    """The emission of one module.

    Args:
        assignment: the slices of values.
        plans: the kernels.
    """

    def __init__(self, assignment: BufferAssignment, plans: KernelPlans) -> None:
        self.assignment = assignment
        self.plans = plans
        self.dataflow = assignment.occupancy.dataflow

    def program(self) -> tuple[Thunk, ...]:
        root = self.dataflow.module.entry.root
        thunks = self.sequence(self.dataflow.module.entry)
        for (index, _), place in zip(root.shape.leaves(), self.assignment.results):
            thunks += self._copy(f"{root.name}{list(index)}", self.assignment.at(root, index), place)
        return tuple(thunks)

    def sequence(self, computation: HloComputation) -> list[Thunk]:
        """The thunks of one computation, in the order of its schedule."""
        return [t for i in computation if i.opcode not in SILENT for t in self.thunks_of(i)]

    def thunks_of(self, instruction: HloInstruction) -> list[Thunk]:
        """The thunks of one instruction; a loop, or a conditional, holds those of its computations."""
        if instruction.opcode == "while":
            return self._while(instruction)
        if instruction.opcode == "conditional":
            return [self._conditional(instruction)]
        if is_device_number(instruction):
            return [DeviceThunk(instruction.name, self.assignment.at(instruction))]
        return self._kernel(instruction)

    def _copy(self, name: str, source: Slice, target: Slice) -> list[Thunk]:
        same = (source.allocation, source.offset) == (target.allocation, target.offset)
        return [] if same or not source.size else [CopyThunk(name, source, target)]

    # -- kernels
    def _kernel(self, instruction: HloInstruction) -> list[Thunk]:
        planned = self.plans.of(instruction)
        place = _Places(self.assignment, instruction)
        if isinstance(planned, CollectivePlan):
            at = self.assignment.at
            results = [at(instruction, index) for index, _ in instruction.shape.leaves()]
            arrays = (*(at(o) for o in instruction.operands), *results)
            return [CollectiveThunk(instruction.name, planned, arrays)]
        if isinstance(planned, UpdatePlan):
            target = place.result(planned.result)
            operands = (*(place.array(a) for a in planned.arrays), target)
            thunks = self._copy(instruction.name, place.array(planned.target), target)
            scratch = self.assignment.scratch.get(instruction)
            return [*thunks, KernelThunk(instruction.name, planned.plan, operands, scratch)]
        if isinstance(planned, DotPlan):
            a, b = (place.array(f) for f in planned.factors)
            slices = [place.array(x) for x in planned.arrays] + [place.result(r) for r in planned.results]
            if planned.plan.epilogue is None:
                return [MatmulThunk(instruction.name, planned.plan, a, b, {0: slices[0]})]
            numbers = [k for k in range(len(planned.plan.epilogue.operands)) if k != planned.plan.sums]
            scratch = self.assignment.scratch.get(instruction)
            return [MatmulThunk(instruction.name, planned.plan, a, b, dict(zip(numbers, slices)), scratch)]
        if isinstance(planned, PlannedAttention):
            scratch = self.assignment.scratch.get(instruction)
            return [_attention(instruction.name, planned, place, scratch)]
        results = [place.result(r, k) for k, r in enumerate(planned.results)]
        operands = (*(place.array(a) for a in planned.arrays), *results)
        return [
            KernelThunk(instruction.name, planned.plan, operands, self.assignment.scratch.get(instruction))
        ]

    # -- control
    def _while(self, loop: HloInstruction) -> list[Thunk]:
        begins: list[Thunk] = []
        repeats: list[Thunk] = []
        at, root = self.assignment.at, loop.while_body.root
        for index, _ in loop.shape.leaves():
            state = at(loop, index)
            begins += self._copy(f"{loop.name}{list(index)}", at(loop.operands[0], index), state)
            repeats += self._copy(f"{root.name}{list(index)}", at(root, index), state)
        condition = self.sequence(loop.while_condition)
        body = [*self.sequence(loop.while_body), *repeats]
        flag = at(loop.while_condition.root)
        times = loop.known_trip_count
        return [*begins, WhileThunk(loop.name, tuple(condition), flag, tuple(body), times)]

    def _conditional(self, conditional: HloInstruction) -> Thunk:
        at, branches = self.assignment.at, []
        for branch in conditional.called:
            thunks = self.sequence(branch)
            for index, _ in conditional.shape.leaves():
                name = f"{branch.root.name}{list(index)}"
                thunks += self._copy(name, at(branch.root, index), at(conditional, index))
            branches.append(tuple(thunks))
        return ConditionalThunk(conditional.name, at(conditional.operands[0]), tuple(branches))


def _attention(name: str, planned: PlannedAttention, place: _Places, scratch: Slice | None) -> AttentionThunk:
    inputs, outputs = {}, {}
    for k, (a, b) in enumerate(planned.factors):
        inputs[f"a{k}"], inputs[f"b{k}"] = place.array(a), place.array(b)
    for k, (value, result) in enumerate(zip(planned.values, planned.mixed)):
        inputs[f"w{k}"], outputs[f"c{k}"] = place.array(value), place.result(result)
    numbers = iter(planned.plan.outer)
    for array, number in zip(planned.arrays, numbers):
        inputs[f"p{number}"] = place.array(array)
    for result, number in zip(planned.kept, numbers):
        outputs[f"p{number}"] = place.result(result)
    return AttentionThunk(name, planned.plan, inputs, outputs, scratch)


class _Places:
    """The slices of the operands and results of one instruction's kernel."""

    def __init__(self, assignment: BufferAssignment, instruction: HloInstruction) -> None:
        self.assignment = assignment
        self.instruction = instruction
        self.fusion = instruction.opcode == "fusion"

    def array(self, value: HloInstruction) -> Slice:
        if self.fusion:
            value = self.instruction.operands[value.parameter_number]
        return self.assignment.at(value)

    def result(self, value: HloInstruction, number: int = 0) -> Slice:
        """The slice of a result; the number counts for operations with several."""
        if not self.fusion:
            index = (number,) if self.instruction.shape.is_tuple else ()
            return self.assignment.at(self.instruction, index)
        root = self.instruction.to_apply.root
        index = (root.operands.index(value),) if root.opcode == "tuple" else ()
        return self.assignment.at(self.instruction, index)


def refusals(computation: HloComputation, refuses: Refuses) -> dict[HloInstruction, str]:
    """The instructions of a prepared computation that have no code → why.

    A loop or branch is refused for what it contains.  Instructions that only forward values are never
    refused.

    Args:
        computation: after `pipelines.preparation`.
        refuses: of the target.
    """
    reasons = {i: _reason(i, refuses) for i in computation}
    return {i: reason for i, reason in reasons.items() if reason}


def _reason(instruction: HloInstruction, refuses: Refuses) -> str:
    """Why an instruction has no code; "" if it has."""
    planned: PlannedKernel | None = None
    if instruction.opcode in SILENT or is_device_number(instruction):
        return ""
    if instruction.opcode in ("while", "conditional"):
        for computation in instruction.called:
            for inner, reason in refusals(computation, refuses).items():
                return f"it holds {inner.name}: {reason}"
    else:
        try:
            planned = plan_instruction("kernel", instruction)
        except NoPlan as error:
            return str(error).partition("\n")[0]
    return refuses(instruction, planned)
