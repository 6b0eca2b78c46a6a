"""An independent check of a program's memory: run its thunks on memory that holds names instead of numbers.

Every read must find the name of the value that the HLO says is read, in every byte of the slice; a write
leaves the name of what was computed.  Nothing of the analyses that assigned the memory is used: slices, the
read and write sets of thunks, and where HLO says that values come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from mpmd.compile.analysis.in_place import in_place_pairs
from mpmd.compile.buffers.assignment import Allocation, Slice
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import ShapeIndex
from mpmd.compile.kernels.sharing import may_share
from mpmd.compile.thunks.poison import is_poison
from mpmd.compile.thunks.thunk import (
    AttentionThunk,
    CollectiveThunk,
    ConditionalThunk,
    CopyThunk,
    KernelThunk,
    MatmulThunk,
    StartThunk,
    Thunk,
    WhileThunk,
)
from mpmd.errors import CompileError, collect

Name = tuple[HloInstruction, ShapeIndex]
"""A value: what computes it, and which of its results."""

Where = Callable[[HloInstruction, ShapeIndex], Slice]


def check_thunks(
    module: HloModule,
    thunks: Sequence[Thunk],
    where: Where,
    allocations: Sequence[Allocation],
    results: Sequence[Slice],
) -> None:
    """Follow a program of thunks; slow, and for tests.

    Loops are followed twice, each branch once.

    Args:
        module: what the thunks compute.
        thunks: in order, those of loops and branches inside of them.
        where: the slice of a value.
        allocations: by number.
        results: where the results must be at the end.

    Raises:
        CompileError: a read finds other bytes than it should, a parameter is written that nobody gave away,
            or a result is not in its place; all of them are named.
    """
    check = _Check(module, where, allocations)
    check.begin()
    check.follow(module.entry, thunks)
    check.end(results)
    if check.problems:
        raise collect(CompileError, check.problems, "the memory of the program is wrong:")


def origin(instruction: HloInstruction, index: ShapeIndex = ()) -> Name:
    """The value at a position of a result, through what only hands it on.

    State of a loop is the loop's, unless its body hands it on as it is.
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
    """The same, up to the parameters of the computation that it stands in."""
    while True:
        opcode = instruction.opcode
        if opcode in ("bitcast", "opt-barrier", "domain", "add-dependency", "copy-done"):
            instruction = instruction.operands[0]
        elif opcode == "tuple":
            instruction, index = instruction.operands[index[0]], index[1:]
        elif opcode == "get-tuple-element":
            instruction, index = instruction.operands[0], (instruction.tuple_index, *index)
        elif opcode == "while" and _unchanged(instruction, index):
            instruction = instruction.operands[0]
        else:
            return instruction, index


def _unchanged(loop: HloInstruction, index: ShapeIndex) -> bool:
    """Whether the body of a loop hands on a part of its state as it is."""
    return _within_computation(loop.while_body.root, index) == (loop.while_body.parameters[0], index)


class _Memory:
    """Names in the bytes of all allocations."""

    def __init__(self) -> None:
        self._parts: dict[int, list[tuple[int, int, Name]]] = {}

    def write(self, place: Slice, name: Name | None) -> None:
        """Let a slice hold a name, or nothing."""
        low, high = place.offset, place.offset + place.size
        kept: list[tuple[int, int, Name]] = []
        for start, end, old in self._parts.get(place.allocation, []):
            if start < low:
                kept.append((start, min(end, low), old))
            if end > high:
                kept.append((max(start, high), end, old))
        if name is not None and place.size:
            kept.append((low, high, name))
        self._parts[place.allocation] = sorted(kept, key=lambda part: part[0])

    def read(self, place: Slice) -> set[Name | None]:
        """All names in a slice; None stands for bytes that hold nothing."""
        at, high = place.offset, place.offset + place.size
        found: set[Name | None] = set()
        for start, end, name in self._parts.get(place.allocation, []):
            if start < high and end > at:
                if start > at:
                    found.add(None)
                found.add(name)
                at = end
        if at < high:
            found.add(None)
        return found

    def copy(self) -> _Memory:
        """The same memory."""
        made = _Memory()
        made._parts = {number: list(parts) for number, parts in self._parts.items()}
        return made

    def forget(self, stale: Callable[[Name], bool]) -> None:
        """Let bytes with certain names hold nothing."""
        for number, parts in self._parts.items():
            self._parts[number] = [part for part in parts if not stale(part[2])]

    def keep_common(self, other: _Memory) -> None:
        """Let bytes hold nothing where two memories differ."""
        for number, parts in list(self._parts.items()):
            edges = sorted(
                {e for start, end, _ in (*parts, *other._parts.get(number, [])) for e in (start, end)}
            )
            for low, high in pairwise(edges):
                part = Slice(number, low, high - low)
                if self.read(part) != other.read(part):
                    self.write(part, None)


