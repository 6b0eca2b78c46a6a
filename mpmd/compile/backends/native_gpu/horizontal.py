"""Horizontal fusion: small launches that need nothing of each other are one.

    convert (a, b); product (b, e); convert (c, d)  ->  convert both (a, b, c, d); product (b, e)

A launch joins an earlier one of the same kind if no step between them, nor a launch in the group, writes
memory that it reads or writes, or reads memory that it writes.  Memory is assigned already, so this needs no
more of it; `hlo-side-by-side` brings such instructions together before that.

Source: XLA's horizontal loop fusion.

Several launches as one kernel: each program finds by its number which of them it is part of.

    loop_part_ab12   the text of one of the kernels, which is given the number of the program
    loop_group_cd34  if the number is below 12, the first launch's pointers, else if it is below 20, ...

Launches of the same text are one part; a binary search over the first program of each chooses their pointers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpmd.compile.backends.native_gpu.launches import (
    BranchLaunch,
    CopyLaunch,
    FillLaunch,
    KernelLaunch,
    LaunchProgram,
    LoopLaunch,
    ProductLaunch,
    SimpleStep,
    Step,
)
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PROGRAM, PrintedKernel
from mpmd.compile.buffers.assignment import Slice
from mpmd.cost.device import Device


class KernelCall(NamedTuple):
    """A kernel and the memory of its arguments."""

    kernel: PrintedKernel
    arguments: tuple[Slice, ...]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Programs of one call: the first, and the numbers of its arguments among the group's."""

    first: int
    numbers: tuple[int, ...]


def pointers_of(calls: Sequence[KernelCall]) -> dict[tuple[Slice, str], int]:
    """The distinct arguments of some calls, with their numbers in a kernel of all of them."""
    found: dict[tuple[Slice, str], int] = {}
    for kernel, arguments in calls:
        for place, pointer in zip(arguments, kernel.pointers, strict=True):
            found.setdefault((place, pointer), len(found))
    return found


def grouped(calls: Sequence[KernelCall]) -> KernelCall:
    """One kernel for several calls that need nothing of each other.

    Args:
        calls: of kernels of one kind; their programs get as many warps as that with the most.
    """
    numbers = pointers_of(calls)
    lines, parts, first = [f"    pid = {PROGRAM}"], list[str](), 0
    by_kernel = sorted(calls, key=lambda call: call.kernel.name)
    for which, (name, same) in enumerate(itertools.groupby(by_kernel, lambda call: call.kernel.name)):
        segments, start = [], first
        for kernel, arguments in same:
            given = zip(arguments, kernel.pointers, strict=True)
            segments.append(_Segment(first, tuple(numbers[place] for place in given)))
            first += kernel.grid
        part = name.replace("_", "_part_", 1)
        parts.append(_part(part, kernel))
        lines.append(f"    if (pid >= {start}) & (pid < {first}):")
        shared = [len(set(column)) == 1 for column in zip(*(s.numbers for s in segments))]
        lines += _chosen(segments, shared, f"{which}", " " * 8)
        fixed = enumerate(zip(segments[0].numbers, shared))
        names = [f"p{n}" if same_for_all else f"x{which}_{k}" for k, (n, same_for_all) in fixed]
        lines.append(f"        {part}({', '.join([*names, f'pid - s{which}'])})")
    kernels = [kernel for kernel, _ in calls]
    body = f"({', '.join(f'p{n}' for n in numbers.values())}):\n" + "\n".join(lines) + "\n"
    made = PrintedKernel(
        kind=f"{kernels[0].kind}_group",
        body=body,
        pointers=tuple(pointer for _, pointer in numbers),
        aligned=tuple(_all_aligned(calls, numbers)),
        operands=tuple(numbers.values()),
        sizes=tuple(_sizes(calls, numbers)),
        reads=frozenset(_used(calls, numbers, written=False)),
        writes=frozenset(_used(calls, numbers, written=True)),
        grid=first,
        warps=max(kernel.warps for kernel in kernels),
        parts=tuple(parts),
    )
    return KernelCall(made, tuple(place for place, _ in numbers))


def _part(name: str, kernel: PrintedKernel) -> str:
    """A kernel as a function that is given the number of its program."""
    head, _, text = kernel.body.partition("):\n")
    return f"@triton.jit\ndef {name}{head}, program):\n{text.replace(PROGRAM, 'program')}"


