"""Bodies of calls: put where the calls are, or shared by fragments so that many microbatches cost as one.

    f = m1["f"] cc=0 (a, b) { x = add a a; y = neg x; ret y, b }
    g = m1["f"] cc=1 (c, b) { x = add c c; y = neg x; ret y, b }
    -->
    f = m1["f"] cc=0 (a, b) { y = call @mpmd.body.0(a); ret y, b }
    g = m1["f"] cc=1 (c, b) { y = call @mpmd.body.0(c); ret y, b }
    mpmd.body.0(p) { x = add p p; y = neg x; return y }

Results that a fragment only forwards, returns twice, or returns as a constant stay visible in it.  Passes
that drop dead code narrow the calls, and the export puts the bodies back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.fragments.editing import erase_dead_ops
from mpmd.passes.fragments.splitting import body_keys, outline
from mpmd.passes.structure import called_by, reached_from
from mpmd.support import diagnostics


def inline_call(call: ir.Call | ir.FuncCall, callee: ir.Func) -> list[ir.Op]:
    """Replaces a call by a copy of the callee's body; the inlined ops, in order."""
    copy: ir.Func = ir.clone(callee, ir.before(callee))
    copies = ir.ops(copy)
    returned = ir.move_body(copy, list(call.operands), call)
    ir.replace(call, returned)
    ir.erase(copy)
    return copies


class Inline(ModulePass):
    """Inlines ordinary calls, at any depth.  The functions stay; symbol-dce removes them.

        y = func.call g(a)
        g(p): s = add p p; return s     -->    y = add a a

    Functions that JAX outlined for its own reasons become plain ops.  MLIR's own inliner has no effect here:
    jaxlib does not register the half of it that belongs to `func`.  Calls of recursive functions, of
    functions without a body or with several blocks, and `mpmd.call`s stay.

    Requires: nothing.  Ensures: no other `func.call` is left.  Cost: linear in the inlined ops.
    Source: MLIR, `inline`.
    """

    def rewrite(self, module: ir.Module) -> None:
        """Callees before callers, so that copied bodies have no calls left."""
        symbols = ir.symbol_table(module)
        called = {name: called_by(f) for name, f in symbols.items()}
        done: dict[str, bool] = {}  # whether a function can be inlined
        for name in symbols:
            for ready in _callees_first(name, called):
                if ready in done:
                    continue
                blocks = symbols[ready].regions[0].blocks
                done[ready] = ready not in reached_from([ready], called) and len(blocks) == 1
                for call in ir.walk(symbols[ready], ir.FuncCall):
                    callee = call.callee.value
                    if done.get(callee, False):
                        inline_call(call, symbols[callee])


def _callees_first(name: str, called: dict[str, list[str]]) -> list[str]:
    """The transitive callees of `name`, each after its own callees; `name` is last."""
    order: dict[str, None] = {}
    open_: set[str] = set()
    todo = [(name, False)]
    while todo:
        current, is_left = todo.pop()
        if is_left:
            order[current] = None
        elif current not in open_ and current in called:
            open_.add(current)
            todo.append((current, True))
            todo += [(callee, False) for callee in reversed(called[current])]
    return list(order)


_PREFIX = "mpmd.body."
_KEPT = "mpmd.kept_arguments"


def share_bodies(fragments: Sequence[ir.Fragment], first: int = 0) -> list[ir.Fragment]:
    """Turns the bodies of fragments of one module into functions; equal bodies become one.

    `first` is the number of the first function, for modules that have some already.  Gives what the fragments
    have become.
    """
    functions: dict[Hashable, ir.Func] = {}
    callers = list(fragments)
    for number, (fragment, identity) in enumerate(zip(fragments, body_keys(fragments))):
        returned = fragment.returned
        makers = {v: op for v in returned if (op := ir.producer(v)) is not None}
        computed = [v for v, op in makers.items() if not ir.is_constant(op)]
        if not computed:
            continue
        if identity not in functions:
            positions = [returned.index(v) for v in computed]
            functions[identity] = _function(fragment, f"{_PREFIX}{first + len(functions)}", positions)
        constants = [op for op in makers.values() if ir.is_constant(op)]
        callers[number] = _call_instead(fragment, functions[identity], computed, constants)
    return callers


