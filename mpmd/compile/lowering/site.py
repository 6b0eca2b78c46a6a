"""The context of a lowering rule: one operation, its operands in HLO, and the builder of the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.lowering.stablehlo_program import Block, Operation
from mpmd.errors import CompileError, HloError

if TYPE_CHECKING:
    from mpmd.compile.lowering.lower import Lowering


@dataclass(slots=True)
class LoweringSite:
    """One operation to be lowered.

    Attributes:
        lowering: the lowering of the whole program.
        build: appends to the computation under construction.
        operation: the operation.
        operands: its operands in HLO.
        values: HLO of the visible values, for regions that read values from outside.
    """

    lowering: Lowering
    build: HloBuilder
    operation: Operation
    operands: list[HloInstruction]
    values: dict[int, HloInstruction]

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def shape(self) -> Shape:
        return self.operation.shapes[0]

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.operation.attributes.get(name, default)

    def required(self, name: str) -> Any:
        """An attribute that must be there.

        Raises:
            CompileError: it is missing.
        """
        if name not in self.operation.attributes:
            raise self.error(f"it has no attribute {name!r}")
        return self.operation.attributes[name]

    def region(self, index: int = 0) -> HloComputation:
        """A region that reads nothing from outside but constants, as a computation."""
        return self.lowering.closed_region(self, self.operation.regions[index])

    def block(self, index: int = 0) -> Block:
        return self.operation.regions[index]

    def parts(self, value: HloInstruction) -> list[HloInstruction]:
        """The results of the operation: the elements of a tuple, or the value itself."""
        if len(self.operation.results) == 1 and not value.shape.is_tuple:
            return [value]
        return [self.build.element(value, i) for i in range(len(self.operation.results))]

    def error(self, why: str) -> CompileError:
        """There is no HLO for the operation; names it and its source."""
        return CompileError(f"cannot lower {self._described()}: {why}")

    def fault(self, why: str) -> HloError:
        """Lowering a valid operation made invalid HLO: a fault of the rule."""
        return HloError(f"lowering {self._described()} went wrong: {why}")

    def _described(self) -> str:
        source = f" (from {self.operation.source})" if self.operation.source else ""
        operands = ", ".join(str(o.shape) for o in self.operands)
        return f"{self.name}({operands}){source}"


Rule = Callable[[LoweringSite], HloInstruction | Sequence[HloInstruction]]
"""Lowers an operation: its result, or one HLO value per result."""


def plain(opcode: str, *, shaped: bool = False, **names: str) -> Rule:
    """The rule of an operation that HLO has, too.

    Args:
        opcode: HLO's name of it.
        shaped: whether its shape does not follow from its operands.
        names: for each attribute that it needs, what StableHLO calls it.
    """

    def rule(site: LoweringSite) -> HloInstruction:
        attributes = {own: site.required(name) for own, name in names.items()}
        return site.build.add(opcode, *site.operands, shape=site.shape if shaped else None, **attributes)

    return rule
