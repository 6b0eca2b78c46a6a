"""mpmd-carry-sums-through-calls."""

from __future__ import annotations

import dataclasses

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee, fill_attributes
from mpmd.passes.constants import zeros
from mpmd.passes.fragments.moving import in_block_order


@dataclasses.dataclass(frozen=True)
class _Sum:
    """Result `result` of some calls, added up by `adds` in the order of the calls, from `start` on."""

    result: int
    calls: tuple[ir.Call, ...]
    adds: tuple[ir.Op, ...]
    start: ir.Value | None


class CarrySumsThroughCalls(ModulePass):
    """Adds up in each microbatch sums that are otherwise computed after all of them.

        g0 = call body(a) cc=0                        s0 = call body(a, zero) cc=0
        g1 = call body(b) cc=1                        s1 = call body(b, s0) cc=1
        s = g0 + g1                             -->
        body(x): return g                             body(x, acc): return acc + g

    Gradients that are summed outside of the calls all live until the last one is computed; carried along,
    each is added to the sum as soon as it is computed, and every microbatch runs the same programs.

    Requires: microbatches are calls.  Ensures: same values, except that -0 becomes 0 where there was no start
        value.  A sum stays if a term has another use, if not every call of a callee is one of its terms, or
        if the terms are not added in the order of the calls.  Cost: linear in calls and their results.
    Source: ours.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Finds all sums of an entry point, then changes callees and calls once for all of them."""
        symbols, calls = ir.symbol_table(module), calls_by_callee(ir.funcs(module))
        for f in symbols.values():
            if f.is_entry and not f.is_external:
                sums = [s for s in _sums(f) if _is_possible(s, symbols, calls)]
                _carry(sums, symbols)


def _sums(f: ir.Func) -> list[_Sum]:
    """The sums of results of calls, each of maximal length."""
    by_last_add: dict[ir.Value, _Sum] = {}
    for add in ir.ops(f):
        if add.operation.name != "stablehlo.add":
            continue
        for term, rest in (tuple(add.operands), tuple(add.operands)[::-1]):
            call = _call_behind(term)
            if call is None:
                continue
            result, result_of_rest = ir.result_index(term), _call_behind(rest)
            before = by_last_add.get(rest) if len(ir.users(rest)) == 1 else None
            if before and before.result == result and ir.comes_before(before.calls[-1], call):
                del by_last_add[rest]
                longer = _Sum(result, (*before.calls, call), (*before.adds, add), before.start)
            elif result_of_rest is None:
                longer = _Sum(result, (call,), (add,), rest)
            elif ir.result_index(rest) == result and ir.comes_before(result_of_rest, call):
                longer = _Sum(result, (result_of_rest, call), (add,), None)
            else:
                continue
            by_last_add[add.results[0]] = longer
            break
    return [found for found in by_last_add.values() if len(found.calls) > 1]


def _call_behind(value: ir.Value) -> ir.Call | None:
    """The call that defines a value which has one use."""
    op = ir.producer(value)
    return op if isinstance(op, ir.Call) and len(ir.users(value)) == 1 else None


def _is_possible(found: _Sum, symbols: dict[str, ir.Func], calls: dict[str, list[ir.Call]]) -> bool:
    """Whether the callees are called for this sum alone, and its start value is defined in time."""
    terms = set(found.calls)
    for name in dict.fromkeys(call.callee_name for call in found.calls):
        if symbols[name].is_external or symbols[name].is_public or not terms.issuperset(calls[name]):
            return False
    if found.start is None:
        return str(found.adds[0].results[0].type.element_type) not in ("i1", "complex<f32>", "complex<f64>")
    maker = ir.producer(found.start)
    return maker is None or ir.comes_before(maker, found.calls[0])


def _carry(sums: list[_Sum], symbols: dict[str, ir.Func]) -> None:
    of_call: dict[ir.Call, list[_Sum]] = {}
    for found in sums:
        for call in found.calls:
            of_call.setdefault(call, []).append(found)
    changed: dict[str, list[int]] = {}
    made: dict[ir.Call, ir.Call] = {}
    for call in in_block_order(of_call):
        mine = sorted(of_call[call], key=lambda s: s.result)
        results = [s.result for s in mine]
        if call.callee_name not in changed:
            changed[call.callee_name] = results
            _add_inside(symbols[call.callee_name], results)
        more = [_carried_into(call, s, made) for s in mine]
        made[call] = ir.rebuild(call, [*call.operands, *more], [r.type for r in call.results])
    for found in sums:
        last = made[found.calls[-1]].results[found.result]
        ir.replace_uses(found.adds[-1].results[0], last)
        for add in reversed(found.adds):
            ir.erase(add)
    for call, new in made.items():
        ir.replace(call, list(new.results))


def _add_inside(f: ir.Func, results: list[int]) -> None:
    """Gives a callee an argument for each of some results, to which the result is added."""
    returned = f.returned
    for result in results:
        term = returned[result]
        total = [ir.append_arg(f.body, like=term), term]
        made = ir.create("stablehlo.add", total, [term.type], ir.at_end(f.body), location=term.location)
        returned[result] = made.results[0]
    f.returned = returned
    ir.return_types_changed(f)
    fill_attributes(f)


def _carried_into(call: ir.Call, found: _Sum, made: dict[ir.Call, ir.Call]) -> ir.Value:
    place = found.calls.index(call)
    if place:
        return made[found.calls[place - 1]].results[found.result]
    return found.start if found.start is not None else zeros(call.results[found.result].type, call)
