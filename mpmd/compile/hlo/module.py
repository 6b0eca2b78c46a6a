"""HLO modules: a program, made of computations with one entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpmd.compile.hlo.attributes import BufferDonor, InputOutputAlias
from mpmd.compile.hlo.computation import HloComputation, in_order
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.errors import HloError


@dataclass(frozen=True)
class HloSource:
    """The text that a module was read from.

    Attributes:
        text: HLO text.
        name: where it came from, or "".
        places: the offsets at which instructions begin.
    """

    text: str
    name: str
    places: Mapping[HloInstruction, int]


class HloModule:
    """A program.

    Attributes:
        name: of the program.
        is_scheduled: the order of instructions is the order of execution.
        input_output_alias: results that may or must take a parameter's memory.
        buffer_donor: parameters whose memory may be reused for anything.
        parameter_layouts: shapes with layouts that the caller passes, or None: the parameters' own.
        result_layout: shape with layout that the caller gets, or None: the root's own.
        replica_count: number of replicas.
        num_partitions: number of partitions.
        header: further header attributes by key, as text.
        tables: text of the source tables (FileNames, StackFrames, ...) that metadata refers to, or "".
        source: what it was read from, until a pass changes it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_scheduled = False
        self.input_output_alias: tuple[InputOutputAlias, ...] = ()
        self.buffer_donor: tuple[BufferDonor, ...] = ()
        self.parameter_layouts: tuple[Shape, ...] | None = None
        self.result_layout: Shape | None = None
        self.replica_count = 1
        self.num_partitions = 1
        self.header: dict[str, str] = {}
        self.tables = ""
        self.source: HloSource | None = None
        self._computations: dict[str, HloComputation] = {}
        self._entry: HloComputation | None = None
        self._next_uid = 0

    # -- reading ------------------------------------------------------------------------------------

    @property
    def computations(self) -> list[HloComputation]:
        """All computations, in order of creation."""
        return list(self._computations.values())

    @property
    def entry(self) -> HloComputation:
        """Where the program starts.

        Raises:
            HloError: none was set yet.
        """
        if self._entry is None:
            raise HloError(f"module {self.name} has no entry computation")
        return self._entry

    @property
    def has_entry(self) -> bool:
        """True once an entry was set."""
        return self._entry is not None

    def computation(self, name: str) -> HloComputation:
        """The computation of that name.

        Raises:
            HloError: there is none.
        """
        computation = self._computations.get(name)
        if computation is None:
            raise HloError(
                f"module {self.name} has no computation {name!r}; it has {', '.join(self._computations)}"
            )
        return computation

    def instructions(self) -> Iterator[HloInstruction]:
        for computation in self.computations:
            yield from computation.instructions

    def __len__(self) -> int:
        return sum(len(c) for c in self._computations.values())

    def __repr__(self) -> str:
        return f"HloModule({self.name}, {len(self._computations)} computations, {len(self)} instructions)"

    def call_order(self, printed: bool = False) -> list[HloComputation]:
        """Computations that the entry reaches, callees before callers; then the unreached, likewise.

        Args:
            printed: instructions of a computation in the order in which they are printed.

        Raises:
            HloError: computations call each other in a cycle.
        """
        callees_of = _printed_callees if printed and not self.is_scheduled else _callees
        starts = [*([self._entry] if self._entry is not None else []), *self._computations.values()]
        return in_order(starts, callees_of, _cycle)

    def entry_shapes(self) -> tuple[tuple[Shape, ...], Shape]:
        parameters = self.parameter_layouts
        if parameters is None:
            parameters = tuple(p.shape.filled() for p in self.entry.parameters)
        return parameters, self.result_layout or self.entry.root.shape.filled()

    # -- change -------------------------------------------------------------------------------------

    def take_uid(self) -> int:
        self._next_uid += 1
        return self._next_uid - 1

    def reserve_uids(self, below: int) -> None:
        """Use only numbers from this one on."""
        self._next_uid = max(self._next_uid, below)

    def create_computation(self, name: str) -> HloComputation:
        """An empty computation; the name gets a number if it is taken."""
        unique, number = name, 1
        while unique in self._computations:
            unique, number = f"{name}.{number}", number + 1
        computation = HloComputation(unique, self)
        self._computations[unique] = computation
        return computation

    def set_entry(self, computation: HloComputation) -> None:
        """Let the program start there.

        Raises:
            HloError: the computation belongs to another module.
        """
        if computation.module is not self:
            raise HloError(f"computation {computation.name} belongs to another module than {self.name}")
        self._entry = computation

    def remove_computation(self, computation: HloComputation) -> None:
        """Take out a computation without callers.

        Raises:
            HloError: it is called, or is the entry.
        """
        if computation.callers:
            caller = next(iter(computation.callers))
            raise HloError(f"cannot remove computation {computation.name}: {caller.name} calls it")
        if computation is self._entry:
            raise HloError(f"cannot remove computation {computation.name}: it is the entry")
        for instruction in computation.instructions:
            computation.count_calls(instruction, -1)
        del self._computations[computation.name]

    def remove_unreached(self) -> bool:
        """Take out computations that the entry does not reach; True if there were any."""
        reached = set(reachable_from(self.entry))
        dead = [c for c in self.call_order() if c not in reached]
        for computation in reversed(dead):
            self.remove_computation(computation)
        return bool(dead)

    def become(self, other: HloModule) -> None:
        """Move everything of another module here; the other one is unusable afterwards."""
        name = self.name
        vars(self).update(vars(other))
        self.name = name
        for computation in self.computations:
            computation.module = self

    # -- copies -------------------------------------------------------------------------------------

    def clone(self) -> HloModule:
        """A deep copy with the same names and numbers."""
        clone = HloModule(self.name)
        copy_header(self, clone)
        for computation in self._computations.values():
            clone.create_computation(computation.name).execution_thread = computation.execution_thread
        for computation in self.call_order():
            _clone_computation(computation, clone.computation(computation.name))
        clone.reserve_uids(self._next_uid)
        if self._entry is not None:
            clone.set_entry(clone.computation(self._entry.name))
        return clone


