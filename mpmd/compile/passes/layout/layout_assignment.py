"""A layout for every array, by what its users require, so that as few as possible need a copy in another one.

The program's caller, libraries and collectives fix theirs; the rest follows from these.
"""

from __future__ import annotations

from collections import deque

from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.layout import Layout
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, ShapeIndex
from mpmd.compile.passes.hlo_pass import HloPass, unfused
from mpmd.compile.passes.layout.physical import is_bitcast, kept_layout, transposed_layout
from mpmd.compile.passes.rewriter import inverse

_AS_RESULT = frozenset(
    ["concatenate", "pad", "slice", "reverse", "dynamic-slice", "dynamic-update-slice", "map"]
)
_ANY = frozenset(["transpose", "reshape", "broadcast", "reduce", "copy", "dot"])
_PLAIN = frozenset(["bitcast", "bitcast-convert"])  # dims may split or join
_LEAF = frozenset(["iota", "constant"])


class Requirements:
    """The layouts that a computation's operations need.

    Args:
        computation: the computation.
        interface: shapes with layouts of the program's parameters and result.
        free_transposes: transposes may have the layout in which they move nothing.
        free_products: results of dots may have any layout.
    """

    def __init__(
        self,
        computation: HloComputation,
        interface: tuple[tuple[Shape, ...], Shape],
        free_transposes: bool,
        free_products: bool,
    ) -> None:
        self.computation = computation
        self.interface = interface
        self.free_transposes = free_transposes
        self.free_products = free_products

    def of_result(self, instruction: HloInstruction) -> Layout | None:
        """The layout that an array-valued instruction must have; None if it may be chosen."""
        opcode = instruction.opcode
        if opcode == "parameter":
            return self.of_parameter(instruction).layout
        if opcode == "get-tuple-element":
            return self._of_element(instruction)
        if opcode in ("opt-barrier", "domain", "add-dependency"):
            return None
        if opcode in _PLAIN:
            return _row_major(instruction)
        if opcode == "copy":
            return instruction.shape.filled().layout
        if opcode == "dot":
            return None if self.free_products else _row_major(instruction)
        if opcode == "transpose":
            return None if self.free_transposes else _row_major(instruction)
        if instruction.is_elementwise or opcode in _AS_RESULT or opcode in _ANY or opcode in _LEAF:
            return None
        return _row_major(instruction)

    def of_parameter(self, instruction: HloInstruction) -> Shape:
        """A parameter's shape: the caller's for the entry, row-major elsewhere."""
        if self.computation.is_entry:
            return self.interface[0][instruction.parameter_number]
        return instruction.shape.with_default_layout()

    def of_root(self, index: ShapeIndex) -> Shape:
        if self.computation.is_entry:
            return self.interface[1].subshape(index)
        return self.computation.root.shape.with_default_layout().subshape(index)

    def of_operand(self, instruction: HloInstruction, number: int) -> Layout | None:
        """The layout that an operand must have here, once results have theirs; None if any will do."""
        operand = instruction.operands[number]
        if not operand.shape.is_array:
            return None
        opcode = instruction.opcode
        if opcode == "tuple":
            return self._of_tuple_operand(instruction, number)
        if operand.shape.is_scalar or opcode in _ANY:
            return None
        if opcode in _PLAIN:
            return _row_major(operand)
        if opcode in ("opt-barrier", "domain", "add-dependency"):
            return instruction.shape.layout
        if instruction.is_elementwise or opcode in _AS_RESULT:
            return instruction.shape.layout
        return _row_major(operand)

    def _of_tuple_operand(self, instruction: HloInstruction, number: int) -> Layout | None:
        """As the result of the program, or row-major: tuples go to loops, calls and library calls."""
        if instruction.is_root:
            return self.of_root((number,)).layout
        operand = instruction.operands[number]
        return _row_major(operand)

    def _of_element(self, instruction: HloInstruction) -> Layout | None:
        index: ShapeIndex = (instruction.tuple_index,)
        source = instruction.operands[0]
        while source.opcode == "get-tuple-element":
            index = (source.tuple_index, *index)
            source = source.operands[0]
        if source.opcode == "parameter":
            return self.of_parameter(source).subshape(index).layout
        if source.opcode == "tuple" and source.is_root:
            return self.of_root(index).layout
        return _row_major(instruction)


def _row_major(instruction: HloInstruction) -> Layout:
    return Layout.row_major(instruction.shape.rank)


