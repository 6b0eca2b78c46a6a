"""hlo-layout-removal."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, tuple_of
from mpmd.compile.passes.hlo_pass import HloPass
from mpmd.compile.passes.layout.physical import order_of, physical
from mpmd.compile.passes.values import inverse


class LayoutRemoval(HloPass):
    """Describes all arrays row-major, for a backend whose kernels read and write any order.

    p = f32[4,6]{0,1} parameter(0); negate(p)
        ->  q = f32[6,4]{1,0} parameter(0); negate(transpose(q))

    Parameters and results of the program keep their layout in memory: their dims are those of memory, and a
    transpose separates them from the program.  Inside only bitcasts depend on the order; they become
    transposes around a reshape.  Later passes fuse these into the readers and writers of the arrays.

    Requires: no schedule; layouts of library calls are fixed.
    Ensures: every array but theirs is row-major or has no layout.
    Cost: linear.
    Source: the inverse of XLA's layout assignment.
    """

    def rewrite(self, module: HloModule) -> bool:
        parameters, result = module.entry_shapes()
        shapes = [i.shape for i in module.instructions() if not _is_of_library(i)]
        if not any(_is_strange(shape) for shape in (*parameters, result, *shapes)):
            return False
        for parameter, shape in zip(module.entry.parameters, parameters):
            parameter.shape = shape
        bitcasts = {
            i: (i.operands[0].shape.filled(), i.shape.filled())
            for i in module.instructions()
            if i.opcode == "bitcast"
        }
        for bitcast, (source, target) in bitcasts.items():
            _without_order(bitcast, source, target)
        for instruction in module.instructions():
            if not _is_of_library(instruction):
                instruction.shape = _row_major(instruction.shape)
        build = HloBuilder(module.entry)
        for parameter, shape in zip(module.entry.parameters, parameters):
            _relay_parameter(build, parameter, shape)
        root = _laid(build, module.entry.root, result)
        if root is not module.entry.root:
            module.entry.set_root(root)
        module.parameter_layouts = tuple(p.shape.filled() for p in module.entry.parameters)
        module.result_layout = module.entry.root.shape.filled()
        return True


def _is_of_library(instruction: HloInstruction) -> bool:
    """Whether the layout of a value is fixed by the library call that computes it."""
    while instruction.opcode == "get-tuple-element":
        instruction = instruction.operands[0]
    return instruction.opcode == "custom-call"


def _is_strange(shape: Shape) -> bool:
    return any(s.layout is not None and not s.layout.is_row_major for _, s in shape.leaves() if s.is_array)


def _row_major(shape: Shape) -> Shape:
    """The shape with every array row-major and unpacked; memory spaces stay."""
    if shape.is_tuple:
        return tuple_of([_row_major(e) for e in shape.elements])
    if not shape.is_array or shape.layout is None or shape.layout.is_row_major:
        return shape
    order = tuple(reversed(range(shape.rank)))
    return shape.with_layout(Layout(order, shape.layout.memory_space))


def _without_order(bitcast: HloInstruction, source: Shape, target: Shape) -> None:
    """Rewrite a bitcast from one shape to another as logical movement of elements."""
    (x,), computation = bitcast.operands, bitcast.parent
    if not (_is_strange(source) or _is_strange(target)):
        return
    build = HloBuilder(computation)
    build.metadata = bitcast.metadata
    lying = build.transpose(x, order_of(source))
    if source.dtype == target.dtype:
        lying = build.reshape(lying, physical(target).dims)
    else:  # rows of another type
        lying = build.add("bitcast", lying, shape=physical(target))
    computation.replace(bitcast, build.transpose(lying, inverse(order_of(target))))


def _relay_parameter(build: HloBuilder, parameter: HloInstruction, shape: Shape) -> None:
    """Give a parameter the dims of its memory, and its users the old dims."""
    if not _is_strange(shape):
        return
    users, was_root = list(parameter.users), parameter.is_root
    parameter.shape = physical(shape)
    seen = build.transpose(parameter, inverse(order_of(shape)))
    for user in users:
        for number in user.operand_indices(parameter):
            user.replace_operand(number, seen)
    if was_root:
        build.computation.set_root(seen)


def _laid(build: HloBuilder, value: HloInstruction, wanted: Shape) -> HloInstruction:
    if not _is_strange(wanted):
        return value
    if wanted.is_array:
        return build.transpose(value, order_of(wanted))
    parts = [
        value.operands[k]
        if value.opcode == "tuple"
        else build.add("get-tuple-element", value, shape=value.shape.elements[k], index=k)
        for k in range(len(wanted.elements))
    ]
    return build.tuple([_laid(build, part, shape) for part, shape in zip(parts, wanted.elements)])
