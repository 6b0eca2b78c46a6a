"""From the module that JAX lowers to one in our dialect.

    call @mpmd.comp.f.(%x)             -->  mpmd.named_computation<"f"> (%x) {...}
    call @mpmd.tensor.t.(%x)           -->  mpmd.named_tensor %x name="t"
    call @mpmd.call.3.(%x)             -->  mpmd.call @callee(%x) {call_counter = 3}
    call @mpmd.microbatches.0.(%x)     -->  its reshape, {mpmd.microbatches = 0}
    while that counts to n over names  -->  mpmd.for (...) {iterations = n}, its body an mpmd.call
    any other call, or composite       -->  its body

JAX outlines functions for reasons of its own; their ops are inlined.  Names in branches and other regions
become operations there; import folds the branches whose index is known.

The location of a call shows how often its name was transposed, such as
`jit(step)/transpose(jvp(jit(mpmd.comp.f.)))`.  Rematerialised work counts as backward work, because it runs
then: `transpose(jvp(checkpoint))/rematted_computation/jit(mpmd.comp.f.)`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re

from mpmd import ir
from mpmd.passes import structure
from mpmd.passes.calls.bodies import inline_call
from mpmd.tracing.names import MICROBATCHES, decode
from mpmd.tracing.scans import counted_loop, make_for, outline, unroll


def body_copy(f: ir.Func) -> ir.Func:
    """A copy of a function, beside it, whose body may be taken apart; erase it afterwards."""
    return ir.clone(f, ir.before(f))


def inline_all(block: ir.Block, symbols: dict[str, ir.Func]) -> None:
    """Inlines every ordinary call in a block, and in the regions of its ops, at any depth."""
    todo = ir.ops(block)
    while todo:
        op = todo.pop()
        if isinstance(op, ir.FuncCall):
            todo += inline_call(op, symbols[op.callee.value])
            continue
        for region in op.operation.regions:
            for inner in region.blocks:
                todo += list(inner.operations)[:-1]


# The class of the objects that the bindings return; the public class is its subclass and only builds ops.
_Composite = next(kind for kind in ir.stablehlo.CompositeOp.__mro__ if "OPERATION_NAME" in vars(kind))

_BARRIER = "stablehlo.optimization_barrier"
_HINTS = ("broadcast", "reduce")
_TRANSPARENT = ("tensor", *_HINTS)


class ExpansionScope(enum.Enum):
    """The context of ops, which decides how calls and loops are converted.

    `ENTRY` is the body of the entry function: calls and loops stay.  `INNER` is a callee, a branch or another
    region: loops over names are unrolled.  `NAMED` is a named computation, which runs on one mesh as a whole:
    loops stay as they are.
    """

    ENTRY = enum.auto()
    INNER = enum.auto()
    NAMED = enum.auto()

    @property
    def of_regions(self) -> ExpansionScope:
        return ExpansionScope.NAMED if self is ExpansionScope.NAMED else ExpansionScope.INNER


@dataclasses.dataclass
class Expansion:
    """The conversion of one module.  `topology` is set on every function that stays."""

    module: ir.Module
    topology: ir.TopologyAttr

    def __post_init__(self) -> None:
        self.symbols = ir.symbol_table(self.module)
        self.callees: dict[tuple[str, int], str] = {}
        self.holds_names = functools.cache(self._holds_names)

    def run(self) -> None:
        """Converts `@main` and everything it calls; other functions are erased."""
        main = self.symbols["main"]
        main.topology = self.topology
        for composite in ir.walk(self.module, _Composite):
            _call_decomposition(composite)
        self.expand(main.body, 0, ExpansionScope.ENTRY)
        kept = {"main", *self.callees.values()}
        for name in set(self.symbols) - kept:
            if not self.symbols[name].is_public:
                self.symbols[name].operation.erase()
                del self.symbols[name]

    def _holds_names(self, symbol: str) -> bool:
        kind, _ = decode(symbol) or ("", "")
        return kind not in ("", MICROBATCHES) or any(
            self.holds_names(call.callee.value) for call in ir.walk(self.symbols[symbol], ir.FuncCall)
        )

    def _names_in(self, op: ir.Op) -> bool:
        return any(self.holds_names(call.callee.value) for call in ir.walk(op, ir.FuncCall))

    def _names_in_branches(self, loop: ir.Op) -> bool:
        """Whether a conditional in a loop, or in a function that it calls, holds names.

        Iterations may then differ in the names that they run.  Microbatches do not.
        """
        for op in ir.walk(loop):
            if structure.is_conditional(op) and self._names_in(op):
                return True
            if isinstance(op, ir.FuncCall) and decode(op.callee.value) is None:
                if self._names_in_branches(self.symbols[op.callee.value]):
                    return True
        return False

    def expand(self, block: ir.Block, count: int, scope: ExpansionScope) -> None:
        """Converts the ops of a block; `count` is how often its function was transposed."""
        self.expand_ops(ir.ops(block), count, scope)

    def expand_call(self, call: ir.FuncCall, count: int, scope: ExpansionScope) -> None:
        symbol = call.callee.value
        kind, name = decode(symbol) or ("", "")
        count = _transposed(call, count)
        if kind == "comp":
            self.make_named_computation(call, ir.Origin(name, count))
        elif kind in _HINTS and not _is_in_function(call):
            ir.replace(call, list(call.operands))
        elif kind in _TRANSPARENT:
            _make_marks(call, kind, name)
        elif kind == MICROBATCHES:
            _mark_batch_dim(inline_call(call, self.symbols[symbol]), int(name))
        elif kind == "call" and scope is ExpansionScope.ENTRY:
            inner = inline_call(call, self.symbols[symbol])
            for op in inner:
                if isinstance(op, ir.FuncCall):
                    self.make_call(op, _transposed(op, count), int(name))
        elif kind == "callee" and scope is ExpansionScope.ENTRY:
            self.make_call(call, count, None)
        elif kind or self.holds_names(symbol):
            self.expand_ops(inline_call(call, self.symbols[symbol]), count, scope)
        else:
            for op in inline_call(call, self.symbols[symbol]):
                self._inline_inside(op)

    def expand_ops(self, ops: list[ir.Op], count: int, scope: ExpansionScope) -> None:
        """Converts ops of a block, or ops that were just inlined into one."""
        for op in ops:
            if isinstance(op, ir.FuncCall):
                self.expand_call(op, count, scope)
            elif not len(op.operation.regions):
                if op.operation.name == _BARRIER and len(op.operands) > 1 and _is_in_function(op):
                    _split_barrier(op)
            elif not self._names_in(op):
                self._inline_inside(op)
            elif op.operation.name == "stablehlo.while" and scope is not ExpansionScope.NAMED:
                self.expand_loop(op, count, scope)
            else:
                for region in op.operation.regions:
                    for block in region.blocks:
                        self.expand(block, count, scope.of_regions)

    def _inline_inside(self, op: ir.Op) -> None:
        """Inlines the calls in an op without names, or such a call itself."""
        if isinstance(op, ir.FuncCall):
            for inner in inline_call(op, self.symbols[op.callee.value]):
                self._inline_inside(inner)
            return
        for region in op.operation.regions:
            for block in region.blocks:
                inline_all(block, self.symbols)

    def make_named_computation(self, call: ir.FuncCall, origin: ir.Origin) -> None:
        """Puts the callee's body into a named computation; names in it become nested ones."""
        copy = body_copy(self.symbols[call.callee.value])
        self.expand(copy.body, origin.transpose_count, ExpansionScope.NAMED)
        returned = copy.returned
        op = ir.create(
            "mpmd.named_computation", list(call.operands), [r.type for r in call.results], ir.before(call),
            {"origin": origin.attribute()}, call.location, regions=1,
        )  # fmt: skip
        ir.create("mpmd.return", returned, [], ir.at_end(copy.body), location=copy.terminator.location)
        copy.terminator.operation.erase()
        copy.body.append_to(op.regions[0])
        ir.replace(call, list(op.results))
        copy.operation.erase()
        if not op.results and ir.is_side_effect_free(op):
            ir.erase(op)  # code that JAX hoists out of a loop may be empty

    def make_call(self, call: ir.FuncCall, count: int, counter: int | None) -> None:
        """Makes the call one of our dialect; its callee is converted once per transposition count."""
        key = (call.callee.value, count)
        if key not in self.callees:
            self.callees[key] = self.make_callee(*key)
        op = ir.create(
            "mpmd.call", list(call.operands), [r.type for r in call.results], ir.before(call),
            {"callee": ir.FlatSymbolRefAttr.get(self.callees[key])}, call.location,
        )  # fmt: skip
        op.call_counter = counter
        ir.replace(call, list(op.results))

    def make_callee(self, symbol: str, count: int) -> str:
        """A converted copy of a function, and its name."""
        copy = body_copy(self.symbols[symbol])
        _, name = decode(symbol) or ("", symbol)
        taken = set(self.symbols)
        chosen = next(c for i in range(len(taken) + 1) if (c := f"{name}_{i}" if i else name) not in taken)
        ir.put(copy, "sym_name", ir.StringAttr.get(chosen))
        ir.put(copy, "sym_visibility", ir.StringAttr.get("private"))
        self.symbols[chosen] = copy
        copy.topology = self.topology
        self.expand(copy.body, count, ExpansionScope.INNER)
        return chosen

    def expand_loop(self, loop: ir.Op, count: int, scope: ExpansionScope) -> None:
        """A counted loop over names: kept as `mpmd.for` in the entry function, unrolled elsewhere.

        A loop whose iterations choose between names is unrolled there, too: a callee cannot be one program
        for all of them.  So is one of no iterations: nothing is left of it.
        """
        counted = counted_loop(loop, self._called_in(loop))
        if not counted.trip_count or scope is not ExpansionScope.ENTRY or self._names_in_branches(loop):
            self.expand_ops(unroll(counted), count, scope)
            return
        expanded = make_for(counted)
        self._outline(expanded)
        for op in ir.ops(expanded.body):  # their own locations show how often the loop was transposed
            if self._is_iteration(op):
                self.make_call(op, _transposed(op, count), None)
                continue
            self.expand_ops([op], count, ExpansionScope.INNER)

    def _is_iteration(self, op: ir.Op) -> bool:
        """Whether an op of a loop calls a function, not a name, with names in it."""
        if not isinstance(op, ir.FuncCall) or not self.holds_names(op.callee.value):
            return False
        kind, _ = decode(op.callee.value) or ("", "")
        return kind in ("", "callee")

    def _outline(self, loop: ir.For) -> None:
        """Gives the iterations of a loop a function, if names are in its body itself."""
        named = [op for op in ir.ops(loop.body) if self._names_in(op)]
        if named and not any(self._is_iteration(op) for op in named):
            symbol = next(
                name for i in range(len(self.symbols) + 1) if (name := f"body_{i}") not in self.symbols
            )
            where = ir.Location.unknown(ir.context())
            self.symbols[symbol] = outline(loop.body, loop.body.arguments[-1], symbol, where)

    def _called_in(self, op: ir.Op) -> list[str]:
        """The names of the computations in an op, or in a function that it calls."""
        called: dict[str, None] = {}
        for call in ir.walk(op, ir.FuncCall):
            kind, name = decode(call.callee.value) or ("", "")
            below = [name] if kind == "comp" else self._called_in(self.symbols[call.callee.value])
            called.update(dict.fromkeys(below))
        return list(called)


