"""hlo-layout-assignment."""

from __future__ import annotations

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape
from mpmd.compile.passes.hlo_pass import HloPass, unfused
from mpmd.compile.passes.layout.propagation import Propagation
from mpmd.compile.passes.layout.requirements import Requirements


class LayoutAssignment(HloPass):
    """Chooses the layout of each array.

    y = add(x: {0,1}, z: {1,0})  ->  y: {0,1} = add(x, copy(z): {0,1})

    Hard constraints come first: parameters and results of the program as the caller has them, states of
    loops, operands and results of library calls, collectives, sorts and indexed accesses row-major.  From
    them layouts propagate to users, then to operands; the first one stays.  Unconstrained arrays are
    row-major.  A use that needs another layout than its operand has gets a copy, one per operand and layout.

    Requires: no schedule, no fusions.
    Ensures: every array has a layout; operands of elementwise work and of slices, pads and concatenations
        have
        that of their result; the entry layouts are unchanged.
    Cost: linear.
    Source: XLA's layout assignment, with the constraints of `requirements.py`.

    Attributes:
        free_transposes: a transpose gets the layout in which it moves nothing; else its operand is copied to
            row-major order, which elementwise work then reads in order.
        free_products: a product's result gets the layout that a transpose after it prefers.
    """

    free_transposes: bool = False
    free_products: bool = False

    def rewrite(self, module: HloModule) -> bool:
        """Assigns the layouts of all computations, callees first."""
        interface = module.entry_shapes()
        before = {i: i.shape for i in module.instructions()}
        changed = False
        for computation in unfused(module):
            requirements = Requirements(computation, interface, self.free_transposes, self.free_products)
            layouts = Propagation(computation, requirements).run()
            changed |= _apply(computation, layouts, requirements)
        if module.parameter_layouts is None or module.result_layout is None:
            module.parameter_layouts, module.result_layout = interface
        return changed or any(i.shape is not shape for i, shape in before.items())


def _apply(
    computation: HloComputation, layouts: dict[HloInstruction, Layout], requirements: Requirements
) -> bool:
    """Write the layouts into shapes, and insert copies where a use needs another one."""
    order = computation.post_order()
    for instruction in order:
        if instruction in layouts:
            instruction.shape = instruction.shape.with_layout(layouts[instruction])
        else:
            instruction.shape = _tuple_shape(instruction, requirements)
    changed = False
    copies: dict[tuple[HloInstruction, Layout], HloInstruction] = {}
    for instruction in order:
        for number, operand in enumerate(list(instruction.operands)):
            wanted = requirements.of_operand(instruction, number)
            if wanted is not None and wanted is not operand.shape.layout:
                instruction.replace_operand(number, _copied(operand, wanted, copies))
                changed = True
    root = computation.root
    if root.shape.is_array:
        wanted = requirements.of_root(()).layout
        if wanted is not None and wanted is not root.shape.layout:
            computation.set_root(_copied(root, wanted, copies))
            changed = True
    changed |= _retype_tuples(computation)
    return _rebuild_result(computation, requirements, copies) or changed


def _tuple_shape(instruction: HloInstruction, requirements: Requirements) -> Shape:
    """The shape of a value that is not an array: row-major inside, or as the caller passes it."""
    if instruction.opcode == "parameter":
        return requirements.of_parameter(instruction)
    return instruction.shape.with_default_layout()


def _copied(
    value: HloInstruction, layout: Layout, copies: dict[tuple[HloInstruction, Layout], HloInstruction]
) -> HloInstruction:
    key = value, layout
    if key not in copies:
        made = HloInstruction("copy", value.shape.with_layout(layout), [value])
        made.metadata = value.metadata
        assert value.computation is not None
        copies[key] = value.computation.add(made)
    return copies[key]


def _rebuild_result(
    computation: HloComputation,
    requirements: Requirements,
    copies: dict[tuple[HloInstruction, Layout], HloInstruction],
) -> bool:
    """Take apart a result that is not a tuple instruction, and rebuild it in the caller's layouts."""
    root, wanted = computation.root, requirements.of_root(())
    if root.shape is wanted or not root.shape.is_tuple:
        return False
    computation.set_root(_relaid(HloBuilder(computation), root, wanted, copies))
    return True


def _relaid(
    build: HloBuilder,
    value: HloInstruction,
    wanted: Shape,
    copies: dict[tuple[HloInstruction, Layout], HloInstruction],
) -> HloInstruction:
    if wanted.is_tuple:
        parts = [
            build.add("get-tuple-element", value, shape=value.shape.elements[i], index=i)
            for i in range(len(wanted.elements))
        ]
        return build.tuple([_relaid(build, p, s, copies) for p, s in zip(parts, wanted.elements)])
    same = wanted.layout is None or value.shape is wanted
    return value if same or wanted.layout is None else _copied(value, wanted.layout, copies)


def _retype_tuples(computation: HloComputation) -> bool:
    """Tuples have the shapes of their operands."""
    changed = False
    for instruction in computation.post_order():
        if instruction.opcode == "tuple":
            shape = Shape("tuple", elements=tuple(o.shape for o in instruction.operands))
        elif instruction.opcode in ("opt-barrier", "domain") and instruction.shape.is_tuple:
            shape = instruction.operands[0].shape
        else:
            continue
        if instruction.shape is not shape:
            instruction.shape = shape
            changed = True
    return changed
