"""Ops of scalar integer and boolean constants: indices, trip counts, conditions."""

from __future__ import annotations

import numpy as np

from mpmd import ir
from mpmd.passes.cleanup.simplify_stablehlo.facts import Facts, integer_kind
from mpmd.passes.constant_evaluation import DTYPES, evaluate
from mpmd.passes.constants import splat

_NAMES = "add and clamp compare convert maximum minimum multiply negate not or subtract xor"
NAMES = tuple("stablehlo." + name for name in _NAMES.split())


def fold(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`add 2 3` -> `5`, which wraps around as the type does; `compare LT 2 3` -> `true`."""
    kind = op.results[0].type
    if not isinstance(kind, ir.RankedTensorType) or kind.rank or integer_kind(kind) is None:
        return None
    operands = facts.integers(op.operands)
    *dtypes, target = (DTYPES.get(str(value.type.element_type)) for value in (*op.operands, op.results[0]))
    if operands is None or None in dtypes or target is None:  # NumPy has no narrow integers
        return None
    found = evaluate(op, [np.array(n, dtype) for n, dtype in zip(operands, dtypes)])
    return None if found is None else splat(str(found.item()).lower(), kind, op)


def fold_select(op: ir.Op, facts: Facts) -> ir.Value | None:
    """`select true a b` -> `a`; `select p a a` -> `a`."""
    condition, on_true, on_false = op.operands
    if on_true == on_false:
        return on_true
    chosen = facts.splat(condition)
    return {"true": on_true, "false": on_false}.get(chosen or "")