def copy_header(source: HloModule, target: HloModule) -> None:
    """Copy everything of a module but its computations."""
    target.is_scheduled = source.is_scheduled
    target.input_output_alias, target.buffer_donor = source.input_output_alias, source.buffer_donor
    target.parameter_layouts, target.result_layout = source.parameter_layouts, source.result_layout
    target.replica_count, target.num_partitions = source.replica_count, source.num_partitions
    target.header, target.tables = dict(source.header), source.tables


def reachable_from(computation: HloComputation) -> list[HloComputation]:
    """A computation and all it calls, directly or not, in order of discovery."""
    reached = {computation: None}
    waiting = [computation]
    while waiting:
        for callee in _callees(waiting.pop()):
            if callee not in reached:
                reached[callee] = None
                waiting.append(callee)
    return list(reached)


def _cycle(member: HloComputation) -> HloError:
    return HloError(f"computations call each other in a cycle through {member.name}")


def _callees(computation: HloComputation) -> list[HloComputation]:
    return [callee for instruction in computation for callee in instruction.called]


def _printed_callees(computation: HloComputation) -> list[HloComputation]:
    return [callee for instruction in computation.post_order() for callee in instruction.called]


def _clone_computation(source: HloComputation, target: HloComputation) -> None:
    copies: dict[HloInstruction, HloInstruction] = {}
    for instruction in source.post_order():
        copy = instruction.clone([copies[o] for o in instruction.operands], name=instruction.given_name)
        copy.called = tuple(target.module.computation(c.name) for c in instruction.called)
        copy.uid = instruction.uid
        copies[instruction] = copy
        for before in instruction.control_predecessors:
            copy.add_control_predecessor(copies[before])
    for instruction in source:
        target.add(copies[instruction])
    if source.has_root:
        target.set_root(copies[source.root])