class _Check:
    """The walk."""

    def __init__(self, module: HloModule, where: Where, allocations: Sequence[Allocation]) -> None:
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
        """Parameters and constants are there."""
        for parameter in self.module.entry.parameters:
            self.memory.write(self.where(parameter, ()), (parameter, ()))
        for computation in self.module.call_order():
            if computation.is_entry or any(c.opcode in ("while", "conditional") for c in computation.callers):
                for instruction in computation:
                    if instruction.opcode == "constant" and instruction.shape.is_array:
                        self.memory.write(self.where(instruction, ()), (instruction, ()))

    def end(self, results: Sequence[Slice]) -> None:
        """Results are where they must be."""
        root = self.module.entry.root
        for (index, _), place in zip(root.shape.leaves(), results):
            self._expect(f"result {list(index)}", place, origin(root, index))

    def follow(self, computation: HloComputation, thunks: Sequence[Thunk]) -> None:
        """The thunks of one computation."""
        named = {instruction.name: instruction for instruction in computation}
        for thunk in thunks:
            instruction = named.get(thunk.name)
            if isinstance(thunk, CopyThunk):
                self._copy(thunk)
            elif is_poison(thunk):
                for place in thunk.writes:
                    self.memory.write(place, None)
            elif instruction is None:
                self.problems.append(f"{thunk.line()}: no instruction of {computation.name} has this name")
            elif isinstance(thunk, WhileThunk):
                self._while(instruction, thunk)
            elif isinstance(thunk, ConditionalThunk):
                self._conditional(instruction, thunk)
            elif isinstance(thunk, StartThunk):
                self._start(instruction, thunk)
            elif isinstance(thunk, CollectiveThunk) and thunk.start:
                self._end(instruction, named[thunk.start], thunk)
            else:
                self._compute(instruction, thunk)

    def _expect(self, what: str, place: Slice, name: Name) -> None:
        found = self.memory.read(place) if place.size else {name}
        if found != {name}:
            names = ", ".join(sorted(_text(n) for n in found))
            self.problems.append(f"{what}: {place} should hold {_text(name)}, and holds {names}")

    def _write(self, what: str, place: Slice, name: Name) -> None:
        if place.allocation in self.closed:
            self.problems.append(f"{what} writes to {self.allocations[place.allocation]}")
        if place.offset + place.size > self.allocations[place.allocation].size:
            self.problems.append(f"{what} writes to {place}, beyond {self.allocations[place.allocation]}")
        self.memory.write(place, name)

    def _copy(self, thunk: CopyThunk) -> None:
        if thunk.source.overlaps(thunk.target):
            self.problems.append(f"{thunk.line()}: the copy overlaps its own source")
        found = self.memory.read(thunk.source)
        if len(found) != 1 or None in found:
            names = ", ".join(sorted(_text(n) for n in found))
            self.problems.append(f"{thunk.line()}: the source holds {names}")
            return
        (name,) = found
        assert name is not None
        self._write(thunk.line(), thunk.target, name)

    def _compute(self, instruction: HloInstruction, thunk: Thunk) -> None:
        expected = [
            (self.where(operand, index), origin(operand, index))
            for operand in instruction.operands
            for index, shape in operand.shape.leaves()
            if shape.is_array
        ]
        changed = {
            outer: origin(instruction.operands[o], inner) for o, inner, outer in in_place_pairs(instruction)
        }
        made = [(self.where(instruction, index), index) for index, _ in instruction.shape.leaves()]
        expected += [(place, changed[index]) for place, index in made if index in changed]
        for place in dict.fromkeys(thunk.reads):
            names = list(dict.fromkeys(name for at, name in expected if at == place))
            if not names:
                self.problems.append(f"{thunk.line()}: reads {place}, where none of its operands lies")
            for name in names:
                self._expect(thunk.line(), place, name)
        for place, index in made:
            if index in changed:
                self._expect(f"{thunk.line()}, before it", place, changed[index])
        self.problems += [f"{thunk.line()}: {problem}" for problem in _overlaps(thunk)]
        for place in thunk.writes:
            self._write(thunk.line(), place, (instruction, (-1,)))
        for place, index in made:
            if place.size and place not in thunk.writes:
                self.problems.append(f"{thunk.line()}: does not write {place}, where {list(index)} lies")
            self._write(thunk.line(), place, (instruction, index))

    def _start(self, start: HloInstruction, thunk: StartThunk) -> None:
        """From here on the results are nobody's, and the operands are not this device's alone."""
        for operand, place in zip(start.operands, thunk.reads, strict=True):
            self._expect(thunk.line(), place, origin(operand))
        self.problems += [f"{thunk.line()}: {problem}" for problem in _overlaps(thunk)]
        for place in thunk.writes:
            self._write(thunk.line(), place, (start, (-1,)))

    def _end(self, done: HloInstruction, start: HloInstruction, thunk: CollectiveThunk) -> None:
        """What was given away at the start must be as it was."""
        for operand, place in zip(start.operands, thunk.reads, strict=True):
            self._expect(thunk.line(), place, (start, (-1,)) if place in thunk.writes else origin(operand))
        for (index, _), place in zip(done.shape.leaves(), thunk.writes, strict=True):
            self._expect(f"{thunk.line()}, before it", place, (start, (-1,)))
            if place != self.where(done, index):
                self.problems.append(f"{thunk.line()}: does not write {list(index)} where it lies")
        for (index, _), place in zip(done.shape.leaves(), thunk.writes, strict=True):
            self._write(thunk.line(), place, (done, index))

    def _while(self, loop: HloInstruction, thunk: WhileThunk) -> None:
        leaves = [index for index, _ in loop.shape.leaves()]
        inside = _inside(loop)

        def stale(name: Name) -> bool:
            return name[0].opcode != "constant" and name[0].parent in inside

        before = [origin(loop.operands[0], index) for index in leaves]
        for _ in range(3):
            self._rename(loop, before)
            self.memory.forget(stale)
            self.follow(loop.while_condition, thunk.condition)
            self._expect(f"{thunk.line()}, its flag", thunk.flag, origin(loop.while_condition.root))
            after = self.memory.copy()
            self.follow(loop.while_body, thunk.body)
            before = [origin(loop.while_body.root, index) for index in leaves]
        self.memory = after

    def _rename(self, instruction: HloInstruction, before: Sequence[Name]) -> None:
        """What stands in the slices of a loop or branch is its own value from now on."""
        for (index, _), name in zip(instruction.shape.leaves(), before):
            self._expect(f"{instruction.name} {list(index)}", self.where(instruction, index), name)
        for index, _ in instruction.shape.leaves():
            self.memory.write(self.where(instruction, index), origin(instruction, index))

    def _conditional(self, conditional: HloInstruction, thunk: ConditionalThunk) -> None:
        self._expect(f"{thunk.line()}, its selector", thunk.selector, origin(conditional.operands[0]))
        first, ends = self.memory, []
        for branch, inner in zip(conditional.called, thunk.branches, strict=True):
            self.memory = first.copy()
            self.follow(branch, inner)
            self._rename(conditional, [origin(branch.root, i) for i, _ in conditional.shape.leaves()])
            ends.append(self.memory)
        self.memory = ends[0]
        for other in ends[1:]:
            self.memory.keep_common(other)


