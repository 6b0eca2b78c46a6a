"""mpmd-simplify-stablehlo."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.cleanup.simplify_stablehlo import folding, identities, scalars, stablehlo_slices
from mpmd.passes.cleanup.simplify_stablehlo.facts import Facts

Rewrite = Callable[[ir.Op, Facts], ir.Value | None]
"""Returns the replacement of an op's result, which may be that of a new op; None: does not apply."""

Table = Mapping[str, tuple[Rewrite, ...]]
"""Op name -> what may apply to it."""


def _table() -> dict[str, tuple[Rewrite, ...]]:
    found: dict[str, tuple[Rewrite, ...]] = dict.fromkeys(scalars.NAMES, (scalars.fold,))
    more: dict[str, tuple[Rewrite, ...]] = {
        "add": (identities.add_zero, identities.constant_last),
        "subtract": (identities.subtract_nothing, identities.nothing_left),
        "multiply": (identities.multiply_by_one, identities.nothing_left, identities.constant_last),
        "divide": (identities.divide_by_one,),
        "maximum": (identities.constant_last,),
        "minimum": (identities.constant_last,),
        "and": (identities.with_neutral, identities.nothing_left, identities.constant_last),
        "or": (identities.with_neutral, identities.constant_last),
        "xor": (identities.constant_last,),
        "select": (scalars.fold_select,),
        "convert": (identities.same_type,),
        "reshape": (identities.same_type, identities.reshape_of_reshape, stablehlo_slices.reshape_of_splat),
        "transpose": (identities.transpose,),
        "broadcast_in_dim": (identities.broadcast,),
        "dynamic_slice": (stablehlo_slices.static_slice,),
        "slice": (stablehlo_slices.simpler_slice,),
        "dynamic_update_slice": (stablehlo_slices.update_all, stablehlo_slices.concatenate_updates),
        "concatenate": (stablehlo_slices.flatten_concatenate,),
    }
    for name, rewrites in more.items():
        found["stablehlo." + name] = found.get("stablehlo." + name, ()) + rewrites
    return found


REWRITES = _table()
_FOLDS = {
    **dict.fromkeys(folding.NAMES, (folding.fold,)),
    "stablehlo.add": (folding.fold,),
}
_WITH_CONSTANTS = {
    name: (*_FOLDS.get(name, ()), *REWRITES.get(name, ())) for name in dict.fromkeys((*REWRITES, *_FOLDS))
}


class SimplifyStablehlo(FunctionPass):
    """Folds known indices, slices and shapes.

        i = add 1 1; b = dynamic_update_slice b0 x at 0; b1 = dynamic_update_slice b y at 1
        s = dynamic_slice b1 at (sub i 1)
        -->  s = y

    The leftovers of unrolled loops are removed: arithmetic on scalar integers, slices at constant indices,
    buffers written piece by piece and read piece by piece.  Floating point is only changed where that is
    exact, except for `x + 0`, which is `x` as in XLA: a zero keeps its sign.  Folds that make the text larger
    are left out: an iota stays.  `sdy.sharding` on an op keeps it.  With `fold_constants` ops of constants
    alone are computed too.

    Requires: nothing.  Ensures: same values; pure unused ops are gone.  Cost: linear in ops and rewrites.
    Source: the effect of StableHLO's target-independent optimization on such programs.

    Attributes:
        fold_constants: compute ops of constants alone, of up to 65536 elements where these differ.
    """

    runs_on = "any"
    fold_constants: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Fragments first."""
        if f.is_external:
            return
        table = _WITH_CONSTANTS if self.fold_constants else REWRITES
        for fragment in ir.fragments(f):
            _simplify(fragment, table)
        _simplify(f, table)


def _simplify(where: ir.Func | ir.Fragment, table: Table) -> None:
    """Removes unused ops and rewrites, until nothing applies; leaves out fragments in a function."""
    while _round(_without_dead_ops(where), table):
        pass


def _round(ops: list[ir.Op], table: Table) -> bool:
    """Rewrites until nothing applies, but for what applies once unused ops are gone; whether anything did."""
    facts = Facts()
    todo = collections.deque(op for op in ops if op.operation.name in table)
    changed, waiting = False, set[ir.Op]()
    while todo:
        op = todo.popleft()
        if changed:
            waiting.discard(op)
            if ir.is_unused(op):
                continue
        again = _rewrite(op, facts, table)
        if again and not changed:  # mostly nothing ever applies
            changed, waiting = True, set(todo)
        for other in again:
            if other not in waiting and other.operation.name in table:
                waiting.add(other)
                todo.append(other)
    return changed


def _rewrite(op: ir.Op, facts: Facts, table: Table) -> list[ir.Op]:
    """Applies the first rewrite that fits; the ops to visit again."""
    if "sdy.sharding" in op.attributes:
        return []
    for rewrite in table[op.operation.name]:
        value = rewrite(op, facts)
        if value is None or value.type != op.results[0].type:
            continue
        users = list(dict.fromkeys(ir.users(op)))
        ir.replace_uses(op.results[0], value)
        made = ir.producer(value)
        return users if made is None else [made, *users]
    return []


def _without_dead_ops(where: ir.Func | ir.Fragment | ir.Block) -> list[ir.Op]:
    """Erases pure ops that nothing uses, last first, at any depth; returns the others, outer before inner.

    Terminators and the contents of fragments are left out.
    """
    left: list[ir.Op] = []
    for op in reversed(ir.ops(where)):
        inside: list[ir.Op] = []
        if len(op.operation.regions) and not isinstance(op, ir.Fragment):
            blocks = [block for region in op.operation.regions for block in region]
            inside = [inner for block in blocks for inner in _without_dead_ops(block)]
        if len(op.results) and ir.is_trivially_dead(op):
            ir.erase(op)
        else:
            left += [*reversed(inside), op]
    return left[::-1]
