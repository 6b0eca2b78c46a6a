"""Poison: native code in which memory holds NaN (or -1) wherever no value is.

Memory is overwritten when a program starts, and again as soon as its last value is dead or the kernel that
used it for itself is done; a thread's workspace is overwritten before each kernel.  A read of a value after
its end, or of bytes that were never written, then gives NaN instead of a number that happens to be right.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from mpmd.compile import driver
from mpmd.compile.backends.native_cpu import steps as native_steps
from mpmd.compile.backends.native_cpu.native_program import (
    Alone,
    Choose,
    Repeat,
    Run,
    Step,
    ThreadedProgram,
    While,
)
from mpmd.compile.backends.native_cpu.shared import CpuKernel, SharedFunction
from mpmd.compile.buffers.assignment import BufferAssignment, Slice
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import dim
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.llvm.function_builder import FunctionBuilder, Module
from mpmd.compile.llvm.llvm_types import constant
from mpmd.compile.thunks.emission import Emitter, KernelPlans
from mpmd.compile.thunks.thunk import KernelThunk, Thunk

POISON = 0xFF
"""In every byte: NaN in all floating-point types, -1 in integers."""

_NAME = "poison"


def is_poison(thunk: Thunk) -> bool:
    """Whether a thunk only overwrites free memory."""
    return isinstance(thunk, KernelThunk) and thunk.plan.name == _NAME


@contextmanager
def poison(on: bool) -> Iterator[None]:
    """Compile meanwhile with poison, or as users do."""
    emitter, program = (PoisoningEmitter, poisoning_program) if on else (Emitter, ThreadedProgram)
    programs = mock.patch.object(native_steps, "ThreadedProgram", program)
    with mock.patch.object(driver, "Emitter", emitter), programs:
        yield


def poison_always() -> None:
    """Compile with poison from now on."""
    driver.Emitter = PoisoningEmitter
    native_steps.ThreadedProgram = poisoning_program


def check_returned(results: Iterable[np.ndarray], arguments: Iterable[np.ndarray]) -> None:
    """Results may not hold poison: NaN of all ones, which no operation makes of other NaN.

    Integers are not looked at: -1 is a number.
    """
    for number, result in enumerate(results):
        if _holds_poison(result) and not any(map(_holds_poison, arguments)):
            raise AssertionError(f"result {number} holds what was never written")


def _holds_poison(array: np.ndarray) -> bool:
    size = array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1)
    if array.dtype.kind in "biu" or size not in (2, 4, 8):
        return False
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{size}")
    return bool((bits == np.iinfo(bits.dtype).max).any())


# -- values, and memory that kernels use for themselves
class PoisoningEmitter(Emitter):
    """An emitter whose programs overwrite free memory."""

    def __init__(self, assignment: BufferAssignment, plans: KernelPlans) -> None:
        super().__init__(assignment, plans)
        self._poison = Poison(assignment)
        self._since: dict[HloComputation, int] = {}

    def program(self) -> tuple[Thunk, ...]:
        """With those that overwrite what no value has at the start."""
        return (*self._poison.before(), *super().program())

    def thunks_of(self, instruction: HloInstruction) -> list[Thunk]:
        """With those that overwrite what is free afterwards."""
        thunks, occupancy = super().thunks_of(instruction), self.assignment.occupancy
        start = occupancy.liveness.time.spans[instruction.parent].start
        since = self._since.get(instruction.parent, start - 1)
        self._since[instruction.parent] = occupancy.instants[instruction]
        return [*thunks, *self._poison.after(instruction, since)]


class Poison:
    """Thunks that overwrite free memory.

    Args:
        assignment: slices and live ranges of values.
    """

    def __init__(self, assignment: BufferAssignment) -> None:
        self.instants = assignment.occupancy.instants
        self._ends: dict[int, list[Slice]] = {}
        """Instant → slices that are free after it."""
        self._uses: dict[int, list[tuple[int, int, Slice]]] = {}
        """Allocation → (first instant, last instant, part of it that is in use)."""
        self._given: list[Slice] = []
        """The program's findings."""
        # read-only parameters and constants stay, and values that share their memory; of a result that takes
        # the memory of a donated parameter the other allocation is nowhere
        written = {place.allocation for place in assignment.results}
        self._own = [a for a in assignment.allocations if a.kind == "arena" or a.number in written]
        for allocation in self._own:
            self._uses[allocation.number] = []
        for value, place in assignment.slices.items():
            if place.size and place.allocation in self._uses:
                if value.instruction.opcode == "parameter":
                    self._given.append(place)
                for span in assignment.occupancy.spans[value]:
                    self._ends.setdefault(span.end, []).append(place)
                    self._uses[place.allocation].append((span.start, span.end, place))
        for instruction, place in assignment.scratch.items():
            if place.size and place.allocation in self._uses:
                self._ends.setdefault(self.instants[instruction], []).append(place)

    def before(self) -> list[KernelThunk]:
        """All memory but parameters and constants."""
        whole = [Slice(a.number, 0, a.size) for a in self._own if a.size]
        return _fills("start", [piece for place in whole for piece in _without(place, self._given)])

    def after(self, instruction: HloInstruction, since: int) -> list[KernelThunk]:
        """Slices that are free after an instruction and were in use after an instant before it.

        Args:
            instruction: the instruction that has just run.
            since: the instant of the last poisoning.
        """
        now = self.instants[instruction]
        ended = dict.fromkeys(place for t in range(since + 1, now + 1) for place in self._ends.get(t, ()))
        alive = {
            number: [place for start, end, place in self._uses[number] if start <= now < end]
            for number in {place.allocation for place in ended}
        }
        pieces = [piece for place in ended for piece in _without(place, alive[place.allocation])]
        return _fills(instruction.name, pieces)