def _overlaps(thunk: Thunk) -> list[str]:
    """What a kernel writes over what it reads, although it may still read there."""
    if isinstance(thunk, KernelThunk):
        plan, operands = thunk.plan, dict(enumerate(thunk.operands))
        found = [
            f"writes its scratch {thunk.scratch} over {place}"
            for place in operands.values()
            if thunk.scratch is not None and thunk.scratch.overlaps(place)
        ]
    elif isinstance(thunk, MatmulThunk):
        found = [
            f"writes {result} over a factor"
            for result in thunk.writes
            if result.overlaps(thunk.a) or result.overlaps(thunk.b)
        ]
        if thunk.plan.epilogue is None:
            return found
        plan, operands = thunk.plan.epilogue, dict(thunk.operands)
    elif isinstance(thunk, CollectiveThunk | StartThunk):
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
            if place != operands[result] or not may_share(plan, source, result):
                found.append(f"writes {operands[result]} over {place}, which it may still read")
    return found


def _inside(loop: HloInstruction) -> set[HloComputation]:
    """The computations of a loop, and all that they call."""
    found = list(loop.called)
    for computation in found:
        for instruction in computation:
            found += [c for c in instruction.called if c not in found]
    return set(found)


def _text(name: Name | None) -> str:
    if name is None:
        return "nothing"
    instruction, index = name
    return f"scratch of {instruction.name}" if index == (-1,) else f"{instruction.name}{list(index) or ''}"
