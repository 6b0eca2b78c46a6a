"""An independent check of a program's memory: executes its thunks on memory that holds names, not numbers.

Every read must find the name of the value that the HLO reads, in every byte of the slice; a write
stores the name of the computed value.  The check does not use the analyses that assigned the memory: it uses
slices, the read and write sets of thunks, and the data flow of the HLO.

Each thunk is executed once.  A loop is executed in memory that is empty wherever the loop writes, except
for its state; the body must leave it so.  The result for one iteration then holds for all of them.

A program whose memory is wrong, or on which the compiler failed, is written to a report.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpmd.compile.analysis.liveness import in_place_pairs
from mpmd.compile.buffers.assignment import Allocation, BufferAssignment, Slice
from mpmd.compile.buffers.buffer_report import assignment_report
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.hlo import print_module
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.compile.kernels.kernel_plan import may_share
from mpmd.compile.options import Dump
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    CollectiveThunk,
    ConditionalThunk,
    CopyThunk,
    KernelThunk,
    MatmulThunk,
    Thunk,
    WhileThunk,
    listing,
)
from mpmd.errors import CompileError, MiscompiledError, collect

Name = tuple[HloInstruction, ShapeIndex]
"""A value: the instruction that computes it, and the number of its result."""

Where = Callable[[HloInstruction, ShapeIndex], Slice]


def check_thunks(
    module: HloModule,
    thunks: Sequence[Thunk],
    where: Where,
    allocations: Sequence[Allocation],
    results: Sequence[Slice],
    *,
    stores_last: bool = False,
) -> None:
    """Execute a program of thunks on names; linear in their number.

    Args:
        module: the program that the thunks compute.
        thunks: in order, those of loops and branches inside of them.
        where: the slice of a value.
        allocations: by number.
        results: where the results must be at the end.
        stores_last: what kernels of the target do; see `may_share`.

    Raises:
        CompileError: a read finds other bytes than it should, a parameter that is not donated is written,
            or a result is not in its place; all of them are named.
    """
    check = _ThunkCheck(module, where, allocations, stores_last)
    check.begin()
    check.follow(module.entry, thunks)
    check.end(results)
    if check.problems:
        raise collect(
            CompileError, list(dict.fromkeys(check.problems)), "the memory of the program is wrong:"
        )


def origin(instruction: HloInstruction, index: ShapeIndex = ()) -> Name:
    """The value at a position of a result, through instructions that only forward it.

    The state of a loop is the loop's, unless its body returns it unchanged.
    """
    while True:
        instruction, index = _within_computation(instruction, index)
        if instruction.opcode != "parameter" or instruction.parent.is_entry:
            return instruction, index
        (caller,) = instruction.parent.callers
        if caller.opcode != "while":
            instruction = caller.operands[1 + caller.called.index(instruction.parent)]
        elif _unchanged(caller, index):
            instruction = caller.operands[0]
        else:
            return caller, index


def _within_computation(instruction: HloInstruction, index: ShapeIndex) -> Name:
    """The same, up to the parameters of the computation that it is in."""
    while True:
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            instruction, index = instruction.operands[0], (instruction.tuple_index, *index)
        elif opcode == "tuple":
            instruction, index = instruction.operands[index[0]], index[1:]
        elif opcode in _FORWARDING or (opcode == "while" and _unchanged(instruction, index)):
            instruction = instruction.operands[0]
        else:
            common = _common(instruction, index) if opcode == "conditional" else None
            return common or (instruction, index)


_FORWARDING = frozenset(("bitcast", "opt-barrier", "domain", "add-dependency", "copy-done"))


def _unchanged(loop: HloInstruction, index: ShapeIndex) -> bool:
    """Whether the body of a loop returns a part of its state unchanged."""
    return _within_computation(loop.while_body.root, index) == (loop.while_body.parameters[0], index)


def _common(conditional: HloInstruction, index: ShapeIndex) -> Name | None:
    """The value that all branches get and return unchanged, if there is one."""
    names: set[Name] = set()
    for branch, operand in zip(conditional.called, conditional.operands[1:], strict=True):
        instruction, inner = _within_computation(branch.root, index)
        if instruction is not branch.parameters[0]:
            return None
        names.add(_within_computation(operand, inner))
    return names.pop() if len(names) == 1 else None


class _Memory:
    """Names in the bytes of all allocations: per allocation the ranges of bytes that hold one, in order."""

    def __init__(self) -> None:
        self._starts: dict[int, list[int]] = {}
        self._parts: dict[int, list[tuple[int, Name]]] = {}

    def write(self, place: Slice, name: Name | None) -> None:
        """Let a slice hold a name, or nothing."""
        if not place.size:
            return
        low, high = place.offset, place.offset + place.size
        starts = self._starts.setdefault(place.allocation, [])
        parts = self._parts.setdefault(place.allocation, [])
        first = self._first(starts, parts, low)
        last = bisect_left(starts, high, first)
        kept: list[tuple[int, int, Name]] = [] if name is None else [(low, high, name)]
        if first < last:
            if starts[first] < low:
                kept.insert(0, (starts[first], low, parts[first][1]))
            end, old = parts[last - 1]
            if end > high:
                kept.append((high, end, old))
        starts[first:last] = [start for start, _, _ in kept]
        parts[first:last] = [(end, held) for _, end, held in kept]

    def read(self, place: Slice) -> set[Name | None]:
        """All names in a slice; None stands for bytes that hold nothing."""
        at, high = place.offset, place.offset + place.size
        starts = self._starts.get(place.allocation, [])
        parts = self._parts.get(place.allocation, [])
        names: set[Name | None] = set()
        for number in range(self._first(starts, parts, at), bisect_left(starts, high)):
            if starts[number] > at:
                names.add(None)
            at, name = parts[number]
            names.add(name)
        if at < high:
            names.add(None)
        return names

    @staticmethod
    def _first(starts: list[int], parts: list[tuple[int, Name]], low: int) -> int:
        """The number of the first range that reaches beyond a byte."""
        number = bisect_left(starts, low)
        return number - 1 if number and parts[number - 1][0] > low else number

    def without(self, places: Iterable[Slice]) -> _Memory:
        cleared = _Memory()
        cleared._starts = {number: list(starts) for number, starts in self._starts.items()}
        cleared._parts = {number: list(parts) for number, parts in self._parts.items()}
        for place in places:
            cleared.write(place, None)
        return cleared


class _ThunkCheck:
    """One check."""

    def __init__(
        self, module: HloModule, where: Where, allocations: Sequence[Allocation], stores_last: bool
    ) -> None:
        self.stores_last = stores_last
        self.module = module
        self.where = where
        self.allocations = allocations
        self.memory = _Memory()
        self.problems: list[str] = []
        given = {a.parameter for a in module.input_output_alias}
        self.closed = {
            a.number
            for a in allocations
            if a.kind == "constant" or (a.kind == "parameter" and a.index not in given)
        }

    def begin(self) -> None:
        for parameter in self.module.entry.parameters:
            self.memory.write(self.where(parameter, ()), (parameter, ()))
        for computation in self.module.call_order():
            if computation.is_entry or any(c.opcode in ("while", "conditional") for c in computation.callers):
                for instruction in computation:
                    if instruction.opcode == "constant" and instruction.shape.is_array:
                        self.memory.write(self.where(instruction, ()), (instruction, ()))

    def end(self, results: Sequence[Slice]) -> None:
        root = self.module.entry.root
        for (index, _), place in zip(root.shape.leaves(), results):
            self._expect(f"result {list(index)}", place, origin(root, index))

    def follow(self, computation: HloComputation, thunks: Sequence[Thunk]) -> None:
        named = {instruction.name: instruction for instruction in computation}
        for thunk in thunks:
            instruction = named.get(thunk.name)
            if isinstance(thunk, CopyThunk):
                self._copy(thunk)
            elif instruction is None and not thunk.reads:  # what it writes over is lost
                for place in thunk.writes:
                    self._write(thunk, place, None)
            elif instruction is None:
                self._report(thunk, f"no instruction of {computation.name} has this name")
            elif isinstance(thunk, WhileThunk):
                self._while(instruction, thunk)
            elif isinstance(thunk, ConditionalThunk):
                self._conditional(instruction, thunk)
            else:
                self._compute(instruction, thunk)

    def _report(self, thunk: Thunk | str, problem: str) -> None:
        self.problems.append(f"{thunk if isinstance(thunk, str) else thunk.line()}: {problem}")

    def _expect(self, thunk: Thunk | str, place: Slice, name: Name, when: str = "") -> None:
        if not place.size:
            return
        held = self.memory.read(place)
        if held != {name}:
            names = ", ".join(sorted(_text(n) for n in held))
            self._report(thunk, f"{when}{place} should hold {_text(name)}, and holds {names}")

    def _write(self, thunk: Thunk, place: Slice, name: Name | None) -> None:
        allocation = self.allocations[place.allocation]
        if place.allocation in self.closed:
            self._report(thunk, f"writes to {allocation}")
        if place.offset + place.size > allocation.size:
            self._report(thunk, f"writes to {place}, beyond {allocation}")
        self.memory.write(place, name)

    def _copy(self, thunk: CopyThunk) -> None:
        if thunk.source.overlaps(thunk.target):
            self._report(thunk, "the copy overlaps its own source")
        held = self.memory.read(thunk.source)
        name = next(iter(held))
        if len(held) == 1 and name is not None:
            self._write(thunk, thunk.target, name)
        else:
            names = ", ".join(sorted(_text(n) for n in held))
            self._report(thunk, f"the source holds {names}")

    def _compute(self, instruction: HloInstruction, thunk: Thunk) -> None:
        changed = {
            outer: origin(instruction.operands[o], inner) for o, inner, outer in in_place_pairs(instruction)
        }
        results = [(self.where(instruction, index), index) for index, _ in instruction.shape.leaves()]
        expected: dict[Slice, dict[Name, None]] = {}
        for operand in instruction.operands:
            for index, shape in operand.shape.leaves():
                if shape.is_array:
                    expected.setdefault(self.where(operand, index), {})[origin(operand, index)] = None
        for place, index in results:
            if index in changed:
                expected.setdefault(place, {})[changed[index]] = None
        for place in dict.fromkeys(thunk.reads):
            if place not in expected:
                self._report(thunk, f"reads {place}, where none of its operands is")
            for name in expected.get(place, ()):
                self._expect(thunk, place, name)
        for place, index in results:
            if index in changed:
                self._expect(thunk, place, changed[index], "before it, ")
        for problem in _overlaps(thunk, self.stores_last):
            self._report(thunk, problem)
        writes = thunk.writes
        for place in writes:
            self._write(thunk, place, (instruction, (-1,)))
        for place, index in results:
            if place.size and place not in writes:
                self._report(thunk, f"does not write {place}, the slice of {list(index)}")
            self._write(thunk, place, (instruction, index))

    def _while(self, loop: HloInstruction, thunk: WhileThunk) -> None:
        """An iteration: it begins with only the state in the memory that the loop writes, and ends so."""
        state = [(index, self.where(loop, index)) for index, _ in loop.shape.leaves()]
        for index, place in state:
            self._expect(f"{loop.name} {list(index)}", place, origin(loop.operands[0], index))
        self.memory = self.memory.without(dict.fromkeys(thunk.writes))
        for index, place in state:
            self.memory.write(place, origin(loop, index))
        self.follow(loop.while_condition, thunk.condition)
        self._expect(thunk, thunk.flag, origin(loop.while_condition.root), "its flag, ")
        after = self.memory.without(())
        self.follow(loop.while_body, thunk.body)
        for index, place in state:
            what = f"{loop.name} {list(index)}, after its body"
            self._expect(what, place, origin(loop.while_body.root, index))
        self.memory = after

    def _conditional(self, conditional: HloInstruction, thunk: ConditionalThunk) -> None:
        """After a branch, the memory that it writes is empty, except for the results."""
        self._expect(thunk, thunk.selector, origin(conditional.operands[0]), "its selector, ")
        results = [(index, self.where(conditional, index)) for index, _ in conditional.shape.leaves()]
        before = self.memory
        for branch, inner in zip(conditional.called, thunk.branches, strict=True):
            self.memory = before.without(())
            self.follow(branch, inner)
            for index, place in results:
                what = f"{conditional.name} {list(index)}, after {branch.name}"
                self._expect(what, place, origin(branch.root, index))
        self.memory = before.without(dict.fromkeys(thunk.writes))
        for index, place in results:
            self.memory.write(place, origin(conditional, index))


def _overlaps(thunk: Thunk, stores_last: bool) -> list[str]:
    """Writes of a kernel over operands that it may still read."""
    if isinstance(thunk, KernelThunk):
        plan, operands = thunk.plan, dict(enumerate(thunk.operands))
        problems = [
            f"writes its scratch {thunk.scratch} over {place}"
            for place in operands.values()
            if thunk.scratch is not None and thunk.scratch.overlaps(place)
        ]
    elif isinstance(thunk, MatmulThunk):
        problems = [
            f"writes {result} over a factor"
            for result in thunk.writes
            if result.overlaps(thunk.a) or result.overlaps(thunk.b)
        ]
        if thunk.plan.epilogue is None:
            return problems
        plan, operands = thunk.plan.epilogue, dict(thunk.operands)
    elif isinstance(thunk, CollectiveThunk):
        return [
            f"writes {place} over {read}, which a device may still read"
            for result, place in enumerate(thunk.writes)
            for operand, read in enumerate(thunk.reads)
            if place.overlaps(read) and not (place == read and thunk.plan.may_share(operand, result))
        ]
    elif isinstance(thunk, AttentionThunk):
        reads = thunk.reads
        return [f"writes {w} over {r}" for w in thunk.writes for r in reads if w.overlaps(r)]
    else:
        return []
    for result in plan.results:
        for source, place in operands.items():
            if source == result or result not in operands or not place.overlaps(operands[result]):
                continue
            if place != operands[result] or not may_share(plan, source, result, stores_last=stores_last):
                problems.append(f"writes {operands[result]} over {place}, which it may still read")
    return problems


def _text(name: Name | None) -> str:
    if name is None:
        return "nothing"
    instruction, index = name
    return f"scratch of {instruction.name}" if index == (-1,) else f"{instruction.name}{list(index) or ''}"


_FILE = "miscompiled.txt"


def check_program(
    fragment: FragmentModule,
    module: HloModule,
    thunks: Sequence[Thunk],
    assignment: BufferAssignment,
    *,
    stores_last: bool = False,
) -> None:
    """Check the memory of a fragment's program before code generation.

    Args:
        fragment: the source.
        module: the scheduled HLO.
        thunks: its work.
        assignment: its memory.
        stores_last: what kernels of the target do; see `may_share`.

    Raises:
        MiscompiledError: it is wrong, or the check itself fails; holds the text of the program.
    """
    try:
        places = assignment.allocations, assignment.results
        check_thunks(module, thunks, assignment.at, *places, stores_last=stores_last)
        return
    except CompileError as error:
        cause, problems = error, str(error)
    except Exception as failure:  # a program that cannot be checked is not run, either
        cause, problems = CompileError(f"the check failed: {failure}"), traceback.format_exc()
    texts = {
        "thunks": listing(thunks),
        "buffers": assignment_report(assignment),
        "HLO": print_module(module),
    }
    raise MiscompiledError(
        f"fragment {fragment.name} on {fragment.mesh}: the native compiler gave its values the wrong memory",
        _report(fragment, problems, texts),
    ) from cause


def compiler_failure(fragment: FragmentModule) -> MiscompiledError:
    """The error for an exception of the compiler itself, which is being handled."""
    return MiscompiledError(
        f"fragment {fragment.name} on {fragment.mesh}: the native compiler failed",
        _report(fragment, traceback.format_exc(), {}),
        "the native compiler failed on it",
    )


def _report(fragment: FragmentModule, problems: str, texts: Mapping[str, str]) -> str:
    names = ("mpmd", "jax", "jaxlib")
    parts = {
        "what is wrong": problems,
        "versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names),
        "fragment": f"{fragment.name} on {fragment.mesh}",
        **texts,
        "StableHLO": fragment.text,
    }
    return "\n\n".join(f"==== {title}\n{text.rstrip()}" for title, text in parts.items()) + "\n"


def write_report(fragment: FragmentModule, error: MiscompiledError, dump: Dump | None) -> str:
    """Write the text of a refused program to the dump, or else to a temporary file that stays.

    Returns:
        Its path; or, in brackets, why it could not be written.
    """
    try:
        if dump is not None:
            dump.write(fragment, _FILE, error.report)
            return str(dump.folder_of(fragment) / _FILE)
        handle, path = tempfile.mkstemp(prefix="mpmd-", suffix=f"-{_FILE}")
        with os.fdopen(handle, "w") as file:
            file.write(error.report)
        return path
    except OSError as problem:
        return f"(it could not be written: {problem})"