def _chosen(segments: Sequence[_Segment], shared: Sequence[bool], which: str, indent: str) -> Iterator[str]:
    """The pointers and the first program of the segment that `pid` is in."""
    if len(segments) == 1:
        (segment,) = segments
        for k, number in enumerate(segment.numbers):
            if not shared[k]:
                yield f"{indent}x{which}_{k} = p{number}"
        yield f"{indent}s{which} = {segment.first}"
        return
    half = len(segments) // 2
    yield f"{indent}if pid < {segments[half].first}:"
    yield from _chosen(segments[:half], shared, which, indent + "    ")
    yield f"{indent}else:"
    yield from _chosen(segments[half:], shared, which, indent + "    ")


def _arguments(calls: Sequence[KernelCall]) -> Iterator[tuple[PrintedKernel, int, tuple[Slice, str]]]:
    for kernel, arguments in calls:
        for k, place in enumerate(zip(arguments, kernel.pointers, strict=True)):
            yield kernel, k, place


def _all_aligned(calls: Sequence[KernelCall], numbers: dict[tuple[Slice, str], int]) -> list[bool]:
    """An argument is aligned if it is for each kernel that has it: it is the same memory."""
    found = [True] * len(numbers)
    for kernel, k, place in _arguments(calls):
        found[numbers[place]] &= kernel.aligned[k]
    return found


def _sizes(calls: Sequence[KernelCall], numbers: dict[tuple[Slice, str], int]) -> list[int]:
    found = [0] * len(numbers)
    for kernel, k, place in _arguments(calls):
        found[numbers[place]] = max(found[numbers[place]], kernel.sizes[k])
    return found


def _used(calls: Sequence[KernelCall], numbers: dict[tuple[Slice, str], int], *, written: bool) -> set[int]:
    return {
        numbers[place]
        for kernel, k, place in _arguments(calls)
        if kernel.operands[k] in (kernel.writes if written else kernel.reads)
    }


MAX_POINTERS = 480
"""Of one kernel: CUDA gives a kernel 4 KB of parameters, and Triton adds two."""
_MAX_PARTS = 8
"""Different kernels in one: it needs the registers of the largest."""
_FEW_WARPS = 4
"""Of the programs of small arrays: they run with as many as others, and leave some without work."""
_WINDOW = 64
"""Steps that a launch is moved over at most."""
_MAX_STARTS = 16
"""The time of the largest launch that joins others, in launches."""


class StepMemory:
    """The memory that steps read and write: per allocation, the bytes from one position to another."""

    def __init__(self) -> None:
        self.reads: dict[int, list[Slice]] = {}
        self.writes: dict[int, list[Slice]] = {}

    def add(self, reads: Iterable[Slice], writes: Iterable[Slice]) -> None:
        for places, kept in ((reads, self.reads), (writes, self.writes)):
            for place in places:
                kept.setdefault(place.allocation, []).append(place)

    def add_all(self, other: StepMemory) -> None:
        for own, more in ((self.reads, other.reads), (self.writes, other.writes)):
            for number, places in more.items():
                own.setdefault(number, []).extend(places)

    def conflicts(self, other: StepMemory) -> bool:
        """Whether the order of both matters."""
        return (
            _meet(self.writes, other.writes)
            or _meet(self.writes, other.reads)
            or _meet(self.reads, other.writes)
        )


def _meet(some: Mapping[int, list[Slice]], others: Mapping[int, list[Slice]]) -> bool:
    few, many = (some, others) if len(some) < len(others) else (others, some)
    return any(a.overlaps(b) for number, places in few.items() for a in places for b in many.get(number, ()))


@dataclasses.dataclass
class _Slot:
    """A step, or launches that become one.

    Attributes:
        steps: it or they.
        memory: what they read and write.
        kind: equal for launches that may become one; None for a step that stays alone.
        parts, pointers: the names of their kernels, and their arguments.
    """

    steps: list[SimpleStep]
    memory: StepMemory = dataclasses.field(default_factory=StepMemory)
    kind: tuple[str, int] | None = None
    parts: set[str] = dataclasses.field(default_factory=set)
    pointers: set[tuple[Slice, str]] = dataclasses.field(default_factory=set)

    def takes(self, other: _Slot) -> bool:
        """Whether both may be one kernel, if none needs the other."""
        return (
            self.kind == other.kind
            and len(self.parts | other.parts) <= _MAX_PARTS
            and len(self.pointers | other.pointers) <= MAX_POINTERS
        )

    def take(self, other: _Slot) -> None:
        self.steps += other.steps
        self.memory.add_all(other.memory)
        self.parts |= other.parts
        self.pointers |= other.pointers


def small_bytes(device: Device) -> int:
    """Bytes up to which a kernel is small: moving them takes no longer than some launches."""
    return int(_MAX_STARTS * device.start_seconds * device.bandwidth)