def share_again(f: ir.Func) -> None:
    """Shares the bodies of the named fragments of a function that are not shared, or hide what may be seen.

    A shared body that was simplified may pass on an argument, or return a value twice, or a constant.
    """
    module = ir.module_of(f)
    hiding = {body.symbol for body in functions_of(module) if _hides_results(body)}
    put_back_bodies(module, lambda x: not hiding.isdisjoint(called_bodies(x)))
    share_bodies([x for x in ir.fragments(f) if x.is_user and not _calls(x)], numbered(module))


def _hides_results(body: ir.Func) -> bool:
    """Whether a body returns something twice, or what it does not compute."""
    returned = body.returned
    makers = [ir.producer(v) for v in returned]
    return len(set(returned)) < len(returned) or any(op is None or ir.is_constant(op) for op in makers)


def _call_instead(
    fragment: ir.Fragment, function: ir.Func, computed: Sequence[ir.Value], constants: Sequence[ir.Op]
) -> ir.Fragment:
    """Replaces a fragment by one with a call of the body's function."""

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        values = dict(zip(fragment.args, args))
        for constant in constants:
            ir.clone_with(constant, values, inside)
        values.update(zip(computed, _call(function, args, inside, fragment.location).results))
        return [values[v] for v in fragment.returned]

    types, where = [r.type for r in fragment.results], ir.before(fragment)
    caller = ir.make_fragment(
        fragment.mesh, list(fragment.inputs), types, where, body, location=fragment.location
    )
    for name, attribute in fragment.attributes.items():
        ir.put(caller, name, attribute)
    ir.replace(fragment, list(caller.results))
    return caller


def numbered(module: ir.Module) -> int:
    """A number from which on names for functions of a module are free."""
    numbers = [int(f.symbol.removeprefix(_PREFIX).partition(".")[0]) for f in functions_of(module)]
    return max(numbers, default=-1) + 1


def functions_of(module: ir.Module) -> list[ir.Func]:
    """The functions of a module that are bodies of fragments."""
    return [f for f in ir.funcs(module) if f.symbol.startswith(_PREFIX)]


def narrow_calls(fragment: ir.Fragment) -> bool:
    """Computes only those results of the body of a fragment that are used; whether there are others.

    A body without the others is built once for all fragments that need it.
    """
    narrowed = False
    for call in _calls(fragment):
        used = [i for i, result in enumerate(call.results) if not ir.is_unused(result)]
        if len(used) == len(call.results):
            continue
        symbols = ir.symbol_table(ir.module_of(fragment))
        body = symbols[call.callee.value]
        name = f"{body.symbol}.{'_'.join(map(str, used))}"
        if name not in symbols:
            symbols[name] = ir.clone(body, ir.after(body))
            ir.put(symbols[name], "sym_name", ir.StringAttr.get(name))
            _keep_results(symbols[name], used)
        narrow = _call(symbols[name], list(call.operands), ir.before(call), call.location)
        for i, result in zip(used, narrow.results):
            ir.replace_uses(call.results[i], result)
        ir.erase(call)
        narrowed = True
    return narrowed


def put_back(fragment: ir.Fragment, symbols: dict[str, ir.Func]) -> None:
    """Replaces the calls of a body by the body itself."""
    for call in _calls(fragment):
        inline_call(call, symbols[call.callee.value])


def called_bodies(fragment: ir.Fragment) -> list[str]:
    """The names of the shared bodies that a fragment calls."""
    return [str(call.callee.value) for call in _calls(fragment)]


def calls_one_body(fragment: ir.Fragment) -> bool:
    """Whether all that a fragment computes is in one body."""
    computing = [op for op in ir.ops(fragment.body) if not ir.is_constant(op)]
    return len(computing) == 1 and computing == _calls(fragment)


def put_back_bodies(module: ir.Module, wanted: Callable[[ir.Fragment], bool] = lambda fragment: True) -> None:
    """Gives fragments bodies of their own again: all, or those that are `wanted`."""
    bodies = functions_of(module)
    if not bodies:
        return
    symbols, called = ir.symbol_table(module), set[str]()
    for f in symbols.values():
        for fragment in ir.fragments(f) if f.is_mpmd else ():
            calls = _calls(fragment)
            if calls and wanted(fragment):
                put_back(fragment, symbols)
            else:
                called.update(call.callee.value for call in calls)
    for body in bodies:
        if body.symbol not in called:
            ir.erase(body)


def _calls(fragment: ir.Fragment) -> list[ir.FuncCall]:
    calls = ir.ops(fragment.body, ir.FuncCall)
    return [call for call in calls if call.callee.value.startswith(_PREFIX)]


