"""Sums that calls carry from microbatch to microbatch: gradients, which start from zeros.

A weight that several stages use has terms on several meshes.  Here its sum becomes one per mesh, and each is
added up inside of the calls of that mesh, so that what crosses between meshes crosses once per step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee, fill_attributes
from mpmd.passes.fragments.editing import in_block_order
from mpmd.passes.structure import zeros


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
    return [candidate for candidate in by_last_add.values() if len(candidate.calls) > 1]


def _call_behind(value: ir.Value) -> ir.Call | None:
    """The call that defines a value which has one use."""
    op = ir.producer(value)
    return op if isinstance(op, ir.Call) and len(ir.users(value)) == 1 else None


def _is_possible(candidate: _Sum, symbols: dict[str, ir.Func], calls: dict[str, list[ir.Call]]) -> bool:
    """Whether the callees are called for this sum alone, and its start value is defined in time."""
    terms = set(candidate.calls)
    for name in dict.fromkeys(call.callee_name for call in candidate.calls):
        if symbols[name].is_external or symbols[name].is_public or not terms.issuperset(calls[name]):
            return False
    if candidate.start is None:
        return str(candidate.adds[0].results[0].type.element_type) not in (
            "i1",
            "complex<f32>",
            "complex<f64>",
        )
    maker = ir.producer(candidate.start)
    return maker is None or ir.comes_before(maker, candidate.calls[0])


def _carry(sums: list[_Sum], symbols: dict[str, ir.Func]) -> None:
    of_call: dict[ir.Call, list[_Sum]] = {}
    for each in sums:
        for call in each.calls:
            of_call.setdefault(call, []).append(each)
    changed: dict[str, list[int]] = {}
    rebuilt: dict[ir.Call, ir.Call] = {}
    for call in in_block_order(of_call):
        mine = sorted(of_call[call], key=lambda s: s.result)
        results = [s.result for s in mine]
        if call.callee_name not in changed:
            changed[call.callee_name] = results
            _add_inside(symbols[call.callee_name], results)
        more = [_carried_into(call, s, rebuilt) for s in mine]
        rebuilt[call] = ir.rebuild(call, [*call.operands, *more], [r.type for r in call.results])
    for each in sums:
        last = rebuilt[each.calls[-1]].results[each.result]
        ir.replace_uses(each.adds[-1].results[0], last)
        for add in reversed(each.adds):
            ir.erase(add)
    for call, new in rebuilt.items():
        ir.replace(call, list(new.results))


def _add_inside(f: ir.Func, results: list[int]) -> None:
    """Gives a callee an argument for each of some results, to which the result is added."""
    returned = f.returned
    for result in results:
        term = returned[result]
        total = [ir.append_arg(f.body, like=term), term]
        total_op = ir.create("stablehlo.add", total, [term.type], ir.at_end(f.body), location=term.location)
        returned[result] = total_op.results[0]
    f.returned = returned
    ir.return_types_changed(f)
    fill_attributes(f)


def _carried_into(call: ir.Call, candidate: _Sum, rebuilt: dict[ir.Call, ir.Call]) -> ir.Value:
    place = candidate.calls.index(call)
    if place:
        return rebuilt[candidate.calls[place - 1]].results[candidate.result]
    return (
        candidate.start if candidate.start is not None else zeros(call.results[candidate.result].type, call)
    )


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """Argument `arg` of a callee whose result `result` is the argument plus terms on several meshes."""

    arg: int
    result: int
    first: list[ir.Value]
    others: list[list[ir.Value]]


class SplitAccumulatorsByMesh(ModulePass):
    """Splits a sum over microbatches whose terms are on several meshes into one accumulator per mesh.

        x = call body(acc, ..) cc=0                  x, x2 = call body(acc, zero, ..) cc=0
        y = call body(x, ..) cc=1                    y, y2 = call body(x, x2, ..) cc=1
        return y                                -->  return y + y2
        body(acc, ..): return acc + (g1 + g2)        body(acc, acc2, ..): return acc + g1, acc2 + g2

    where g1 is unassigned from one mesh and g2 from another, as the gradients of a weight that is used on
    several stages are.  Each part then stays where it is computed, and crosses once per step instead of once
    per microbatch.

    Requires: named computations are fragments between assigns and unassigns; calls are not inlined.
    Ensures: no sum that is carried from call to call has terms on two meshes.  Cost: linear in calls.
    Source: ours; JaxPP commutes loops to the same end.
    """

    def rewrite(self, module: ir.Module) -> None:
        symbols = ir.symbol_table(module)
        for name, sites in calls_by_callee(f for f in symbols.values() if f.is_entry).items():
            accumulators = _accumulators(symbols[name], sites)
            if accumulators:
                _split_callee(symbols[name], accumulators)
                _split_calls(sites, accumulators)


def _accumulators(f: ir.Func, sites: list[ir.Call]) -> list[_Accumulator]:
    accumulators = []
    position = {arg: i for i, arg in enumerate(f.args)}
    for k, value in enumerate(f.returned):
        leaves = terms_of(value)
        own = [v for v in leaves if v in position and len(ir.users(v)) == 1]
        if len(leaves) < 3 or len(own) != 1 or not _is_carried(position[own[0]], k, sites):
            continue
        by_mesh: dict[str, list[ir.Value]] = {}
        for leaf in leaves:
            if leaf != own[0]:
                by_mesh.setdefault(_mesh_of(leaf), []).append(leaf)
        if len(by_mesh) > 1:
            first, *others = by_mesh.values()
            accumulators.append(_Accumulator(position[own[0]], k, first, others))
    return accumulators


def terms_of(value: ir.Value) -> list[ir.Value]:
    """The terms of a sum, left to right; inner sums must have no other use."""
    op = ir.producer(value)
    if op is None or op.operation.name != "stablehlo.add" or len(ir.users(value)) > 1:
        return [value]
    return [term for operand in op.operands for term in terms_of(operand)]


def _is_carried(arg: int, result: int, sites: list[ir.Call]) -> bool:
    """Whether a call of the callee takes another one's result as its argument."""
    members = set(sites)
    return any(
        (p := ir.producer(site.operands[arg])) is not None
        and p in members
        and ir.result_index(site.operands[arg]) == result
        for site in sites
    )


