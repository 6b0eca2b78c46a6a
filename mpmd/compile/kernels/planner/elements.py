"""The value of an instruction at a position, as nodes of a kernel plan.

A position is one index expression per dim of the instruction.  Movement becomes arithmetic on positions,
elementwise work becomes nodes, and values from outside of the group become loads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.kernels.index import Index, linear, strides_of
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.operations import NUMPY_DTYPE
from mpmd.compile.kernels.plan_builder import PlanBuilder
from mpmd.compile.kernels.precision import without_rounding
from mpmd.errors import CompileError

if TYPE_CHECKING:
    from mpmd.compile.kernels.planner.iteration_space import IterationSpace

IndexMap = tuple[Index, ...]
"""An index expression for each dim of an instruction."""

MOVEMENT = frozenset(("bitcast", "broadcast", "iota", "reshape", "reverse", "slice", "transpose", "copy"))
"""Opcodes that compute nothing: they may be evaluated again wherever their value is read."""


class NoPlan(CompileError):
    """The reason why a group of instructions is not one kernel, as a sentence.

    Args:
        reason: the sentence; with instructions it is a format, in which `{0}` is the name of the first.
        *about: the instructions that it names.
    """

    def __init__(self, reason: str, *about: HloInstruction) -> None:
        super().__init__(reason.format(*(i.name for i in about)) if about else reason)
        self.reason = reason
        self.about = about


class Trace:
    """Values of a group of instructions, as nodes of a plan under construction.

    Args:
        name: symbol of the kernel.
        space: the iteration space.
        inside: the instructions that are computed; all others are loaded.

    Attributes:
        build: the builder of the plan.
        space: the iteration space.
        arrays: number of the operand of each instruction that is loaded, in order of first use.
        places: the positions at which each computed instruction was evaluated.
        sums: dots whose sums the kernel is given: their element type, and which element each point is given.
        sums_operands: number of the operand for the sums of each dot that was read.
    """

    def __init__(self, name: str, space: IterationSpace, inside: Collection[HloInstruction]) -> None:
        self.build = PlanBuilder(name, space.extents, batch_dims=space.batch, row_dims=space.row)
        self.space = space
        self.inside = inside
        self.arrays: dict[HloInstruction, int] = {}
        self.places: dict[HloInstruction, set[tuple[IndexMap, int]]] = {}
        self.sums: dict[HloInstruction, tuple[str, Index]] = {}
        self.sums_operands: dict[HloInstruction, int] = {}
        self._known: dict[tuple[HloInstruction, IndexMap, int], int] = {}
        self._given: dict[HloInstruction, int] = {}

    def substitute(self, given: dict[HloInstruction, int]) -> None:
        """Use nodes for parameters from now on; values computed before are dropped."""
        self._given = given
        self._known.clear()

    @property
    def extents(self) -> tuple[int, ...]:
        return self.space.extents

    def value(self, instruction: HloInstruction, at: IndexMap, where: int = -1) -> int:
        """The node that holds an instruction's value at a position.

        Args:
            instruction: the value.
            at: an index per dim.
            where: number of a node that is true where the position exists, or -1.

        Raises:
            NoPlan: kernels do not support its operation or element type.
        """
        # A value at one position is one node.  Another position of the same value is computed again, which is
        # free for movement and, for all else, what `places` reports and `check_results` refuses.
        key = (instruction, at, where)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._value(instruction, at, where)
        return known

    def _value(self, instruction: HloInstruction, at: IndexMap, where: int) -> int:
        check_dtype(instruction)
        # Given nodes come before everything else: parameters of a combiner have values, not positions.
        if instruction in self._given:
            return self._given[instruction]
        if instruction.opcode == "constant" and instruction.shape.size == 1:
            return self.build.constant(scalar_of(instruction), instruction.shape.dtype)
        if self.is_loaded(instruction):
            operand = self.array(instruction)
            return self.build.load(operand, position_of(instruction, at), where=where)
        rule = RULES.get(instruction.opcode)
        if rule is None:
            raise NoPlan(f"no kernel computes {instruction.opcode}")
        if instruction.opcode not in MOVEMENT:
            self.places.setdefault(instruction, set()).add((at, where))
        return rule(self, instruction, at, where)

    def pair(self, instruction: HloInstruction, at: IndexMap, where: int = -1) -> tuple[int, int]:
        """The nodes that hold the real and the imaginary part of a complex number; see `value`.

        Raises:
            NoPlan: kernels do not support its operation.
        """
        if not self.is_loaded(instruction):
            if instruction.opcode == "complex":
                real, imaginary = instruction.operands
                return self.value(real, at, where), self.value(imaginary, at, where)
            if instruction.opcode in READS:
                place = READS[instruction.opcode](instruction, at, self.extents)
                return self.pair(instruction.operands[0], place, where)
        if instruction.shape.dtype not in PAIRS or not self.is_loaded(instruction):
            raise NoPlan(f"no kernel computes {instruction.opcode} of complex numbers")
        literal = instruction.literal
        if instruction.shape.size == 1 and literal is not None and not isinstance(literal, tuple):
            number, dtype = complex(literal.reshape(-1)[0]), PAIRS[instruction.shape.dtype]
            return self.build.constant(number.real, dtype), self.build.constant(number.imag, dtype)
        # In memory a complex number is two floats beside each other.
        operand, first = self.array(instruction), position_of(instruction, at) * 2
        return self.build.load(operand, first, where=where), self.build.load(operand, first + 1, where=where)

    def is_loaded(self, instruction: HloInstruction) -> bool:
        """Whether an instruction's value is read from memory."""
        return instruction not in self.inside or instruction.opcode in ("constant", "parameter")

    def finish(self) -> KernelPlan:
        """The plan of all stores.

        Raises:
            NoPlan: the parts do not fit together.
        """
        try:
            return without_rounding(self.build.finish())
        except NoPlan:
            raise
        except CompileError as error:
            raise NoPlan(str(error)) from error

    def array(self, instruction: HloInstruction) -> int:
        """The number of the operand that holds an instruction's value."""
        if instruction not in self.arrays:
            self.arrays[instruction] = self.operand(*elements_of(instruction))
        return self.arrays[instruction]

    def operand(self, dtype: str, size: int) -> int:
        """Declare an array; its name is its number, so that equal kernels have equal text."""
        return self.build.operand("", dtype, size)

    def guarded(self, where: int, *conditions: int) -> int:
        """A node that is true where all conditions are; -1 is true everywhere."""
        for condition in conditions:
            if condition >= 0:
                where = condition if where < 0 else self.build.apply("and", where, condition)
        return where

    def dims_of(self, at: IndexMap) -> frozenset[int]:
        """The dims along which a position may change."""
        values = {node for index in at for node in index.values()}
        return frozenset[int]().union(*(i.dims() for i in at), *(self.build.depends(v) for v in values))

    def reduced(self, at: IndexMap, where: int, dims: Collection[int]) -> int:
        """The guard of the elements that are reduced over dims of the space, given where the result exists.

        All of them are needed wherever one result is, so the guard does not depend on these dims.  Conditions
        on them alone are left out.

        Raises:
            NoPlan: the position depends on these dims, or a condition joins them with others.
        """
        if self.dims_of(at) & set(dims):
            raise NoPlan("a reduction inside of another one over the same dims")
        # A reduction takes all elements of its dims, so a guard may not depend on them.  Conditions on other
        # dims stay; those on reduced dims alone hold for some elements and would leave out others.
        kept = -1
        for condition in self.build.conjuncts(where) if where >= 0 else ():
            depends = self.build.depends(condition)
            if not depends & set(dims):
                kept = self.guarded(kept, condition)
            elif depends - set(dims):
                raise NoPlan("a reduction that exists in a part of its own dims")
        return kept

    def within(self, index: Index, low: int | None, high: int | None) -> int:
        """A node that is true where an index is in [low, high); -1 if it always is."""
        # A bound that holds everywhere needs no comparison; of computed positions nothing is known.
        known = self.bounds(index)
        conditions = []
        if low is not None and (known is None or known[0] < low):
            conditions.append(self._compare("ge", index, low))
        if high is not None and (known is None or known[1] >= high):
            conditions.append(self._compare("lt", index, high))
        return self.guarded(-1, *conditions)

    def bounds(self, index: Index) -> tuple[int, int] | None:
        """The smallest and the largest value of an index; None if they are not known."""
        return None if index.values() else index.bounds(self.extents)

    def _compare(self, direction: str, index: Index, bound: int) -> int:
        build = self.build
        return build.apply(f"compare-{direction}", build.index(index), build.constant(bound, "s64"))


