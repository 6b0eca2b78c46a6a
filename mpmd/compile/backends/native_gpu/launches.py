"""The launch program of a fragment: what a GPU is given, in order, on one stream.

    launch    a kernel: how many programs run it, and the memory of its arguments
    product   a call of the matrix library: a descriptor, and the memory of its matrices
    copy      bytes from one place to another
    fill      a word, repeated
    repeat    steps, while a flag in memory is set after its condition's steps
    choose    one of several sequences, by a number in memory

Memory is slices of the allocations of buffer assignment.  The program prints, and `tests/support` executes it
on NumPy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from mpmd.compile.backends.native_gpu.products import (
    ProductDescriptor,
    StoredSums,
    as_row_sums,
    dense_sums,
    in_one_kernel,
    library_calls,
    stored_sums,
)
from mpmd.compile.backends.native_gpu.triton.attention import argument_names, first_scratch
from mpmd.compile.backends.native_gpu.triton.choices import KernelChoices
from mpmd.compile.backends.native_gpu.triton.products import operands_of
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PlanKernels, PrintedKernel
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import DTYPE_BYTES
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    ConditionalThunk,
    CopyThunk,
    DeviceThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
)
from mpmd.errors import CompileError

_ALIGNED = 16
MAX_CAPTURED = 1 << 14
"""Launches of a graph: to capture and to keep a longer one would cost more than it brings."""


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """A kernel: its name in the program, its arguments, and how many programs run it.

    `sizes` are the bytes of the arguments' arrays: kernels of the same text may have others.
    """

    name: str
    kernel: str
    arguments: tuple[Slice, ...]
    grid: int
    sizes: tuple[int, ...]

    def line(self) -> str:
        return f"launch {self.kernel} x{self.grid} ({_list(self.arguments)})  // {self.name}"


@dataclasses.dataclass(frozen=True)
class ProductLaunch:
    """A call of the matrix library; each slice begins with the first element of its matrix.

    `added` and `shift` are a matrix and a vector that are added, where the descriptor says so.
    """

    name: str
    descriptor: ProductDescriptor
    a: Slice
    b: Slice
    d: Slice
    added: Slice | None = None
    shift: Slice | None = None

    @property
    def reads(self) -> tuple[Slice, ...]:
        return (self.a, self.b, *(place for place in (self.added, self.shift) if place is not None))

    def line(self) -> str:
        return f"product {self.descriptor} ({_list((*self.reads, self.d))})  // {self.name}"


@dataclasses.dataclass(frozen=True)
class CopyLaunch:
    """Bytes from one slice to another."""

    name: str
    source: Slice
    target: Slice

    def line(self) -> str:
        return f"copy ({self.source}, {self.target})  // {self.name}"


@dataclasses.dataclass(frozen=True)
class FillLaunch:
    """A word of 32 bits in a slice; None is the number of the device in its mesh."""

    name: str
    target: Slice
    word: int | None

    def line(self) -> str:
        return f"fill {'device' if self.word is None else self.word} ({self.target})  // {self.name}"


@dataclasses.dataclass(frozen=True)
class LoopLaunch:
    """The condition's steps; while the flag is set, the body's and the condition's again.

    If the host knows how often the body runs there is no condition, and nothing waits for the flag.
    """

    name: str
    condition: tuple[Step, ...]
    flag: Slice
    body: tuple[Step, ...]
    trips: int | None = None

    def line(self) -> str:
        how = f"while {self.flag}" if self.trips is None else f"{self.trips} times"
        return f"repeat {how}  // {self.name}"


@dataclasses.dataclass(frozen=True)
class BranchLaunch:
    """The steps of one branch; a selector outside means the last."""

    name: str
    selector: Slice
    branches: tuple[tuple[Step, ...], ...]

    def line(self) -> str:
        return f"choose by {self.selector}  // {self.name}"


SimpleStep = KernelLaunch | ProductLaunch | CopyLaunch | FillLaunch
Step = SimpleStep | LoopLaunch | BranchLaunch


@dataclasses.dataclass(frozen=True)
class LaunchProgram:
    """A fragment as launches: a `ThunkProgram`.

    Attributes:
        name: its symbol.
        steps: in order.
        kernels: by name, each once however often it is launched.
        allocations: the memory of a call; the parameters' come first.
        results: where the results are at the end.
        constants: the content of the allocation of constants.
    """

    name: str
    steps: tuple[Step, ...]
    kernels: Mapping[str, PrintedKernel]
    allocations: tuple[Allocation, ...]
    results: tuple[Slice, ...]
    constants: bytes

    @property
    def arena_bytes(self) -> int:
        """Bytes of temporaries and constants."""
        return sum(a.size for a in self.allocations if a.kind in ("arena", "constant"))

    def text(self) -> str:
        lines = [f"program {self.name}", *map(str, self.allocations), *_listing(self.steps, "")]
        return "\n".join(lines) + "\n"

    def triton(self) -> str:
        return "\n\n".join(kernel.source for kernel in self.kernels.values())

    @property
    def descriptors(self) -> tuple[ProductDescriptor, ...]:
        descriptors = [step.descriptor for step in self.launches() if isinstance(step, ProductLaunch)]
        return tuple(dict.fromkeys(descriptors))

    @property
    def is_capturable(self) -> bool:
        """Whether no step waits for a number on the device, and a graph of a call is not too large."""
        count = _issued(self.steps)
        return count is not None and count <= MAX_CAPTURED

    def launches(self) -> Iterator[SimpleStep]:
        """All steps that a call may run, in loops and branches once."""
        return _simple(self.steps)


def launch_program(
    name: str,
    thunks: Sequence[Thunk],
    assignment: BufferAssignment,
    choices: KernelChoices,
    without: Collection[ProductDescriptor] = (),
) -> LaunchProgram:
    """The launches of a sequence of thunks.

    Args:
        name: symbol of the program.
        thunks: what it does.
        assignment: where its values are.
        choices: the kernels of plans.
        without: products for which the matrix library has no algorithm.

    Raises:
        CompileError: a thunk has no launches.
    """
    lowering = _LaunchLowering(choices, without)
    steps = tuple(lowering.steps(thunks))
    constants = bytearray(assignment.constant_bytes)
    for value in assignment.constants:
        literal, at = value.instruction.literal, assignment.slices[value].offset
        assert literal is not None and not isinstance(literal, tuple)
        data = literal.tobytes()
        constants[at : at + len(data)] = data
    return LaunchProgram(
        name, steps, lowering.kernels, assignment.allocations, assignment.results, bytes(constants)
    )


def with_smaller_tiles(program: LaunchProgram, names: Collection[str]) -> LaunchProgram:
    """The program with the next smaller tile of some kernels."""

    def smaller(step: Step) -> Step:
        if isinstance(step, LoopLaunch):
            return dataclasses.replace(step, condition=all_of(step.condition), body=all_of(step.body))
        if isinstance(step, BranchLaunch):
            return dataclasses.replace(step, branches=tuple(map(all_of, step.branches)))
        if not isinstance(step, KernelLaunch) or step.kernel not in names:
            return step
        kernel = program.kernels[step.kernel]
        small = kernel.smaller
        assert small is not None and (small.operands, small.pointers) == (kernel.operands, kernel.pointers)
        kernels[small.name] = small
        # launches of one kernel differ in their batch, which is a factor of the grid
        return dataclasses.replace(step, kernel=small.name, grid=step.grid * small.grid // kernel.grid)

    def all_of(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(map(smaller, steps))

    kernels = {name: kernel for name, kernel in program.kernels.items() if name not in names}
    return dataclasses.replace(program, steps=all_of(program.steps), kernels=kernels)


class _LaunchLowering:
    def __init__(self, choices: KernelChoices, without: Collection[ProductDescriptor]) -> None:
        self.choices, self.without = choices, without
        self.kernels: dict[str, PrintedKernel] = {}

    def steps(self, thunks: Sequence[Thunk]) -> Iterator[Step]:
        for thunk in thunks:
            if isinstance(thunk, KernelThunk):
                yield from self._kernels(thunk.name, thunk.plan, thunk.operands, thunk.scratch)
            elif isinstance(thunk, MatmulThunk):
                yield from self._product(thunk)
            elif isinstance(thunk, AttentionThunk):
                yield from self._attention(thunk)
            elif isinstance(thunk, CopyThunk):
                yield CopyLaunch(thunk.name, thunk.source, thunk.target)
            elif isinstance(thunk, DeviceThunk):
                yield FillLaunch(thunk.name, thunk.target, None)
            elif isinstance(thunk, WhileThunk):
                condition = () if thunk.trips is not None else tuple(self.steps(thunk.condition))
                body = tuple(self.steps(thunk.body))
                yield LoopLaunch(thunk.name, condition, thunk.flag, body, thunk.trips)
            elif isinstance(thunk, ConditionalThunk):
                branches = tuple(tuple(self.steps(branch)) for branch in thunk.branches)
                yield BranchLaunch(thunk.name, thunk.selector, branches)
            else:
                raise CompileError(f"a GPU has no launch for {thunk.line()}")

    def _kernels(
        self, name: str, plan: KernelPlan, operands: Sequence[Slice], scratch: Slice | None = None
    ) -> Iterator[Step]:
        kernels = self.choices.of_plan(plan)
        yield from self._launches(name, kernels, dict(enumerate(operands)), scratch, len(plan.operands))

    def _attention(self, thunk: AttentionThunk) -> Iterator[Step]:
        arrays = {**thunk.inputs, **thunk.outputs}
        names = argument_names(thunk.plan).items()
        places = {number: arrays[array] for number, array in names if array in arrays}
        kernels = self.choices.of_attention(thunk.plan)
        yield from self._launches(thunk.name, kernels, places, thunk.scratch, first_scratch(thunk.plan))

    def _launches(
        self, name: str, group: PlanKernels, operands: Mapping[int, Slice], scratch: Slice | None, first: int
    ) -> Iterator[Step]:
        """The kernels of a plan; `first` is the number of the first scratch array."""
        places = dict(operands)
        # Scratch arrays follow the plan's operands in the numbering of its kernels, and lie in one slice.
        for number, at in enumerate(group.scratch, first):
            assert scratch is not None
            places[number] = _from(scratch, at)
        for kernel in group.kernels:
            arguments = tuple(places[k] for k in kernel.operands)
            # Alignment is part of a kernel's text: wide loads. Allocations begin aligned, so offsets
            # decide.
            kernel = kernel.with_alignment([s.offset % _ALIGNED == 0 for s in arguments])
            self.kernels[kernel.name] = kernel
            yield KernelLaunch(name, kernel.name, arguments, kernel.grid, kernel.sizes)

    def _product(self, thunk: MatmulThunk) -> Iterator[Step]:
        if in_one_kernel(thunk.plan, self.without):
            kernels, first = self.choices.of_product(thunk.plan), operands_of(thunk.plan)
            places = {**thunk.operands, first: thunk.a, first + 1: thunk.b}
            yield from self._launches(thunk.name, kernels, places, None, first + 2)
            return
        # From the best to the plainest: product and epilogue in one kernel; the library, with an epilogue
        # that it has (a store, a sum, an added vector); the library's sums in scratch memory, and a kernel
        # that reads them.
        stored = stored_sums(thunk.plan, self.without)
        if stored is not None:
            yield from self._sums(thunk, thunk.operands[stored.operand], stored)
            return
        epilogue = thunk.plan.epilogue
        assert epilogue is not None and thunk.scratch is not None
        yield from self._sums(thunk, thunk.scratch, StoredSums(thunk.plan.sums, dense_sums(thunk.plan)))
        arrays = {**thunk.operands, thunk.plan.sums: thunk.scratch}
        yield from self._kernels(thunk.name, epilogue, [arrays[k] for k in range(len(epilogue.operands))])

    def _sums(self, thunk: MatmulThunk, target: Slice, stored: StoredSums) -> Iterator[Step]:
        plan, view = thunk.plan, stored.view
        added, shift = (thunk.operands.get(number) for number in (stored.added, stored.shift))
        given = {"adds": added is not None, "shifts": shift is not None}
        calls = library_calls(plan, view, self.without, **given)
        # no call of the library has these strides: row sums, as a plan of their own
        if not calls:
            yield from self._kernels(thunk.name, as_row_sums(plan, view), [thunk.a, thunk.b, target])
        for call in calls:
            a, b, d = (
                _from(place, at * DTYPE_BYTES[matrix.dtype])
                for place, at, matrix in (
                    (thunk.a, call.a, plan.a),
                    (thunk.b, call.b, plan.b),
                    (target, call.d, view),
                )
            )
            # batch indices without a common stride are calls of their own, each with its part of what is
            # added
            if added is not None:
                added = _from(added, call.d * DTYPE_BYTES[view.dtype])
            yield ProductLaunch(thunk.name, call.descriptor, a, b, d, added, shift)


def _from(place: Slice, offset: int) -> Slice:
    return Slice(place.allocation, place.offset + offset, place.size - offset)


def _list(places: Sequence[Slice]) -> str:
    return ", ".join(map(str, places))


def _listing(steps: Sequence[Step], indent: str) -> Iterator[str]:
    for step in steps:
        yield indent + step.line()
        if isinstance(step, LoopLaunch):
            if step.trips is None:
                yield f"{indent} condition:"
                yield from _listing(step.condition, indent + "  ")
            yield f"{indent} body:"
            yield from _listing(step.body, indent + "  ")
        elif isinstance(step, BranchLaunch):
            for number, branch in enumerate(step.branches):
                yield f"{indent} branch {number}:"
                yield from _listing(branch, indent + "  ")


def _issued(steps: Sequence[Step]) -> int | None:
    """How many launches a call issues; None if that depends on numbers on the device."""
    count = 0
    for step in steps:
        inner: int | None = 1
        if isinstance(step, LoopLaunch):
            inner = _issued(step.body) if step.trips is not None else None
            # a loop of known length issues its body each time: in a graph it is unrolled
            inner = None if inner is None else inner * (step.trips or 0)
        elif isinstance(step, BranchLaunch):
            inner = None
        if inner is None:
            return None
        count += inner
    return count


def _simple(steps: Sequence[Step]) -> Iterator[SimpleStep]:
    for step in steps:
        if isinstance(step, LoopLaunch):
            yield from _simple((*step.condition, *step.body))
        elif isinstance(step, BranchLaunch):
            for branch in step.branches:
                yield from _simple(branch)
        else:
            yield step
