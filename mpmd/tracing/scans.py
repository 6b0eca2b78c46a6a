"""Loops that JAX lowers `scan` and `fori_loop` to: `while`s that count from 0 to a constant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mpmd import ir
from mpmd.errors import PlacementError
from mpmd.support.user_code import frames_of


@dataclasses.dataclass(frozen=True)
class CountedLoop:
    """A `stablehlo.while` whose carried value number `counter` runs from 0 to `trip_count` in steps of 1."""

    op: ir.Op
    counter: int
    trip_count: int

    @property
    def body(self) -> ir.Block:
        return self.op.regions[1].blocks[0]


def counted_loop(op: ir.Op, names: Sequence[str]) -> CountedLoop:
    """The counter of a `while`.

    Args:
        op: the loop.
        names: of the computations in it.

    Raises:
        PlacementError: named computations are in a loop whose number of iterations is not known.
    """
    condition, body = (region.blocks[0] for region in op.regions)
    compare = ir.producer(_terminator(condition).operands[0])
    if compare is not None and compare.operation.name == "stablehlo.compare":
        left, right = compare.operands
        counter = _argument(left, condition)
        trip_count = _integer(right)
        if counter is not None and trip_count is not None and "LT" in str(compare.comparison_direction):
            start = _integer(op.operands[counter])
            if start == 0 and _steps_by_one(body, counter):
                return CountedLoop(op, counter, max(trip_count, 0))
    frames = frames_of(op)
    where = f" at {frames[0]}" if frames else ""
    listed = "".join(f"  {name!r}\n" for name in names)
    raise PlacementError(
        f"named computations are inside a loop whose number of iterations is not a constant{where}:\n{listed}"
        "  meshes are assigned when a step is traced, so every iteration must be known then\n"
        "  use jax.lax.scan or mpmd.fori_loop with a fixed length, or put the whole loop into one "
        "named computation"
    )


def make_for(loop: CountedLoop) -> ir.For:
    """The loop as an `mpmd.for`: the index for the counter, all other carried values as they are."""
    carried = [v for i, v in enumerate(loop.op.operands) if i != loop.counter]
    body = loop.body
    op: ir.For = ir.create(
        "mpmd.for", carried, [v.type for v in carried], ir.before(loop.op),
        {"iterations": _ui32(loop.trip_count), "unroll_factor": _ui32(loop.trip_count)},
        loop.op.location, regions=1,
    )  # fmt: skip
    _index_of(body, loop.counter)
    old = _terminator(body)
    returned = [v for i, v in enumerate(old.operands) if i != loop.counter]
    ir.create("mpmd.return", returned, [], ir.before(old), location=old.location)
    old.operation.erase()
    _erase_unused(body)
    ir.erase_args(body, [loop.counter]).append_to(op.regions[0])
    _replace_loop(loop, list(op.results))
    return op


def _index_of(body: ir.Block, counter: int) -> None:
    """Adds the index of an `mpmd.for`, which has 32 bits, and uses it for the counter, which may have 64."""
    old = body.arguments[counter]
    if str(old.type.element_type) in ("i32", "ui32"):
        ir.replace_uses(old, ir.append_arg(body, old))
        return
    index = ir.append_arg(body, old, ir.Type.parse("tensor<i32>", ir.context()))
    wide = ir.create("stablehlo.convert", [index], [old.type], ir.at_start(body), location=old.location)
    ir.replace_uses(old, wide.result)


def unroll(loop: CountedLoop) -> list[ir.Op]:
    """The iterations one after the other in place of the loop; returns their ops."""
    unrolled: list[ir.Op] = []
    carried = list(loop.op.operands)
    for i in range(loop.trip_count):
        index = ir.create(
            "stablehlo.constant", [], [carried[loop.counter].type], ir.before(loop.op),
            {"value": ir.Attribute.parse(f"dense<{i}> : {carried[loop.counter].type}")}, loop.op.location,
        )  # fmt: skip
        carried[loop.counter] = index.result
        values = dict(zip(loop.body.arguments, carried))
        ops, carried = ir.clone_body(loop.body, values, ir.before(loop.op))
        unrolled += [index, *ops]
    carried.pop(loop.counter)
    _replace_loop(loop, carried)
    return unrolled


def _replace_loop(loop: CountedLoop, values: list[ir.Value]) -> None:
    """Uses `values` for all results but the counter's, and a constant for that."""
    result = loop.op.results[loop.counter]
    end = ir.create(
        "stablehlo.constant", [], [result.type], ir.before(loop.op),
        {"value": ir.Attribute.parse(f"dense<{loop.trip_count}> : {result.type}")}, loop.op.location,
    )  # fmt: skip
    values.insert(loop.counter, end.result)
    ir.replace(loop.op, values)