class Propagation:
    """Layouts of the arrays of one computation.

    Args:
        computation: the computation.
        requirements: the fixed layouts.
    """

    def __init__(self, computation: HloComputation, requirements: Requirements) -> None:
        self._computation = computation
        self._requirements = requirements
        self._chosen: dict[HloInstruction, Layout] = {}
        self._down: deque[HloInstruction] = deque()
        self._up: deque[HloInstruction] = deque()

    def run(self) -> dict[HloInstruction, Layout]:
        arrays = [i for i in self._computation.post_order() if i.shape.is_array]
        for instruction in arrays:
            fixed = self._requirements.of_result(instruction)
            if fixed is not None:
                self._choose(instruction, fixed)
        # Fixed layouts spread first: then nothing that could have been free of copies is settled by default.
        # The result is next, as a hint and not a constraint: a copy at the root is possible, once.
        self._settle()
        root = self._computation.root
        if root.shape.is_array and root not in self._chosen:
            wanted = self._requirements.of_root(()).layout
            if wanted is not None:
                self._choose(root, wanted)
        self._settle()
        for instruction in arrays:
            # One at a time, each followed by its consequences: a default may decide its neighbours.
            if instruction not in self._chosen:
                self._choose(instruction, Layout.row_major(instruction.shape.rank))
                self._settle()
        return self._chosen

    def _choose(self, instruction: HloInstruction, layout: Layout) -> None:
        self._chosen[instruction] = layout
        # Row-major is the default: it need not propagate, except through transposes.
        if not layout.is_row_major or any(u.opcode == "transpose" for u in instruction.users):
            self._down.append(instruction)
        if not layout.is_row_major or instruction.opcode == "transpose":
            self._up.append(instruction)

    def _settle(self) -> None:
        """Propagate layouts, to users as long as possible, then to operands."""
        while self._down or self._up:
            if self._down:
                value = self._down.popleft()
                # A row-major value offers its layout through transposes only; other users are row-major by
                # default, unless another neighbour offers them a layout first.
                every = not self._chosen[value].is_row_major
                for user in value.users:
                    if user in self._chosen or not user.shape.is_array:
                        continue
                    if every or user.opcode == "transpose":
                        self._offer(user, downwards(self._chosen[value], value, user))
            else:
                user = self._up.popleft()
                for number, value in enumerate(user.operands):
                    if value not in self._chosen and value.shape.is_array and not value.shape.is_scalar:
                        self._offer(value, upwards(self._chosen[user], user, number))

    def _offer(self, instruction: HloInstruction, layout: Layout | None) -> None:
        if layout is not None:
            self._choose(instruction, layout)


def downwards(layout: Layout, value: HloInstruction, user: HloInstruction) -> Layout | None:
    """The layout that suits a user of a value with this layout."""
    opcode = user.opcode
    if opcode == "transpose":
        return transposed_layout(layout, user.dimensions)
    if opcode == "reduce":
        return kept_layout(layout, user.dimensions) if user.operands[0] is value else None
    if opcode == "reshape":
        return _reshaped(layout, value, user)
    if opcode == "broadcast":
        # The operand's dims stay innermost, so that rows of the operand are read in order.
        added = [d for d in range(user.shape.rank) if d not in user.dimensions]
        return Layout((*(user.dimensions[d] for d in layout.minor_to_major), *reversed(added)))
    same = value.shape.dims and len(layout.minor_to_major) == user.shape.rank
    if opcode in ("dot", "bitcast", "copy") or not same:
        return None
    return layout


def upwards(layout: Layout, user: HloInstruction, number: int) -> Layout | None:
    """The layout of an operand that suits a user with this layout."""
    opcode, value = user.opcode, user.operands[number]
    if opcode == "transpose":
        return transposed_layout(layout, inverse(user.dimensions))
    if opcode == "broadcast":
        place = {d: i for i, d in enumerate(user.dimensions)}
        return Layout(tuple(place[d] for d in layout.minor_to_major if d in place))
    if opcode == "reshape":
        return _reshaped(layout, user, value)
    if opcode in ("dot", "bitcast", "copy", "reduce") or value.shape.rank != user.shape.rank:
        return None
    return layout


def _reshaped(layout: Layout, value: HloInstruction, other: HloInstruction) -> Layout | None:
    """A layout of `other` with which the reshape between the two moves nothing."""
    target = other.shape.with_layout(Layout.row_major(other.shape.rank))
    if is_bitcast(value.shape.with_layout(layout), target):
        return target.layout
    # Dims that keep their size keep their position; dims of size 1 are innermost.
    theirs = [d for d, n in enumerate(other.shape.dims) if n != 1]
    mine = [d for d, n in enumerate(value.shape.dims) if n != 1]
    if [value.shape.dims[d] for d in mine] != [other.shape.dims[d] for d in theirs]:
        return None
    place = dict(zip(mine, theirs))
    ones = [d for d in reversed(range(other.shape.rank)) if d not in theirs]
    return Layout((*ones, *(place[d] for d in layout.minor_to_major if d in place)))


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
    Source: XLA's layout assignment, with the constraints of `layout_assignment.py`.

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
    # All layouts are written before any copy: what an operand must have follows from its user's layout.
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
            # Layouts are pooled: equal ones are one object.
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
        copy = HloInstruction("copy", value.shape.with_layout(layout), [value])
        copy.metadata = value.metadata
        assert value.computation is not None
        copies[key] = value.computation.add(copy)
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