def side_by_side(program: LaunchProgram, most_bytes: int) -> LaunchProgram:
    """The program with groups of launches, also inside of loops and branches.

    Args:
        program: the program.
        most_bytes: of the arrays of a launch that joins others.
    """
    work = _Fusion(program.kernels, most_bytes)
    steps = work.steps(program.steps)
    kernels = {step.kernel: work.kernels[step.kernel] for step in _kernel_launches(steps)}
    return dataclasses.replace(program, steps=steps, kernels=kernels)


def _kernel_launches(steps: Sequence[Step]) -> Iterable[KernelLaunch]:
    for step in steps:
        if isinstance(step, KernelLaunch):
            yield step
        for inner in _inside(step):
            yield from _kernel_launches(inner)


def _inside(step: Step) -> tuple[tuple[Step, ...], ...]:
    if isinstance(step, LoopLaunch):
        return (step.condition, step.body)
    return step.branches if isinstance(step, BranchLaunch) else ()


def launch_groups(
    steps: Sequence[SimpleStep], kernels: Mapping[str, PrintedKernel], most_bytes: int
) -> list[list[SimpleStep]]:
    """The steps in an order in which those that become one launch are together.

    Args:
        steps: in order.
        kernels: by name.
        most_bytes: of the arrays of a launch that joins others.
    """
    slots: list[_Slot] = []
    for step in steps:
        added = _slot(step, kernels, most_bytes)
        found = _place(slots, added) if added.kind is not None else None
        if found is None:
            slots.append(added)
        else:
            found.take(added)
    return [slot.steps for slot in slots]


def _place(slots: Sequence[_Slot], added: _Slot) -> _Slot | None:
    """The nearest group that a launch may join."""
    for slot in slots[: -_WINDOW - 1 : -1]:
        if added.memory.conflicts(slot.memory):
            return None
        if slot.takes(added):
            return slot
    return None


def _slot(step: SimpleStep, kernels: Mapping[str, PrintedKernel], most_bytes: int) -> _Slot:
    slot = _Slot([step])
    if isinstance(step, ProductLaunch):
        slot.memory.add(step.reads, (step.d,))
    elif isinstance(step, CopyLaunch):
        slot.memory.add((step.source,), (step.target,))
    elif isinstance(step, FillLaunch):
        slot.memory.add((), (step.target,))
    else:
        kernel = kernels[step.kernel]
        numbered = list(zip(kernel.operands, step.arguments, strict=True))
        reads, writes = (
            [place for number, place in numbered if number in used] for used in (kernel.reads, kernel.writes)
        )
        slot.memory.add(reads, writes)
        if sum(step.sizes) <= most_bytes and not kernel.flops:
            slot.kind = kernel.kind, max(kernel.warps, _FEW_WARPS)
            slot.parts.add(kernel.name)
            slot.pointers.update(zip(step.arguments, kernel.pointers))
    return slot


class _Fusion:
    """The work on one program: `kernels` are its own and the groups'."""

    def __init__(self, kernels: Mapping[str, PrintedKernel], most_bytes: int) -> None:
        self.kernels = dict(kernels)
        self.most_bytes = most_bytes

    def steps(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Loops and branches stay where they are."""
        found: list[Step] = []
        straight: list[SimpleStep] = []
        for step in steps:
            if not isinstance(step, LoopLaunch | BranchLaunch):
                straight.append(step)
                continue
            found += self._straight(straight)
            straight = []
            if isinstance(step, LoopLaunch):
                condition, body = self.steps(step.condition), self.steps(step.body)
                found.append(dataclasses.replace(step, condition=condition, body=body))
            else:
                found.append(dataclasses.replace(step, branches=tuple(map(self.steps, step.branches))))
        return (*found, *self._straight(straight))

    def _straight(self, steps: Sequence[SimpleStep]) -> list[Step]:
        return [self._one(group) for group in launch_groups(steps, self.kernels, self.most_bytes)]

    def _one(self, group: Sequence[SimpleStep]) -> Step:
        if len(group) == 1:
            return group[0]
        launches = [step for step in group if isinstance(step, KernelLaunch)]
        kernel, arguments = grouped([self._call(launch) for launch in launches])
        self.kernels[kernel.name] = kernel
        name = f"{launches[0].name} and {len(group) - 1} more"
        return KernelLaunch(name, kernel.name, arguments, kernel.grid, kernel.sizes)

    def _call(self, launch: KernelLaunch) -> KernelCall:
        kernel = dataclasses.replace(self.kernels[launch.kernel], grid=launch.grid, sizes=launch.sizes)
        return KernelCall(kernel, launch.arguments)