def _terminator(block: ir.Block) -> ir.Op:
    return ir.at_end(block).ref_operation.opview


def _argument(value: ir.Value, block: ir.Block) -> int | None:
    return next((i for i, arg in enumerate(block.arguments) if arg == value), None)


def _integer(value: ir.Value) -> int | None:
    """The integer of a scalar constant that defines a value, if there is one."""
    op = ir.producer(value)
    if op is None or not ir.is_constant(op) or op.results[0].type.shape:
        return None
    text = str(op.attributes["value"]).partition("dense<")[2].partition(">")[0]
    return int(text) if text.lstrip("-").isdigit() else None


def _steps_by_one(body: ir.Block, counter: int) -> bool:
    step = ir.producer(_terminator(body).operands[counter])
    if step is None or step.operation.name != "stablehlo.add":
        return False
    left, right = step.operands
    return left == body.arguments[counter] and _integer(right) == 1


def _erase_unused(body: ir.Block) -> None:
    for op in reversed(ir.ops(body)):
        if ir.is_trivially_dead(op):
            ir.erase(op)


def _ui32(value: int) -> ir.Attribute:
    return ir.IntegerAttr.get(ir.IntegerType.get_unsigned(32), value)


_OF_COUNTERS = {
    f"stablehlo.{name}" for name in ("add", "subtract", "multiply", "compare", "select", "convert")
}


def outline(body: ir.Block, counter: ir.Value, symbol: str, location: ir.Location) -> ir.Func:
    """Moves what an iteration computes into a function beside the loop's, and calls it.

    Slices at the counter stay, before the call and behind it.  JAX up to 0.11 lowers the body of a scan to
    such a call; later versions write it into the loop.
    """
    inside, behind = _division(body, counter)
    values: dict[ir.Value, ir.Value] = {}
    made = {v for op in inside for v in op.results}
    read = dict.fromkeys(v for op in inside for v in ir.read_by(op) if v not in made)
    given = [v for v in read if not _is_shared(v)]
    last = _terminator(body)
    leaving = [v for op in inside for v in op.results if any(user not in inside for user in ir.users(v))]
    kind = ir.FunctionType.get([v.type for v in given], [v.type for v in leaving])
    names = {"sym_name": ir.StringAttr.get(symbol), "sym_visibility": ir.StringAttr.get("private")}
    function: ir.Func = ir.create(
        "func.func", [], [], ir.before(_function_of(last)), {**names, "function_type": ir.TypeAttr.get(kind)},
        location, regions=1,
    )  # fmt: skip
    block = function.regions[0].blocks.append(*kind.inputs)
    values.update(zip(given, block.arguments))
    for op in [*(producer for v in read if _is_shared(v) and (producer := ir.producer(v))), *inside]:
        ir.clone_with(op, values, ir.InsertionPoint(block))
    ir.create("func.return", [values[v] for v in leaving], [], ir.InsertionPoint(block), location=location)
    call = ir.create(
        "func.call", given, kind.results, ir.before(last),
        {"callee": ir.FlatSymbolRefAttr.get(symbol)}, location,
    )  # fmt: skip
    for op in behind:
        ir.move_before(op, last)
    for old, new in zip(leaving, call.results):
        ir.replace_uses(old, new)
    for op in reversed(inside):
        ir.erase(op)
    return function


def _division(body: ir.Block, counter: ir.Value) -> tuple[list[ir.Op], list[ir.Op]]:
    """The ops that an iteration's function gets, and those that slice its results at the counter."""
    counters, made = {counter}, set[ir.Value]()
    inside: list[ir.Op] = []
    for op in ir.ops(body):
        read = ir.read_by(op)
        if ir.is_constant(op):
            continue
        if counters.isdisjoint(read) or not made.isdisjoint(read):
            inside.append(op)
            made.update(op.results)
        elif op.operation.name in _OF_COUNTERS and not any(r.type.shape for r in op.results):
            counters.update(op.results)
    behind: list[ir.Op] = []
    for op in reversed(inside):
        users = [user for v in op.results for user in ir.users(v)]
        if not counters.isdisjoint(ir.read_by(op)) and all(
            u in behind or u == _terminator(body) for u in users
        ):
            behind.insert(0, op)
    return [op for op in inside if op not in behind], behind


def _is_shared(value: ir.Value) -> bool:
    """Whether a value is a constant, of which a function has a copy of its own."""
    return ir.is_constant(ir.producer(value))


def _function_of(op: ir.Op) -> ir.Op:
    while not isinstance(op, ir.Func):
        op = op.operation.parent.opview
    return op
