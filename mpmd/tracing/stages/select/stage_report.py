"""The text of stages: for each its parameters, arithmetic, bytes, and the values that leave it."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mpmd.brief import bytes_text
from mpmd.jax_compat import inner_jaxprs
from mpmd.tracing.stages.items import FlatFunction, Item, outside_of
from mpmd.tracing.stages.select.placement import size
from mpmd.tracing.stages.select.selectors import Selector


def describe_stages(flat: FlatFunction, paths: Mapping[int, str], selector: Selector, name: str) -> str:
    r"""What each stage of a function computes.

        loss in 2 stages by mpmd.by_parameters(r'layers/(\d+)')
        stage0 on m0: 1.0 KFLOP, 528 B of parameters
          f32[4,16] layers/0/w
          sends f32[8,16] (512 B) of tanh (model.py:12:8 (layer)) to stage1

    Args:
        flat: with the stages of all items.
        paths: the path of each value that is a parameter.
        selector: how they were selected.
        name: of the function.
    """
    lines = [f"{name} in {len(selector.over)} stages by {selector}"]
    readers, read = flat.readers(), _values_read(flat, paths)
    closed_over = _values_read(flat, flat.constants.keys() - paths.keys())
    for stage, (stage_name, mesh) in enumerate(zip(selector.names, selector.over)):
        own = [item for item in flat.items if item.stage == stage]
        total = sum(_row_bytes(flat.avals[v], rows) for v, rows in read[stage])
        flops = _amount(sum(map(item_flops, own)), "FLOP")
        others = sum(_row_bytes(flat.avals[v], rows) for v, rows in closed_over[stage])
        more = f", {bytes_text(others)} closed over" if others else ""
        lines.append(f"{stage_name} on {mesh}: {flops}, {bytes_text(total)} of parameters{more}")
        for v, rows in sorted(read[stage], key=lambda row: row[0]):
            also_in = [
                selector.names[s] for s in range(len(selector.over)) if s != stage and (v, rows) in read[s]
            ]
            also = f" (also read in {', '.join(also_in)})" if also_in else ""
            of_rows = "" if rows is None else f"[{rows[0]}:{rows[1]}]"
            lines.append(f"  {_shape(flat.avals[v])} {paths[v]}{of_rows}{also}")
        makers = {v: item for item in own for v in item.outputs}
        for v in outside_of(flat, own, readers)[1]:
            stages = sorted({r.stage for r in readers[v] if r.stage is not None and r.stage != stage})
            to = ", ".join(selector.names[s] for s in stages) or "the results"
            aval = flat.avals[v]
            lines.append(f"  sends {_shape(aval)} ({bytes_text(size(aval))}) of {makers[v].where} to {to}")
    return "\n".join([*lines, *_without_stage(flat)])


def _without_stage(flat: FlatFunction) -> list[str]:
    """A line for the items that have no stage, if there are some."""
    rest = [item for item in flat.items if item.stage is None and not item.stays_out]
    if not rest:
        return []
    counts = collections.Counter(item.equation.primitive.name for item in rest)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return [f"in no stage, placed with their readers: {kinds}"]


Rows = tuple[int, int] | None
"""A range of the rows of a stack; None for all of a parameter."""


def _values_read(flat: FlatFunction, values: Iterable[int]) -> dict[int | None, set[tuple[int, Rows]]]:
    """The values among some that each stage reads, or what items without a stage compute from them."""
    of: dict[int, set[tuple[int, Rows]]] = {v: {(v, None)} for v in values}
    by_stage: dict[int | None, set[tuple[int, Rows]]] = collections.defaultdict(set)
    for item in flat.items:
        given = set().union(*(of.get(v, ()) for v in item.reads))
        by_stage[item.stage] |= given
        if item.stage is None:
            read = {(v, item.rows or rows) for v, rows in given}
            of.update(dict.fromkeys(item.outputs, read))
    return by_stage


def _row_bytes(aval: Any, rows: Rows) -> int:
    return size(aval) if rows is None else size(aval) // aval.shape[0] * (rows[1] - rows[0])


def item_flops(item: Item) -> float:
    """Arithmetic operations of an item: one for each output element of elementwise operations."""
    if item.stays_out:
        return 0.0
    flops = equation_flops(item.equation)
    return flops if item.iterations is None else flops * item.iterations / item.equation.params["length"]


def equation_flops(equation: Any) -> float:
    """Arithmetic operations of an equation; those of a loop as often as it runs, if that is known."""
    name, params = equation.primitive.name, equation.params
    elements = sum(_elements(v.aval) for v in equation.outvars)  # an effect may have no output
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * elements * math.prod(equation.invars[0].aval.shape[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * elements * _elements(kernel) / features
    inner = [sum(map(equation_flops, jaxpr.eqns)) for jaxpr in inner_jaxprs(equation)]
    if inner:
        return max(inner) * params.get("length", 1)
    return float(elements)


def _elements(aval: Any) -> int:
    return math.prod(getattr(aval, "shape", ()))


def _shape(aval: Any) -> str:
    return str(aval.str_short(short_dtypes=True))


def _amount(number: float, unit: str) -> str:
    for prefix in ("", "K", "M", "G", "T"):
        if number < 1000 or prefix == "T":
            return f"{number:.1f} {prefix}{unit}" if prefix else f"{number:.0f} {unit}"
        number /= 1000
    raise AssertionError(number)