Rule = Callable[[Trace, HloInstruction, IndexMap, int], int]

RULES: dict[str, Rule] = {}
"""Computation of each opcode at a position; filled by `rules.py` and `iteration_space.py`."""

READS: dict[str, Callable[[HloInstruction, IndexMap, Sequence[int]], IndexMap]] = {}
"""Position that movement of one operand reads, given the extents of the space; filled by `rules.py`."""


PAIRS = {"c64": "f32", "c128": "f64"}
"""Complex numbers are stored as pairs of these; kernels read and write their parts."""


def elements_of(instruction: HloInstruction) -> tuple[str, int]:
    """The element type and number of elements of an array in memory.

    Raises:
        NoPlan: it is a tuple, or kernels have no such elements.
    """
    shape = instruction.shape
    if shape.dtype in PAIRS:
        return PAIRS[shape.dtype], 2 * shape.size
    return check_dtype(instruction).shape.dtype, shape.size


def check_dtype(instruction: HloInstruction) -> HloInstruction:
    """The instruction, if it is an array that kernels can hold.

    Raises:
        NoPlan: it is a tuple, or its elements are of another type.
    """
    if instruction.shape.dtype not in NUMPY_DTYPE:
        raise NoPlan(f"kernels have no values of shape {instruction.shape}")
    return instruction


def scalar_of(constant: HloInstruction) -> float | int | bool:
    literal = constant.literal
    if literal is None or isinstance(literal, tuple):
        raise NoPlan("constant {0} is not an array", constant)
    value = literal.reshape(-1)[0]
    dtype = constant.shape.dtype
    if dtype == "pred":
        return bool(value)
    return float(value) if constant.shape.info.is_floating else int(value)


def position_of(instruction: HloInstruction, at: Sequence[Index]) -> Index:
    """The offset of an instruction's element at a position in its row-major array."""
    return linear(at, strides_of(instruction.shape.dims))