def _function(fragment: ir.Fragment, name: str, positions: Sequence[int]) -> ir.Func:
    """A private function that computes the results of a fragment at those positions."""
    copy: ir.Fragment = ir.clone(fragment, ir.before(fragment))
    marks = ir.effect_marks(copy)
    function = outline(copy, name)
    ir.erase(copy)
    ir.put(function, "sym_visibility", ir.StringAttr.get("private"))
    for mark, attribute in marks.items():
        ir.put(function, mark, attribute)
    _keep_results(function, positions)
    return function


def _keep_results(f: ir.Func, positions: Sequence[int]) -> None:
    """Reduces a function to some of its results, and to the arguments that these need; records which."""
    f.returned = [f.returned[i] for i in positions]
    erase_dead_ops(f.body)
    unused = [i for i, arg in enumerate(f.args) if ir.is_unused(arg)]
    kept = [i for i in range(len(f.args)) if i not in set(unused)]
    ir.erase_args(f.body, unused)
    ir.put(f, _KEPT, ir.DenseI64ArrayAttr.get(kept))
    ir.return_types_changed(f)


def _call(
    f: ir.Func, values: Sequence[ir.Value], where: ir.InsertionPoint, location: ir.Location
) -> ir.FuncCall:
    """A call of a function with the values that it still takes."""
    attributes = {"callee": ir.FlatSymbolRefAttr.get(f.symbol)}
    attributes |= {mark: f.attributes[mark] for mark in ir.EFFECT_MARKS if mark in f.attributes}
    kept = ir.DenseI64ArrayAttr(f.attributes[_KEPT])
    types = [v.type for v in f.returned]
    call: ir.FuncCall = ir.create(
        "func.call", [values[int(i)] for i in kept], types, where, attributes, location
    )
    return call


class CallInline(ModulePass):
    """Replaces each `mpmd.call` by the body of its callee.

        x = call body(a) cc=3
        body(p):                                -->   f = m1["f"] cc=3 (a) { y = add a a; ret y }
          f = m1["f"] (p) { y = add p p; ret y }
          return f

    Inlined fragments and fragment calls get all attributes of the call but its callee, its
    `call_counter` above all; other ops get none.  Callees stay; symbol-dce removes them.  With `share-bodies`
    the copies of a named fragment then call one function for their body.

    Requires: callees are defined and call nothing themselves (errors).  Ensures: no `mpmd.call` is left in
        functions that are not called.  Cost: linear in the inlined ops.
    Source: openxla/shardy MPMD, `call_inline`.

    Attributes:
        share_bodies: let the copies of a named fragment call one function for their body.
    """

    share_bodies: bool = False

    def rewrite(self, module: ir.Module) -> None:
        symbols = ir.symbol_table(module)
        calls = [(f, call) for f in symbols.values() for call in ir.walk(f, ir.Call)]
        calling = {f.symbol for f, _ in calls}
        failed = False
        for f, call in calls:
            problem = _not_inlinable(call, f, symbols, calling)
            if problem is not None:
                diagnostics.error(problem, call.location)
                failed = True
        if failed:
            return
        if self.share_bodies:
            callees = [symbols[name] for name in dict.fromkeys(call.callee_name for _, call in calls)]
            share_bodies([fragment for f in callees for fragment in ir.fragments(f) if fragment.is_user])
        for _, call in calls:
            attributes = {name: a for name, a in call.attributes.items() if name != "callee"}
            where = call.location
            for op in inline_call(call, symbols[call.callee_name]):
                op.operation.location = ir.Location.callsite(op.location, [where])
                for fragment in [op] if not isinstance(op, ir.For) else ir.walk(op):
                    if isinstance(fragment, (ir.Fragment, ir.FragmentCall)):
                        for name, attribute in attributes.items():
                            ir.put(fragment, name, attribute)


def _not_inlinable(call: ir.Call, f: ir.Func, symbols: dict[str, ir.Func], calling: set[str]) -> str | None:
    name = call.callee_name
    if name not in symbols or symbols[name].is_external:
        return f"@{f.symbol} calls @{name}, which has no body in this module"
    if name in calling:
        return (
            f"@{f.symbol} calls @{name}, which has calls itself: the work of one microbatch cannot consist "
            "of other microbatches, nor of itself"
        )
    return None
