"""Several launches as one kernel: each program finds by its number which of them it is part of.

    loop_part_ab12   the text of one of the kernels, which is given the number of the program
    loop_group_cd34  if the number is below 12, the first launch's pointers, else if it is below 20, ...

Launches of the same text are one part; a binary search over the first program of each chooses their pointers.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpmd.compile.backends.native_gpu.triton.kernels import PROGRAM, PrintedKernel
from mpmd.compile.buffers.assignment import Slice


class KernelCall(NamedTuple):
    """A kernel and the memory of its arguments."""

    kernel: PrintedKernel
    arguments: tuple[Slice, ...]


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Programs of one call: the first, and the numbers of its arguments among those of the group."""

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