def _is_in_function(op: ir.Op) -> bool:
    """Whether an op is in the body of a function or of a loop over microbatches, in no other region."""
    return isinstance(op.operation.parent.opview, (ir.Func, ir.For))


def _transposed(op: ir.Op, count: int) -> int:
    match = re.match(r'loc\("([^"]*)"', str(op.location))
    path = match[1] if match else ""
    return count + path.count("transpose(")


def _make_marks(call: ir.FuncCall, kind: str, name: str) -> None:
    """One named_tensor, broadcast or reduce for each operand of the call."""
    marked = []
    for value in call.operands:
        attributes = {
            "tensor": {"name": ir.StringAttr.get(name)},
            "broadcast": {},
            "reduce": {"reduction": ir.Attribute.parse("#mpmd.reduction<none>")},
        }[kind]
        op = "named_tensor" if kind == "tensor" else kind
        marked += ir.create(
            f"mpmd.{op}", [value], [value.type], ir.before(call), attributes, call.location
        ).results
    ir.replace(call, marked)


def _mark_batch_dim(inlined: list[ir.Op], dim: int) -> None:
    """Marks the dim of a batch that a reshape splits into microbatches."""
    for op in inlined:
        if op.operation.name == "stablehlo.reshape":
            i64 = ir.IntegerType.get_signless(64)
            ir.put(op, "mpmd.microbatches", ir.IntegerAttr.get(i64, dim))


def _call_decomposition(composite: ir.Op) -> None:
    """Replaces an operation of the user's own by the call that it is defined as."""
    call = ir.create(
        "func.call", list(composite.operands), [r.type for r in composite.results], ir.before(composite),
        {"callee": composite.decomposition}, composite.location,
    )  # fmt: skip
    ir.replace(composite, list(call.results))


def _split_barrier(op: ir.Op) -> None:
    """One barrier per value: their values may live on different meshes."""
    passed = []
    for value in op.operands:
        passed += ir.create(op.operation.name, [value], [value.type], ir.before(op), {}, op.location).results
    ir.replace(op, passed)
