"""How much work an instruction does: arithmetic, transcendental functions, bytes that are moved and sent."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

from mpmd.compile.hlo.attributes import WindowDim
from mpmd.compile.hlo.collective_groups import collective_groups
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.opcodes import TRANSCENDENTAL, Category

_COSTLY = frozenset((*TRANSCENDENTAL, "atan2", "power"))
_FREE = frozenset(
    [
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "opt-barrier",
        "after-all",
        "add-dependency",
        "domain",
        "partition-id",
        "replica-id",
    ]
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of an instruction, computation or module.

    Attributes:
        flops: arithmetic operations; a multiply-add counts two.
        transcendentals: evaluations of exp, tanh, sqrt and the like, not among the flops.
        bytes_read: bytes of operands that are read.
        bytes_written: bytes of results.
        bytes_sent: bytes that a device sends to others in collectives.
        messages: one after the other, in which it does.
        narrow_flops: those of the flops that are products of numbers of two bytes.
    """

    flops: int = 0
    transcendentals: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_sent: int = 0
    messages: int = 0
    narrow_flops: int = 0

    @property
    def bytes(self) -> int:
        """All bytes moved."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    def times(self, count: int) -> Cost:
        """The work done `count` times."""
        return Cost(*(count * work for work in dataclasses.astuple(self)))


class CostModel:
    """Costs of instructions, cached per computation; loops of unknown trip counts run once."""

    def __init__(self) -> None:
        self._computations: dict[HloComputation, Cost] = {}

    def module(self, module: HloModule) -> Cost:
        return self.computation(module.entry)

    def computation(self, computation: HloComputation) -> Cost:
        """The work of a computation, called once."""
        total = self._computations.get(computation)
        if total is None:
            total = Cost()
            for instruction in computation:
                total = total + self.instruction(instruction)
            self._computations[computation] = total
        return total

    def instruction(self, instruction: HloInstruction) -> Cost:
        opcode = instruction.opcode
        if opcode in _FREE:
            return Cost()
        if opcode == "call":
            return self.computation(instruction.to_apply)
        if opcode == "while":
            trips = instruction.known_trip_count
            once = self.computation(instruction.while_condition) + self.computation(instruction.while_body)
            return once.times(1 if trips is None else trips)
        if opcode == "conditional":
            return max((self.computation(c) for c in instruction.called), key=lambda c: (c.bytes, c.flops))
        flops, transcendentals = self._operations(instruction)
        read, written = bytes_touched(instruction)
        narrow = flops if _is_narrow_product(instruction) else 0
        if opcode == "fusion":
            narrow = self.computation(instruction.to_apply).narrow_flops
        return Cost(flops, transcendentals, read, written, *exchanged(instruction), narrow)

    def _operations(self, instruction: HloInstruction) -> tuple[int, int]:
        opcode, size = instruction.opcode, _size(instruction)
        if (
            instruction.info.category in (Category.UNARY, Category.BINARY, Category.TERNARY)
            and opcode != "map"
        ):
            if opcode in _COSTLY:
                return 0, size
            return (0 if opcode in ("copy", "bitcast-convert") else size), 0
        if opcode == "dot":
            lhs = instruction.operands[0].shape
            depth = math.prod(lhs.dims[d] for d in instruction.dot_dims.lhs_contracting)
            return 2 * size * depth, 0
        if opcode == "convolution":
            return _convolution_flops(instruction), 0
        if opcode == "fusion":
            inner = self.computation(instruction.to_apply)
            return inner.flops, inner.transcendentals
        times = _applications(instruction)
        if times:
            inner = self.computation(instruction.called[-1])
            return inner.flops * times, inner.transcendentals * times
        return 0, 0


def _is_narrow_product(instruction: HloInstruction) -> bool:
    """Whether all factors of a product have two bytes or fewer a number."""
    if instruction.opcode not in ("dot", "convolution"):
        return False
    return all(o.shape.byte_size <= 2 * o.shape.size for o in instruction.operands[:2])


def _size(instruction: HloInstruction) -> int:
    return sum(shape.size for _, shape in instruction.shape.leaves() if shape.is_array)


def _applications(instruction: HloInstruction) -> int:
    opcode = instruction.opcode
    if opcode == "map":
        return instruction.shape.size
    if opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter", "sort"):
        first = instruction.operands[0].shape
        if opcode == "reduce":
            kept = math.prod(s for d, s in enumerate(first.dims) if d not in instruction.dimensions)
            return max(first.size - kept, 0)
        if opcode == "reduce-window":
            positions = instruction.shape.leaves()[0][1].size
            return positions * max(math.prod(instruction.window.sizes) - 1, 0)
        if opcode == "scatter":
            return instruction.operands[-1].shape.size
        if opcode == "select-and-scatter":
            return instruction.operands[1].shape.size * math.prod(instruction.window.sizes)
        length = first.dims[instruction.dimensions[0]]
        return first.size * max(length - 1, 0).bit_length()
    if opcode in ("all-reduce", "reduce-scatter"):
        return sum(o.shape.size for o in instruction.operands)
    return 0


def _convolution_flops(instruction: HloInstruction) -> int:
    """Two per product that falls inside the image."""
    dims = instruction.conv_dims
    image, kernel = instruction.operands[0].shape, instruction.operands[1].shape
    products = 1
    for side, source, result in zip(instruction.window.dims, dims.lhs_spatial, dims.out_spatial):
        products *= _valid_products(side, image.dims[source], instruction.shape.dims[result])
    batch, features = instruction.shape.dims[dims.out_batch], instruction.shape.dims[dims.out_feature]
    return 2 * batch * features * kernel.dims[dims.rhs_input_feature] * products


def _valid_products(side: WindowDim, size: int, positions: int) -> int:
    total = 0
    for element in range(side.size):
        for position in range(positions):
            place = position * side.stride - side.pad_low + element * side.rhs_dilation
            total += 0 <= place <= (size - 1) * side.lhs_dilation and place % side.lhs_dilation == 0
    return total


_ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "collective-broadcast": 1}
"""How often a ring goes around for a collective."""


def exchanged(instruction: HloInstruction) -> tuple[int, int]:
    """(bytes, messages) that a device sends in a collective, as in a ring."""
    opcode = instruction.opcode.removesuffix("-start")
    whole = max(_byte_size(instruction.operands), _byte_size([instruction]))
    if opcode == "collective-permute":
        return _byte_size(instruction.operands), 1
    if opcode not in _ROUNDS:
        return 0, 0
    module = instruction.parent.module
    groups = collective_groups(instruction, module.replica_count, module.num_partitions)
    others = max(map(len, groups), default=1) - 1
    return _ROUNDS[opcode] * whole * others // (others + 1), _ROUNDS[opcode] * others


def _byte_size(values: Iterable[HloInstruction]) -> int:
    return sum(shape.byte_size for v in values for _, shape in v.shape.leaves() if shape.is_array)


def bytes_touched(instruction: HloInstruction) -> tuple[int, int]:
    """(read, written): slices and gathers read as much as they give, updates in place write the update."""
    opcode, result = instruction.opcode, instruction.shape.byte_size
    if opcode in _FREE:
        return 0, 0
    sizes = [o.shape.byte_size for o in instruction.operands]
    if opcode in ("slice", "dynamic-slice", "gather"):
        return result + sum(sizes[1:]), result
    if opcode == "dynamic-update-slice":
        return sizes[1] + sum(sizes[2:]), sizes[1]
    if opcode == "scatter":
        count = len(sizes) // 2
        updates = sum(sizes[count + 1 :])
        return sizes[count] + 2 * updates, updates
    if opcode == "broadcast":
        return sizes[0], result
    distinct = {o: o.shape.byte_size for o in instruction.operands}
    if opcode == "fusion":
        taken = dict.fromkeys(distinct, 0)
        for operand, parameter in zip(instruction.operands, instruction.to_apply.parameters, strict=True):
            taken[operand] += _bytes_taken(parameter)
        return sum(min(size, taken[operand]) for operand, size in distinct.items()), result
    return sum(distinct.values()), result


def _bytes_taken(parameter: HloInstruction) -> int:
    """Bytes of an array that a fusion reads: only the slices if it only slices it."""
    taken = 0
    for user in parameter.users:
        if user.opcode not in ("slice", "dynamic-slice", "gather") or parameter in user.operands[1:]:
            return parameter.shape.byte_size
        taken += user.shape.byte_size
    return taken
