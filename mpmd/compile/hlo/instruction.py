"""HLO instructions: one operation of a computation, with exact lists of its users.

Operands and users always agree: every change goes through `replace_operand`, `replace_all_uses_with`,
`HloComputation.remove` and the like, which keep both sides up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpmd.compile.hlo import attributes as attrs
from mpmd.compile.hlo.attributes import Attribute, Ints
from mpmd.compile.hlo.opcodes import ELEMENTWISE, OPCODES, Opcode
from mpmd.compile.hlo.shape import Shape, ShapeIndex
from mpmd.errors import HloError

if TYPE_CHECKING:
    from mpmd.compile.hlo.computation import HloComputation

Literal = np.ndarray | tuple["Literal", ...]
"""Value of a constant: an array in logical order, or a tuple of literals."""


class HloInstruction:
    """One operation.

    Creating one adds it to the users of its operands: create it only to add it to their computation.

    Attributes:
        uid: number unique in the module, in order of creation.
        opcode: key of `OPCODES`.
        shape: shape of the value.
        operands: instructions whose values it reads.
        users: instructions that read its value → how many of their operands it is; in order of first use.
        attributes: typed attributes by name, those with default values left out.
        called: computations it calls, in the order of the opcode's roles.
        literal: value of a constant.
        computation: its computation; None once removed.
        control_predecessors: instructions that must run before although their values are not read.
        control_successors: the inverse.
        sharding: text of its sharding, or "".
        metadata: text of its metadata (op name, source position), or "".
        frontend_attributes: text, or "".
        backend_config: text, or "".
    """

    __slots__ = (
        "_name",
        "attributes",
        "backend_config",
        "called",
        "computation",
        "control_predecessors",
        "control_successors",
        "frontend_attributes",
        "literal",
        "metadata",
        "opcode",
        "operands",
        "shape",
        "sharding",
        "uid",
        "users",
    )

    def __init__(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[HloInstruction] = (),
        attributes: dict[str, Attribute] | None = None,
        called: Sequence[HloComputation] = (),
        literal: Literal | None = None,
        name: str = "",
    ) -> None:
        self.uid = -1
        self._name = name
        self.opcode = opcode
        self.shape = shape
        self.operands: list[HloInstruction] = list(operands)
        self.users: dict[HloInstruction, int] = {}
        self.attributes: dict[str, Attribute] = attributes if attributes is not None else {}
        self.called: tuple[HloComputation, ...] = tuple(called)
        self.literal = literal
        self.computation: HloComputation | None = None
        self.control_predecessors: tuple[HloInstruction, ...] = ()
        self.control_successors: tuple[HloInstruction, ...] = ()
        self.sharding = self.metadata = self.frontend_attributes = self.backend_config = ""
        for operand in self.operands:
            users = operand.users
            users[self] = users.get(self, 0) + 1

    # -- identity -----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name that was given, else opcode and uid."""
        return self._name or f"{self.opcode}.{self.uid}"

    @name.setter
    def name(self, name: str) -> None:
        self._name = name

    @property
    def given_name(self) -> str:
        """The name that was given, "" if none was."""
        return self._name

    def __repr__(self) -> str:
        return f"%{self.name} = {self.shape} {self.opcode}({', '.join(o.name for o in self.operands)})"

    @property
    def info(self) -> Opcode:
        return OPCODES[self.opcode]

    @property
    def is_root(self) -> bool:
        """True if it is the result of its computation."""
        return self.computation is not None and self.computation.root is self

    @property
    def is_elementwise(self) -> bool:
        """True if element i of the value depends on elements i of the operands alone."""
        return OPCODES[self.opcode].category in ELEMENTWISE

    @property
    def has_side_effect(self) -> bool:
        """True if it must stay although it has no users; includes its callees."""
        if OPCODES[self.opcode].side_effect or self.attributes.get("custom_call_has_side_effect", False):
            return True
        return any(i.has_side_effect for c in self.called for i in c)

    @property
    def has_control_edges(self) -> bool:
        """True if its order among others matters beyond its operands."""
        return bool(self.control_predecessors or self.control_successors)

    @property
    def parent(self) -> HloComputation:
        """Its computation.

        Raises:
            HloError: it was removed, or never added.
        """
        if self.computation is None:
            raise HloError(f"instruction {self.name} is in no computation: it was removed or never added")
        return self.computation

    # -- typed attributes ---------------------------------------------------------------------------

    def _attribute(self, name: str) -> Any:
        try:
            return self.attributes[name]
        except KeyError:
            raise HloError(f"{self.opcode} {self.name} has no attribute {name!r}") from None

    @property
    def dimensions(self) -> Ints:
        """`dimensions={...}`; () where the opcode leaves it out."""
        return cast(Ints, self.attributes.get("dimensions", ()))

    @property
    def parameter_number(self) -> int:
        return cast(int, self._attribute("parameter_number"))

    @property
    def tuple_index(self) -> int:
        return cast(int, self._attribute("index"))

    @property
    def iota_dimension(self) -> int:
        return cast(int, self.attributes.get("iota_dimension") or 0)

    @property
    def direction(self) -> str:
        """How compare compares: EQ, NE, GE, GT, LE or LT."""
        return cast(str, self._attribute("direction"))

    @property
    def dot_dims(self) -> attrs.DotDims:
        return cast(attrs.DotDims, self._attribute("dot_dims"))

    @property
    def gather_dims(self) -> attrs.GatherDims:
        return cast(attrs.GatherDims, self._attribute("gather_dims"))

    @property
    def scatter_dims(self) -> attrs.ScatterDims:
        return cast(attrs.ScatterDims, self._attribute("scatter_dims"))

    @property
    def slice_sizes(self) -> Ints:
        return cast(Ints, self._attribute("slice_sizes"))

    @property
    def slice_dims(self) -> attrs.SliceDims:
        return cast(attrs.SliceDims, self._attribute("slice"))

    @property
    def padding(self) -> attrs.Padding:
        """Padding of a pad, per dim."""
        return cast(attrs.Padding, self._attribute("padding"))

    @property
    def window(self) -> attrs.Window:
        """Window of a convolution or windowed reduction; empty where left out."""
        return cast(attrs.Window, self.attributes.get("window") or attrs.Window())

    @property
    def conv_dims(self) -> attrs.ConvDims:
        return cast(attrs.ConvDims, self._attribute("conv_dims"))

    @property
    def replica_groups(self) -> attrs.ReplicaGroups:
        return cast(attrs.ReplicaGroups, self.attributes.get("replica_groups") or attrs.ReplicaGroups())

    @property
    def channel_id(self) -> int | None:
        """Channel of a collective, if it crosses partitions."""
        return cast("int | None", self.attributes.get("channel_id"))

    @property
    def custom_call_target(self) -> str:
        return cast(str, self._attribute("custom_call_target"))

    @property
    def to_apply(self) -> HloComputation:
        """The one computation it calls (reduce, call, fusion, sort, scatter ...).

        Raises:
            HloError: it calls none, or several.
        """
        if len(self.called) != 1:
            raise HloError(f"{self.opcode} {self.name} calls {len(self.called)} computations, not one")
        return self.called[0]

    @property
    def while_condition(self) -> HloComputation:
        return self.called[0]

    @property
    def while_body(self) -> HloComputation:
        return self.called[1]

    @property
    def known_trip_count(self) -> int | None:
        """How often a while runs, if its backend config says so."""
        if "known_trip_count" not in self.backend_config:
            return None
        return int(json.loads(self.backend_config)["known_trip_count"]["n"])

    # -- change -------------------------------------------------------------------------------------

    def replace_operand(self, index: int, value: HloInstruction) -> None:
        """Read `value` instead of operand `index`."""
        old = self.operands[index]
        if old is value:
            return
        self.operands[index] = value
        _forget(old, self)
        value.users[self] = value.users.get(self, 0) + 1
        self._moved()

    def replace_operands(self, values: Iterable[HloInstruction]) -> None:
        for old in self.operands:
            _forget(old, self)
        self.operands = list(values)
        for value in self.operands:
            value.users[self] = value.users.get(self, 0) + 1
        self._moved()

    def _moved(self) -> None:
        if self.computation is not None:
            self.computation.forget_order()

    def replace_all_uses_with(self, value: HloInstruction) -> None:
        """Let every user, and the computation if this is its root, take `value` instead.

        Raises:
            HloError: the values have different shapes, layouts aside.
        """
        if value is self:
            return
        if value.shape.logical is not self.shape.logical:
            raise HloError(
                f"cannot replace {self.name} of shape {self.shape} by {value.name} of shape {value.shape}"
            )
        for user in list(self.users):
            if user is not value:
                self.replace_use(user, value)
        if self.computation is not None and self.computation.root is self:
            self.computation.set_root(value)

    def replace_use(self, user: HloInstruction, value: HloInstruction) -> None:
        """Replace this instruction by `value` in the operands of one user.

        Raises:
            HloError: that instruction does not use this one.
        """
        count = self.users.pop(user, 0)
        if not count:
            raise HloError(f"{user.name} does not use {self.name}")
        user.operands = [value if o is self else o for o in user.operands]
        value.users[user] = value.users.get(user, 0) + count
        user._moved()

    def add_control_predecessor(self, before: HloInstruction) -> None:
        """Run after `before`.

        Raises:
            HloError: `before` depends on this instruction: they would form a cycle.
        """
        if before not in self.control_predecessors:
            if self.precedes(before):
                raise HloError(f"{self.name} cannot run after {before.name}, which depends on it")
            self.control_predecessors += (before,)
            before.control_successors += (self,)
            self._moved()

    def precedes(self, other: HloInstruction) -> bool:
        """True if `other` is this instruction or depends on it.  Cost: linear in what depends on this one."""
        if other is self:
            return True
        seen = {self}
        waiting = [self]
        while waiting:
            reached = waiting.pop()
            for after in (*reached.users, *reached.control_successors):
                if after is other:
                    return True
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        return False

    def drop_control_edges(self) -> None:
        """Remove all control edges, in both directions."""
        for before in self.control_predecessors:
            before.control_successors = tuple(i for i in before.control_successors if i is not self)
        for after in self.control_successors:
            after.control_predecessors = tuple(i for i in after.control_predecessors if i is not self)
        self.control_predecessors = self.control_successors = ()
        self._moved()

    def set_called(self, computations: Sequence[HloComputation]) -> None:
        owner = self.computation
        if owner is not None:
            owner.count_calls(self, -1)
        self.called = tuple(computations)
        if owner is not None:
            owner.count_calls(self, 1)

    def copy_annotations(self, source: HloInstruction) -> HloInstruction:
        """Copy metadata, sharding, frontend attributes and backend config; returns itself."""
        self.metadata, self.sharding = source.metadata, source.sharding
        self.frontend_attributes, self.backend_config = source.frontend_attributes, source.backend_config
        return self

    def clone(
        self, operands: Sequence[HloInstruction], shape: Shape | None = None, name: str = ""
    ) -> HloInstruction:
        """The same operation on other operands, not yet in a computation, without control edges."""
        clone = HloInstruction(
            self.opcode, shape or self.shape, operands, dict(self.attributes), self.called, self.literal, name
        )
        return clone.copy_annotations(self)

    def operand_indices(self, value: HloInstruction) -> list[int]:
        """Positions at which `value` is read."""
        return [i for i, o in enumerate(self.operands) if o is value]

    def subshape(self, index: ShapeIndex) -> Shape:
        return self.shape.subshape(index)


def _forget(operand: HloInstruction, user: HloInstruction) -> None:
    count = operand.users[user]
    if count == 1:
        del operand.users[user]
    else:
        operand.users[user] = count - 1
