"""Parameters of the entry that are tuples, as one parameter for each array in them."""

from __future__ import annotations

import dataclasses

from mpmd.compile.hlo.attributes import Attribute
from mpmd.compile.hlo.builder import HloBuilder
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.shape import Shape, ShapeIndex


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
