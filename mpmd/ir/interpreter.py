"""StableHLO's interpreter, for ops of constants."""

from __future__ import annotations

import functools

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from mpmd.ir.context import context
from mpmd.ir.reading import parse


@functools.lru_cache(1 << 12)
def computed(
    name: str, options: str, values: tuple[str, ...], types: tuple[str, ...], kind: str
) -> ir.Attribute:
    """What an op makes of constants.

    Args:
        name: of the op.
        options: its attributes, as text with commas between them.
        values: the constants, as `dense<2.0> : tensor<f32>`.
        types: their types.
        kind: the type of its one result.
    """
    lines = [f"%{i} = stablehlo.constant {value}" for i, value in enumerate(values)]
    given = ", ".join(f"%{i}" for i in range(len(values)))
    lines.append(f'%r = "{name}"({given}) {{{options}}} : ({", ".join(types)}) -> {kind}')
    body = "\n".join([*lines, f"return %r : {kind}"])
    module = parse(f"func.func @main() -> {kind} {{\n{body}\n}}")
    with context():
        return stablehlo.eval_module(module, [])[0]


def splat(value: ir.Attribute, kind: ir.Type) -> ir.Attribute:
    """A constant of the type `kind` all of whose elements are the one of the constant `value`."""
    return ir.DenseElementsAttr.get_splat(kind, ir.DenseElementsAttr(value).get_splat_value())
