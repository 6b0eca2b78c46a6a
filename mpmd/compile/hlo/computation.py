"""HLO computations: functions made of instructions with one root."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.module import HloModule

Node = TypeVar("Node", bound=Hashable)


class HloComputation:
    """A function: parameters in, the root's value out.

    In a scheduled module the order of `instructions` is the order of execution; elsewhere it is the order of
    creation and `post_order` gives one in which operands precede users.

    Attributes:
        name: unique in the module.
        module: the module it belongs to.
        callers: instructions that call it → how often they name it.
        execution_thread: "" for the main thread of the device.
    """

    __slots__ = (
        "_instructions",
        "_order",
        "_parameters",
        "_root",
        "callers",
        "execution_thread",
        "module",
        "name",
    )

    def __init__(self, name: str, module: HloModule) -> None:
        self.name = name
        self.module = module
        self._instructions: dict[HloInstruction, None] = {}
        self._order: list[HloInstruction] | None = None  # `post_order`, until something changes
        self._parameters: list[HloInstruction] = []
        self._root: HloInstruction | None = None
        self.callers: dict[HloInstruction, int] = {}
        self.execution_thread = ""

    # -- reading ------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[HloInstruction]:
        return iter(self._instructions)

    def __len__(self) -> int:
        return len(self._instructions)

    def __contains__(self, instruction: object) -> bool:
        return instruction in self._instructions

    def __repr__(self) -> str:
        return f"HloComputation({self.name}, {len(self)} instructions)"

    @property
    def instructions(self) -> list[HloInstruction]:
        """A snapshot of the instructions, in order."""
        return list(self._instructions)

    @property
    def root(self) -> HloInstruction:
        """The instruction whose value is the result.

        Raises:
            HloError: none was set yet.
        """
        if self._root is None:
            raise HloError(f"computation {self.name} has no root")
        return self._root

    @property
    def has_root(self) -> bool:
        """True once a root was set."""
        return self._root is not None

    @property
    def is_entry(self) -> bool:
        """True for the computation where the program starts."""
        return self.module.has_entry and self.module.entry is self

    @property
    def parameters(self) -> list[HloInstruction]:
        return sorted(self._parameters, key=lambda i: i.parameter_number)

    def signature(self) -> str:
        """`(f32[2], s32[]) -> pred[]`, layouts left out."""
        parameters = ", ".join(str(p.shape.logical) for p in self.parameters)
        return f"({parameters}) -> {self.root.shape.logical}"

    def post_order(self) -> list[HloInstruction]:
        """All instructions, operands and control predecessors before users.

        Traversals start at instructions without users, in program order, so the order is deterministic.

        Raises:
            HloError: instructions depend on each other in a cycle.
        """
        if self._order is None:
            self._order = self._find_order()
        return self._order.copy()

    def _find_order(self) -> list[HloInstruction]:
        ends = [i for i in self._instructions if not i.users and not i.control_successors]
        out = in_order(ends, _needed_by, self._cycle)
        if len(out) != len(self._instructions):  # instructions of a cycle that no end needs
            reached = set(out)
            raise self._cycle(next(i for i in self._instructions if i not in reached))
        return out

    def _cycle(self, member: HloInstruction) -> HloError:
        return HloError(
            f"computation {self.name}: instructions depend on each other in a cycle through {member.name}"
        )

    # -- change -------------------------------------------------------------------------------------

    def forget_order(self) -> None:
        """Operands or control edges changed; the function that changes them must call this."""
        self._order = None

    def add(self, instruction: HloInstruction) -> HloInstruction:
        """Append an instruction whose operands are in this computation; returns it.

        Raises:
            HloError: it is in a computation already.
        """
        if instruction.computation is not None:
            raise HloError(f"instruction {instruction.name} is already in {instruction.computation.name}")
        instruction.computation = self
        if instruction.uid < 0:
            instruction.uid = self.module.take_uid()
        self._instructions[instruction] = None
        self._order = None
        if instruction.opcode == "parameter":
            self._parameters.append(instruction)
        if instruction.called:
            self.count_calls(instruction, 1)
        return instruction

    def set_root(self, instruction: HloInstruction) -> None:
        """Make the value of an instruction the result.

        Raises:
            HloError: the instruction is not in this computation.
        """
        if instruction.computation is not self:
            raise HloError(f"{instruction.name} cannot be the root of {self.name}: it is not in it")
        self._root = instruction

    def remove(self, instruction: HloInstruction) -> None:
        """Take out an instruction without users; its control predecessors still run before its successors.

        Raises:
            HloError: it has users, or is the root.
        """
        if instruction.users:
            user = next(iter(instruction.users))
            raise HloError(f"cannot remove {instruction.name} from {self.name}: {user.name} uses it")
        if instruction is self._root:
            raise HloError(f"cannot remove {instruction.name} from {self.name}: it is the root")
        instruction.replace_operands(())
        before, after = instruction.control_predecessors, instruction.control_successors
        instruction.drop_control_edges()
        for late in after:
            for early in before:
                late.add_control_predecessor(early)
        if instruction.called:
            self.count_calls(instruction, -1)
        del self._instructions[instruction]
        self._order = None
        if instruction.opcode == "parameter":
            self._parameters.remove(instruction)
        instruction.computation = None

    def replace(self, old: HloInstruction, value: HloInstruction) -> None:
        """Let all users of `old` take `value`, then remove `old`.

        The order of the other instructions is kept: the users still run after the control predecessors of
        `old`, and its control successors after `value`.  `value` itself is not ordered after the
        predecessors: it may be older than they are, as the operand of a copy is.

        Raises:
            HloError: the shapes differ, or `value` depends on what must run after `old`.
        """
        if value.computation is None:
            self.add(value)
        for early in old.control_predecessors:
            for user in old.users:
                if user is not value and early.opcode != "parameter" and early not in user.operands:
                    user.add_control_predecessor(early)
        for late in old.control_successors:
            late.add_control_predecessor(value)
        old.replace_all_uses_with(value)
        self.remove(old)

    def remove_parameter(self, number: int) -> None:
        """Take out an unused parameter and renumber those after it."""
        parameters = self.parameters
        self.remove(parameters[number])
        for parameter in parameters[number + 1 :]:
            parameter.attributes["parameter_number"] = parameter.parameter_number - 1

    def reorder(self, order: Sequence[HloInstruction]) -> None:
        """Put the instructions in this order, e.g. a schedule's.

        Raises:
            HloError: the order leaves out or adds an instruction.
        """
        arranged = dict.fromkeys(order)
        if len(order) != len(self._instructions) or arranged.keys() != self._instructions.keys():
            raise HloError(
                f"an order of computation {self.name} must name its {len(self)} instructions once each; "
                f"got {len(order)}"
            )
        self._instructions = arranged
        self._order = None

    def count_calls(self, instruction: HloInstruction, sign: int) -> None:
        """Record (+1) or remove (-1) that an instruction calls its computations."""
        for callee in instruction.called:
            count = callee.callers.get(instruction, 0) + sign
            if count:
                callee.callers[instruction] = count
            else:
                callee.callers.pop(instruction, None)

    # -- copies -------------------------------------------------------------------------------------

    def clone(self, name: str = "", module: HloModule | None = None) -> HloComputation:
        """A copy in a module (this one by default); called computations are shared."""
        target = module or self.module
        clone = target.create_computation(name or self.name)
        clone.execution_thread = self.execution_thread
        copies = self.copy_into(clone, {})
        clone.set_root(copies[self.root])
        return clone

    def copy_into(
        self, target: HloComputation, known: Mapping[HloInstruction, HloInstruction]
    ) -> dict[HloInstruction, HloInstruction]:
        """Append copies of all instructions but those in `known` to `target`; returns old → copy.

        `known` maps instructions to their replacements: arguments for parameters, when inlining.
        """
        copies = dict(known)
        order = list(self._instructions) if self.module.is_scheduled else self.post_order()
        for instruction in order:
            if instruction in copies:
                continue
            copy = instruction.clone([copies[o] for o in instruction.operands])
            copies[instruction] = target.add(copy)
            for before in instruction.control_predecessors:
                copy.add_control_predecessor(copies[before])
        return copies


def in_order(
    starts: Iterable[Node], needed: Callable[[Node], Iterable[Node]], cycle: Callable[[Node], HloError]
) -> list[Node]:
    """The starts and all that they need, directly or not, each node after what it needs.

    Args:
        starts: where the search begins, one after the other.
        needed: what must precede a node, in order.
        cycle: the error for a node that needs itself.
    """
    # an explicit stack: programs are deeper than Python's recursion; False marks nodes that are on it
    done: dict[Node, bool] = {}
    out: list[Node] = []
    for start in starts:
        if start in done:
            continue
        done[start] = False
        stack = [(start, iter(needed(start)))]
        while stack:
            node, waiting = stack[-1]
            for other in waiting:
                known = done.get(other)
                if known is None:
                    done[other] = False
                    stack.append((other, iter(needed(other))))
                    break
                if not known:
                    raise cycle(other)
            else:
                stack.pop()
                done[node] = True
                out.append(node)
    return out


def _needed_by(instruction: HloInstruction) -> Sequence[HloInstruction]:
    before = instruction.control_predecessors
    return (*before, *instruction.operands) if before else instruction.operands
