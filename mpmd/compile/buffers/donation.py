"""Pairs of donated parameters and results: a result that is computed over the parameter is preferred."""

from __future__ import annotations

from collections.abc import Sequence

from mpmd.compile.analysis.in_place import overwritten_pairs
from mpmd.compile.buffers.sharing import MayShare
from mpmd.compile.hlo.attributes import InputOutputAlias
from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule


def pair_donations(
    module: HloModule, donated: Sequence[int], may_share: MayShare
) -> tuple[InputOutputAlias, ...]:
    """Pairs of donated parameters and results of equal shape, as many as possible.

    Args:
        module: after all passes; parameters and results are arrays.
        donated: numbers of the parameters whose memory may be taken.
        may_share: which operands results may overwrite.
    """
    root = module.entry.root
    several = root.opcode == "tuple"
    results = list(root.operands) if several else [root]
    parameters = module.entry.parameters
    free = {parameters[number]: None for number in donated}
    pairs: dict[int, HloInstruction] = {}
    for number, result in enumerate(results):
        for parameter in _computed_over(result, may_share):
            if parameter in free and parameter.shape.logical is result.shape.logical:
                pairs[number] = parameter
                del free[parameter]
                break
    for number, result in enumerate(results):
        if number not in pairs:
            fits = (p for p in free if p.shape.logical is result.shape.logical)
            taken = next(fits, None)
            if taken is not None:
                pairs[number] = taken
                del free[taken]
    return tuple(
        InputOutputAlias((number,) if several else (), pairs[number].parameter_number)
        for number in sorted(pairs)
    )


def _computed_over(result: HloInstruction, may_share: MayShare) -> list[HloInstruction]:
    """Parameters that the kernel of a result may overwrite with it, or must."""
    made, number = _through(result), 0
    if made.opcode == "get-tuple-element":
        made, number = made.operands[0], made.tuple_index
    index = (number,) if made.shape.is_tuple else ()
    in_place = [operand for operand, _, outer in overwritten_pairs(made) if outer == index]
    found = []
    for operand, value in enumerate(made.operands):
        source = _through(value)
        if source.opcode == "parameter" and value.shape.is_array:
            if operand in in_place or may_share(made, operand, number):
                found.append(source)
    return found


def _through(value: HloInstruction) -> HloInstruction:
    while value.opcode == "bitcast":
        value = value.operands[0]
    return value