def _mesh_of(value: ir.Value) -> str:
    """The one mesh of all terms of a value; empty if there is none or are several."""
    meshes: set[str] = set()
    seen: set[ir.Value] = set()
    todo = [value]
    while todo:
        v = todo.pop()
        if v in seen:
            continue
        seen.add(v)
        op = ir.producer(v)
        if isinstance(op, ir.Unassign):
            meshes.add(op.tensor.type.mesh)
        elif op is None:
            return ""
        else:
            todo += ir.read_by(op)
    return meshes.pop() if len(meshes) == 1 else ""


def _split_callee(f: ir.Func, accumulators: list[_Accumulator]) -> None:
    returned = f.returned
    more: list[ir.Value] = []
    for acc in accumulators:
        arg = f.args[acc.arg]
        returned[acc.result] = _sum(f, [arg, *acc.first])
        for terms in acc.others:
            more.append(_sum(f, [ir.append_arg(f.body, like=arg), *terms]))
    f.returned = returned + more
    ir.return_types_changed(f)
    fill_attributes(f)
    for op in reversed(ir.ops(f)):
        if op.operation.name == "stablehlo.add" and ir.is_unused(op):
            ir.erase(op)


def _sum(f: ir.Func, terms: list[ir.Value]) -> ir.Value:
    """The terms after the first added up from the left, then added to the first."""
    first, total, *rest = terms
    for term in rest:
        total = _add(total, term, f)
    return _add(first, total, f)


def _add(a: ir.Value, b: ir.Value, f: ir.Func) -> ir.Value:
    return ir.create("stablehlo.add", [a, b], [a.type], ir.at_end(f.body), location=b.location).result


def _split_calls(sites: list[ir.Call], accumulators: list[_Accumulator]) -> None:
    """Rebuilds the calls in program order; the parts of a sum go on where its accumulator does.

    Every other use gets the sum: also one as another accumulator, which has parts of its own.
    """
    parts_of: dict[ir.Value, tuple[int, list[ir.Value]]] = {}
    for site in sites:
        more: list[ir.Value] = []
        for acc in accumulators:
            carried = site.operands[acc.arg]
            arg, parts = parts_of.get(carried, (None, []))
            more += parts if arg == acc.arg else [zeros(carried.type, site) for _ in acc.others]
        types = [r.type for r in site.results]
        rebuilt = ir.rebuild(site, [*site.operands, *more], types + [v.type for v in more])
        ir.replace(site, list(rebuilt.results)[: len(types)])
        fresh = iter(list(rebuilt.results)[len(types) :])
        for acc in accumulators:
            parts_of[rebuilt.results[acc.result]] = acc.arg, [next(fresh) for _ in acc.others]
    for value, (arg, parts) in parts_of.items():
        _use_sum_elsewhere(value, parts, arg)


def _use_sum_elsewhere(value: ir.Value, parts: list[ir.Value], arg: int) -> None:
    call: Any = ir.producer(value)
    elsewhere = [
        (user, number)
        for user, number in ir.uses(value)
        if not (isinstance(user, ir.Call) and user.callee_name == call.callee_name and number == arg)
    ]
    if not elsewhere:
        return
    total, where = value, ir.after(call)
    for part in parts:
        op = ir.create("stablehlo.add", [total, part], [total.type], where, location=value.location)
        total, where = op.result, ir.after(op)
    for owner, number in elsewhere:
        ir.set_operand(owner, number, total)


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
    positions = []
    position = {arg: i for i, arg in enumerate(f.args)}
    for k, value in enumerate(f.returned):
        own = [leaf for leaf in terms_of(value) if leaf in position and len(ir.users(leaf)) == 1]
        if len(own) == 1 and own[0] is not value:
            i = position[own[0]]
            is_carried = all(b.operands[i] == a.results[k] for a, b in itertools.pairwise(calls))
            if is_carried and all(len(ir.uses(call.results[k])) == 1 for call in second[:-1]):
                positions.append((i, k))
    return positions


def _add_up_halves(
    sums: Sequence[tuple[int, int]], first: Sequence[ir.Call], second: Sequence[ir.Call]
) -> None:
    """Starts the sums of the second half at zero, and adds those of the first where the whole is used."""
    for argument, result in sums:
        before, whole = first[-1].results[result], second[-1].results[result]
        ir.set_operand(second[0], argument, zeros(before.type, second[0]))
        uses = ir.uses(whole)
        if uses:
            total_op = ir.create(
                "stablehlo.add", [before, whole], [whole.type], ir.after(second[-1]), location=whole.location
            )
            for user, number in uses:
                ir.set_operand(user, number, total_op.result)