def _without(place: Slice, taken: list[Slice]) -> list[Slice]:
    """The parts of a slice that overlap with none of others."""
    parts = [(place.offset, place.offset + place.size)]
    for other in taken:
        if other.allocation != place.allocation:
            continue
        low, high = other.offset, other.offset + other.size
        remaining = [((a, min(b, low)), (max(a, high), b)) for a, b in parts]
        parts = [part for pair in remaining for part in pair if part[0] < part[1]]
    return [Slice(place.allocation, a, b - a) for a, b in parts]


def _fills(name: str, places: Sequence[Slice]) -> list[KernelThunk]:
    """Kernels that write poison."""
    return [KernelThunk(f"poison.{name}.{k}", _fill(place.size), (place,)) for k, place in enumerate(places)]


@functools.cache
def _fill(size: int) -> KernelPlan:
    build = PlanBuilder(_NAME, (size,))
    build.store(build.operand("target", "u8", size), dim(0), build.constant(POISON, "u8"))
    return build.finish()


# -- workspaces of threads
def poisoning_program(name: str, pointers: int, steps: tuple[Step, ...], devices: int = 1) -> ThreadedProgram:
    """A program that overwrites a thread's workspace before each kernel."""
    return ThreadedProgram(name, pointers, _all_poisoned(steps), devices)


def _all_poisoned(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(map(_poisoned, steps))


def _poisoned(step: Step) -> Step:
    if isinstance(step, Run):
        return replace(step, kernel=PoisonedKernel(step.kernel)) if step.kernel.workspace_bytes else step
    if isinstance(step, Alone):
        return replace(step, steps=_all_poisoned(step.steps))
    if isinstance(step, Repeat):
        return replace(step, body=_all_poisoned(step.body))
    if isinstance(step, While):
        return replace(step, test=_all_poisoned(step.test), body=_all_poisoned(step.body))
    if isinstance(step, Choose):
        return replace(step, branches=tuple(map(_all_poisoned, step.branches)))
    return step


@dataclass(frozen=True)
class PoisonedKernel:
    """A kernel that finds poison in its workspace.

    Attributes:
        inner: the kernel.
    """

    inner: CpuKernel

    @property
    def name(self) -> str:
        """Symbol of the function."""
        return f"{self.inner.name}_{_NAME}"

    @property
    def pointers(self) -> tuple[str, ...]:
        """The kernel's."""
        return self.inner.pointers

    @property
    def units(self) -> int:
        """The kernel's."""
        return self.inner.units

    @property
    def workspace_bytes(self) -> int:
        """The kernel's."""
        return self.inner.workspace_bytes

    def emit(self, module: Module) -> Sequence[SharedFunction]:
        """Add both functions to a module."""
        shared = () if module.defines(self.inner.name) else self.inner.emit(module)
        arguments = [(p, "ptr") for p in (*self.pointers, "workspace")]
        arguments += [("begin", "i64"), ("end", "i64")]
        with FunctionBuilder(module, self.name, arguments, plain=True) as f:
            fill, size = constant(POISON - 256, "i8"), constant(self.workspace_bytes, "i64")
            f.call("llvm.memset.p0.i64", f.arguments["workspace"], fill, size, constant(0, "i1"))
            f.call(self.inner.name, *f.arguments.values())
        return shared
