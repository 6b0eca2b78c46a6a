"""mpmd-mirror-stages."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.accumulators import terms_of
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.constants import zeros

SUFFIX = "_mirror"


class MirrorStages(ModulePass):
    """Gives the second half of the microbatches stages of their own, which the assignment may put elsewhere.

        x = call body(acc, ..) cc=0                  x = call body(acc, ..) cc=0
        y = call body(x, ..) cc=1                    y = call body_mirror(zero, ..) cc=1
        return y                                -->  return x + y
        body(acc, ..): g = comp "f" ..               body: as before
                       return acc + g                body_mirror: the same, its "f" is called "f_mirror"

    A sum that is carried through the microbatches begins anew, and both halves are added at the end, so that
    neither half waits for the other.

    Requires: microbatches are calls.  Ensures: same values, but for the order of the sums.  Cost: linear.
    Source: the two copies of DualPipe (DeepSeek-V3 Technical Report, 2024).

    Attributes:
        names: names that get a copy, with commas.
    """

    names: str = ""

    def rewrite(self, module: ir.Module) -> None:
        """Visits every callee and its calls in the entry point."""
        symbols = ir.symbol_table(module)
        for callee, of_callee in calls_by_callee(f for f in symbols.values() if f.is_entry).items():
            calls = [call for call in of_callee if call.call_counter is not None]
            first, second = calls[: (len(calls) + 1) // 2], calls[(len(calls) + 1) // 2 :]
            if second and self._renamed(symbols[callee]):
                sums = _carried_sums(symbols[callee], calls, second)
                self._copy(symbols[callee], second)
                _add_up_halves(sums, first, second)

    def _renamed(self, f: ir.Func) -> list[ir.Op]:
        names = self.names.split(",")
        return [op for op in ir.walk(f, (ir.NamedComputation, ir.NamedTensor)) if _name_of(op) in names]

    def _copy(self, f: ir.Func, calls: Sequence[ir.Call]) -> None:
        copy: ir.Func = ir.clone(f, ir.before(f))
        symbol = ir.StringAttr(f.attributes["sym_name"]).value + SUFFIX
        ir.put(copy, "sym_name", ir.StringAttr.get(symbol))
        for op in self._renamed(copy):
            if isinstance(op, ir.NamedTensor):
                ir.put(op, "name", ir.StringAttr.get(_name_of(op) + SUFFIX))
            else:
                origin = ir.Origin(op.named.name + SUFFIX, op.named.transpose_count)
                ir.put(op, "origin", origin.attribute())
        for call in calls:
            ir.put(call, "callee", ir.FlatSymbolRefAttr.get(symbol))


def _name_of(op: ir.Op) -> str:
    if isinstance(op, ir.NamedTensor):
        return str(ir.StringAttr(op.attributes["name"]).value)
    return str(op.named.name)


def _carried_sums(f: ir.Func, calls: Sequence[ir.Call], second: Sequence[ir.Call]) -> list[tuple[int, int]]:
    """(argument, result) of every sum that each call takes from the call before it, and adds to.

    Nothing else may read it in the second half, where it lacks the first.
    """
    found = []
    position = {arg: i for i, arg in enumerate(f.args)}
    for k, value in enumerate(f.returned):
        own = [leaf for leaf in terms_of(value) if leaf in position and len(ir.users(leaf)) == 1]
        if len(own) == 1 and own[0] is not value:
            i = position[own[0]]
            is_carried = all(b.operands[i] == a.results[k] for a, b in itertools.pairwise(calls))
            if is_carried and all(len(ir.uses(call.results[k])) == 1 for call in second[:-1]):
                found.append((i, k))
    return found


def _add_up_halves(
    sums: Sequence[tuple[int, int]], first: Sequence[ir.Call], second: Sequence[ir.Call]
) -> None:
    """Starts the sums of the second half at zero, and adds those of the first where the whole is used."""
    for argument, result in sums:
        before, whole = first[-1].results[result], second[-1].results[result]
        ir.set_operand(second[0], argument, zeros(before.type, second[0]))
        uses = ir.uses(whole)
        if uses:
            made = ir.create(
                "stablehlo.add", [before, whole], [whole.type], ir.after(second[-1]), location=whole.location
            )
            for user, number in uses:
                ir.set_operand(user, number, made.result)
