"""StableHLO to HLO: one rule per operation, one computation per function and region.

`flatten_parameters` then gives the entry one parameter for each array, where parameters were tuples.

Source: the mapping follows the StableHLO specification, whose operations HLO has nearly one for one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpmd.compile.hlo.attributes import Attribute, BufferDonor, InputOutputAlias
from mpmd.compile.hlo.builder import HloBuilder, scalar_computation
from mpmd.compile.hlo.computation import HloComputation
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, ShapeIndex
from mpmd.compile.hlo.text import quote
from mpmd.compile.lowering import collectives, custom_calls, operations, products
from mpmd.compile.lowering.reader import named_axes, parse_program, read_program
from mpmd.compile.lowering.site import LoweringSite, Rule
from mpmd.compile.lowering.spmd.localise import localise
from mpmd.compile.lowering.spmd.shardy import Spec, with_collectives
from mpmd.compile.lowering.spmd.spmd_rules import JOINS, spread_rule
from mpmd.compile.lowering.stablehlo_program import Block, Operation, StablehloProgram, ValueId
from mpmd.errors import CompileError, HloError

RULES: dict[str, Rule] = {
    **collectives.RULES,
    **operations.CONTROL,
    **custom_calls.RULES,
    **operations.ELEMENTWISE,
    **operations.MOVEMENT,
    **products.RULES,
}
"""The lowering rule of each operation."""


def lower(source: Any) -> HloModule:
    """A StableHLO module, or its text, as HLO.

    The function `main` becomes the entry; its arguments' attributes give aliasing and donation.

    Raises:
        CompileError: an operation or type has no HLO; names the operation and its source.
        IRError: the text is not an MLIR module.
    """
    text = source if isinstance(source, str) else source.operation.get_asm(enable_debug_info=True)
    return lower_program(read_program(parse_program(text)))


def lower_for_mesh(
    text: str, axes: Mapping[str, int], arguments: Sequence[Spec], results: Sequence[Spec]
) -> HloModule:
    """A StableHLO module as the HLO of each device of a mesh.

    Args:
        text: MLIR of the module.
        axes: the mesh's axes and their sizes, the outermost first.
        arguments: for each argument of `main` the axes that shard its dims.
        results: the same for its results.

    Raises:
        CompileError: an operation or type has no HLO, or Shardy cannot partition the module.
        IRError: the text is not an MLIR module.
    """
    program = read_program(with_collectives(text, axes, arguments, results))
    shardings = [tuple(named_axes(names, axes) for names in spec) for spec in results]
    return lower_program(localise(program, math.prod(axes.values()), shardings))


def lower_program(program: StablehloProgram) -> HloModule:
    module = HloModule(_identifier(program.name))
    module.replica_count, module.num_partitions = program.replicas, program.partitions
    entry = Lowering(program, module).function("main")
    layout = entry.root.shape.layout
    if layout is not None and not layout.is_row_major:  # a library's; callers expect row-major
        entry.set_root(HloBuilder(entry).add("copy", entry.root))
    module.set_entry(entry)
    main = program.functions["main"]
    module.input_output_alias = _aliases(main.argument_attributes, len(main.body.returned))
    module.buffer_donor = tuple(
        BufferDonor(i) for i, notes in enumerate(main.argument_attributes) if notes.get("jax.buffer_donor")
    )
    return module


def _aliases(notes: Sequence[dict[str, Any]], results: int) -> tuple[InputOutputAlias, ...]:
    pairs = [(int(n["tf.aliasing_output"]), i) for i, n in enumerate(notes) if "tf.aliasing_output" in n]
    return tuple(InputOutputAlias((output,) if results > 1 else (), i) for output, i in sorted(pairs))


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_.-" else "_" for c in name) or "main"


class Lowering:
    """Lowering of one program.

    Attributes:
        program: the source.
        module: the module under construction.
        partial: values with a partial result on every device, and the reduction that joins them.
        joined: values whose partial results a collective joins, in blocks whose lowering has begun.
    """

    def __init__(self, program: StablehloProgram, module: HloModule) -> None:
        self.program = program
        self.module = module
        self._functions: dict[str, HloComputation] = {}
        self._closed: dict[Any, HloComputation] = {}
        self._reducers: dict[tuple[str, str], HloComputation] = {}
        self._constants: dict[ValueId, HloInstruction] = {}  # in loops they are elements of the state
        self.partial: dict[ValueId, str] = {}
        self.joined: set[ValueId] = set()

    def function(self, name: str) -> HloComputation:
        """A function as a computation; lowered once.

        Raises:
            CompileError: the program has no such function.
        """
        function = self._functions.get(name)
        if function is None:
            if name not in self.program.functions:
                raise CompileError(f"the program calls @{name}, which it does not define")
            body = self.program.functions[name].body
            builder = HloBuilder.create(self.module, _identifier(name))
            arguments = [builder.parameter(shape) for shape in body.shapes]
            self._fill(builder, body, dict(zip(body.arguments, arguments)))
            function = self._functions[name] = builder.computation
        return function

    def reducer(self, opcode: str, dtype: str) -> HloComputation:
        """`(a, b) -> opcode(a, b)` on scalars; made once."""
        reducer = self._reducers.get((opcode, dtype))
        if reducer is None:
            reducer = self._reducers[opcode, dtype] = scalar_computation(self.module, opcode, dtype)
        return reducer

    def closed_region(self, site: LoweringSite, block: Block) -> HloComputation:
        """A region that reads nothing from outside but constants; equal regions share a computation."""
        key = _structure(block)
        region = self._closed.get(key) if key is not None else None
        if region is not None:
            return region
        name = block.operations[-1].name.partition(".")[2] if block.operations else "region"
        builder = HloBuilder.create(self.module, _identifier(f"{name}_{block.shapes[0].dtype}"))
        values = dict(zip(block.arguments, [builder.parameter(shape) for shape in block.shapes]))
        for outside in block.captured():
            values[outside] = self._copied_constant(site, builder, outside)
        self._fill(builder, block, values)
        if key is not None:
            self._closed[key] = builder.computation
        return builder.computation

    def _copied_constant(self, site: LoweringSite, builder: HloBuilder, outside: ValueId) -> HloInstruction:
        value = self._constants.get(outside)
        if value is None:
            name = site.values[outside].name
            raise site.error(f"its region reads {name} from outside, which is not a constant")
        return builder.constant(value.literal)

    def state_region(
        self, block: Block, outside: Sequence[ValueId], state: Shape, name: str, tuple_result: bool
    ) -> HloComputation:
        """A region as a computation of one tuple: its arguments, then the values it reads from outside.

        The result is a tuple of what it returns; a loop's body returns the outside values as well.
        """
        builder = HloBuilder.create(self.module, name)
        given = builder.parameter(state)
        names = (*block.arguments, *outside)
        values = {v: builder.element(given, i) for i, v in enumerate(names)}
        self._operations(builder, block, values)
        results = [values[v] for v in block.returned]
        if name == "body":
            results += [values[v] for v in outside]
        builder.build(builder.tuple(results) if tuple_result else results[0])
        return builder.computation

    def _fill(self, builder: HloBuilder, block: Block, values: dict[ValueId, HloInstruction]) -> None:
        self._operations(builder, block, values)
        results = [values[v] for v in block.returned]
        builder.build(results[0] if len(results) == 1 else builder.tuple(results))

    def _operations(self, builder: HloBuilder, block: Block, values: dict[ValueId, HloInstruction]) -> None:
        self.joined |= {o.operands[0] for o in block.operations if o.name in JOINS}
        for operation in block.operations:
            rule = RULES.get(operation.name)
            if operation.spread is not None:
                rule = spread_rule(operation, rule)
            site = LoweringSite(self, builder, operation, [values[v] for v in operation.operands], values)
            if rule is None:
                raise site.error("there is no rule for this operation")
            builder.metadata = f"{{op_name={quote(operation.source)}}}" if operation.source else ""
            try:
                lowered = rule(site)
            except HloError as error:
                raise site.fault(str(error)) from error
            results = [lowered] if isinstance(lowered, HloInstruction) else lowered
            self._mark(operation, results)
            for number, value, shape in zip(operation.results, results, operation.shapes):
                if value.shape.logical is not shape.logical:
                    raise site.fault(f"it became {value.shape}, expected {shape}")
                values[number] = value
                if value.opcode == "constant":
                    self._constants[number] = value

    def _mark(self, operation: Operation, results: Sequence[HloInstruction]) -> None:
        """Copies the frontend attributes that JAX or the user gave an operation."""
        given = operation.attributes.get("mhlo.frontend_attributes")
        if given:
            text = ",".join(f"{key}={quote(str(value))}" for key, value in given.items())
            for value in results:
                source = value.operands[0] if value.opcode == "get-tuple-element" else value
                if source.opcode != "parameter":
                    source.frontend_attributes = "{" + text + "}"


def _structure(block: Block) -> Any:
    """A key that equal small regions share; None for regions too large or with regions of their own."""
    if len(block.operations) > 8 or any(o.regions for o in block.operations) or block.captured():
        return None
    number = {v: i for i, v in enumerate(block.arguments)}
    lines = []
    for operation in block.operations:
        for value in operation.results:
            number[value] = len(number)
        lines.append(_line(operation, number))
    return block.shapes, tuple(lines), tuple(number[v] for v in block.returned)


def _line(operation: Operation, number: dict[ValueId, int]) -> Any:
    operands = tuple(number[v] for v in operation.operands)
    attributes = tuple((k, repr(v)) for k, v in sorted(operation.attributes.items()))
    return operation.name, operands, operation.shapes, attributes


def flatten_parameters(module: HloModule) -> None:
    """Let the entry take arrays, in the order of its parameters' leaves; tuples are made of them inside.

    Layouts, aliases and donors that the header names follow.  Tokens stay parameters.
    """
    entry = module.entry
    old = entry.parameters
    if not any(p.shape.is_tuple for p in old):
        return
    layouts = [shape for p in module.entry_shapes()[0] for _, shape in p.leaves()]
    places = [(p.parameter_number, index) for p in old for index, _ in p.shape.leaves()]
    number = {place: k for k, place in enumerate(places)}
    for field in ("input_output_alias", "buffer_donor"):
        moved = [
            dataclasses.replace(
                said, parameter=number[said.parameter, said.parameter_index], parameter_index=()
            )
            for said in getattr(module, field)
            if (said.parameter, said.parameter_index) in number
        ]
        setattr(module, field, tuple(moved))
    build = HloBuilder(entry)
    for parameter in old:
        begin = parameter.parameter_number
        if parameter.shape.is_tuple:
            entry.replace(parameter, _made(build, parameter.shape, number, begin, ()))
        else:
            parameter.attributes["parameter_number"] = number[begin, ()]
    module.parameter_layouts = tuple(layouts)


def _made(
    build: HloBuilder, shape: Shape, number: dict[tuple[int, ShapeIndex], int], begin: int, index: ShapeIndex
) -> HloInstruction:
    """A value of parameter `begin`, made of the parameters of its leaves."""
    if shape.is_tuple:
        parts = enumerate(shape.elements)
        return build.tuple([_made(build, part, number, begin, (*index, k)) for k, part in parts])
    numbered: dict[str, Attribute] = {"parameter_number": number[begin, index]}
    return build.computation.add(HloInstruction("parameter", shape, (), numbered))
