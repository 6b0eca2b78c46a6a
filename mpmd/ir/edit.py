"""Changing a program.  Misuse raises here; in MLIR it would crash the process or hang.

After an op is erased, replaced, or moved into another op's body, Python objects for it, for its values
and for what is in its body must not be used again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.errors import IRError
from mpmd.ir import counting
from mpmd.ir.context import context
from mpmd.ir.ops import Func, put
from mpmd.ir.query import first_user, is_pure, is_unused, ops

at_start = ir.InsertionPoint.at_block_begin
at_end = ir.InsertionPoint.at_block_terminator
before = ir.InsertionPoint
after = ir.InsertionPoint.after


def create(
    name: str,
    operands: Sequence[Value],
    types: Sequence[ir.Type],
    where: ir.InsertionPoint,
    attributes: dict[str, ir.Attribute] | None = None,
    location: ir.Location | None = None,
    regions: int = 0,
) -> Any:
    """A new op, by its name such as `mpmd.transfer`."""
    counting.note_edit()
    return ir.Operation.create(
        name, list(types), list(operands), attributes or {}, regions=regions,
        loc=location or ir.Location.unknown(context()), ip=where,
    ).opview  # fmt: skip


def replace_uses(old: Value, new: Value) -> None:
    """Uses `new` wherever `old` was used.  (MLIR never returns if the two are one.)"""
    if old != new and not is_unused(old):
        counting.note_edit()
        old.replace_all_uses_with(new)


def take_uses(old: Op, new: Op) -> None:
    """Uses the results of `new` wherever those of `old` were used; newest uses stay newest."""
    for a, b in zip(old.results, new.results):
        for user, number in reversed([(use.owner, use.operand_number) for use in a.uses]):
            set_operand(user, number, b)


def replace_uses_in(old: Value, new: Value, user: Op) -> None:
    """Uses `new` for `old` among the operands of one op."""
    for i, operand in enumerate(user.operands):
        if operand == old:
            set_operand(user, i, new)


def set_operand(op: Op, index: int, value: Value) -> None:
    """Gives an op another operand."""
    if op.operands[index] != value:
        counting.note_edit()
        op.operation.operands[index] = value


def set_type(value: Value, kind: ir.Type) -> None:
    """Changes the type of a value where it is made; its users must accept the new one."""
    if value.type != kind:
        counting.note_edit()
        value.set_type(kind)


def erase(op: Op) -> None:
    """Erases an op that nothing uses.

    Raises:
        IRError: something uses it.
    """
    if not is_unused(op):
        raise IRError(f"cannot erase {op.operation.name} at {op.location}: it is still used")
    counting.note_edit()
    op.operation.erase()


def replace(op: Op, values: Sequence[Value]) -> None:
    """Uses `values` wherever the results of `op` were used, and erases `op`.

    Raises:
        IRError: not one value per result, or a value is a result of `op` itself.
    """
    results = list(op.results)
    if len(results) != len(values):
        raise IRError(f"cannot replace {op.operation.name}: {len(results)} results, {len(values)} values")
    if any(v in results for v in values):
        raise IRError(f"cannot replace {op.operation.name} by its own result")
    for old, new in zip(results, values):
        replace_uses(old, new)
    counting.note_edit()
    op.operation.erase()


def erase_args(block: ir.Block, indices: Iterable[int]) -> None:
    """Erases block arguments that nothing uses.

    Raises:
        IRError: one of them is used.
    """
    for i in sorted(set(indices), reverse=True):
        if not is_unused(block.arguments[i]):
            raise IRError(f"cannot erase block argument {i}: it is still used")
        counting.note_edit()
        block.erase_argument(i)


def append_arg(block: ir.Block, like: Value, kind: ir.Type | None = None) -> Value:
    """A new last argument of a block, with the location (and type, unless given) of `like`."""
    counting.note_edit()
    return block.add_argument(kind or like.type, like.location)


def move_before(op: Op, other: Op) -> None:
    """Moves an op to right before another, into its block."""
    if op != other and _next(op) != other:
        counting.note_edit()
        op.operation.move_before(other.operation)


def move_after(op: Op, other: Op) -> None:
    """Moves an op to right behind another, into its block."""
    if op != other and _next(other) != op:
        counting.note_edit()
        op.operation.move_after(other.operation)


def move_all_before(some: Sequence[Op], other: Op) -> None:
    """Moves ops, in this order, to right before another, into its block, at little cost for each."""
    for op in some:
        op.operation.move_before(other.operation)
    if some:
        counting.note_edit()


def _next(op: Op) -> ir.Operation | None:
    return ir.InsertionPoint.after(op.operation).ref_operation


def op_behind(op: Op) -> Any:
    """The op that stands right behind an op, which is no terminator."""
    behind = _next(op)
    return None if behind is None else behind.opview


@contextlib.contextmanager
def moving(f: Func) -> Iterator[None]:
    """Around moves of a function's ops: they count for nothing if all ops stand as before afterwards."""
    since, order = counting.edits(), ops(f)
    yield
    if ops(f) == order:
        counting.forget_edits(since)


def delay(op: Op) -> None:
    """Moves an op to right before its first user; an unused one stays."""
    user = first_user(op)
    if user is not None:
        move_before(op, user)


def move_to_start(op: Op, block: ir.Block) -> None:
    """Moves an op to the begin of a block."""
    move_before(op, block.operations[0])


def reorder(f: Func, order: Sequence[Op]) -> None:
    """Puts all ops of a function, but for its terminator, into `order`; counts only if that changes it."""
    if list(order) == ops(f):
        return
    counting.note_edit()
    terminator = f.terminator
    for op in order:
        op.operation.move_before(terminator.operation)


def clone(op: Op, where: ir.InsertionPoint) -> Any:
    """A copy of an op with the same operands."""
    counting.note_edit()
    return op.operation.clone(where).opview


def clone_with(op: Op, values: dict[Value, Value], where: ir.InsertionPoint) -> Any:
    """A copy of an op that uses `values[v]` for `v`, captured ones included; `values` learns its results."""
    copy = clone(op, where)

    def visit(inner: ir.Operation) -> ir.WalkResult:
        for i, operand in enumerate(inner.operands):
            if operand in values:
                inner.operands[i] = values[operand]
        return ir.WalkResult.ADVANCE

    if len(copy.operation.regions):
        copy.operation.walk(visit)
    else:
        visit(copy.operation)
    values.update(zip(op.results, copy.results))
    return copy


def clone_body(
    block: ir.Block, values: dict[Value, Value], where: ir.InsertionPoint
) -> tuple[list[Any], list[Value]]:
    """Copies of a block's ops but its terminator, and what the copies' terminator would return.

    `values` maps the block's arguments to what stands for them; it learns the results of the ops.
    """
    made = [clone_with(op, values, where) for op in ops(block)]
    terminator = ir.InsertionPoint.at_block_terminator(block).ref_operation
    return made, [values.get(v, v) for v in terminator.operands]


def inline_body(op: Any) -> None:
    """Puts the ops of an op's body where the op stands, and erases the op."""
    for arg, value in zip(op.args, op.operands):
        replace_uses(arg, value)
    for inner in ops(op.body):
        move_before(inner, op)
    replace(op, op.returned)


def rebuild(op: Op, operands: Sequence[Value], types: Sequence[ir.Type]) -> Any:
    """The same op, with other operands and result types; attributes and bodies are kept.

    MLIR cannot change these in place.  The old op is left without bodies, for the caller to take the
    uses from and erase.
    """
    counting.note_edit()
    made = ir.Operation.create(
        op.operation.name, list(types), list(operands), dict(op.attributes.items()),
        regions=len(op.operation.regions), loc=op.location, ip=before(op),
    )  # fmt: skip
    for old, new in zip(op.operation.regions, made.regions):
        for block in list(old):
            block.append_to(new)
    return made.opview


def drop_attribute(op: Op, name: str, but_of: Collection[str] = ()) -> None:
    """Removes an attribute from an op and all ops in it, but from those that are called as given."""

    def visit(inner: ir.Operation) -> ir.WalkResult:
        if name in inner.attributes and inner.name not in but_of:
            counting.note_edit()
            del inner.attributes[name]
        return ir.WalkResult.ADVANCE

    op.operation.walk(visit)


def keep_only(body: ir.Block, wanted: Callable[[Op], bool]) -> None:
    """Erases the ops of a body but those `wanted`, last first."""
    for op in reversed(ops(body)):
        if not wanted(op):
            erase(op)


def erase_dead_ops(body: ir.Block) -> None:
    """Erases, from a body and from the regions in it, what only computes and is not used."""
    for op in reversed(ops(body)):
        if is_unused(op) and is_pure(op):
            erase(op)
            continue
        for region in op.operation.regions:
            for block in region:
                erase_dead_ops(block)


def return_types_changed(f: Func) -> None:
    """Brings a function's type in line with its arguments and with what it returns."""
    kind = ir.FunctionType.get([a.type for a in f.args], [v.type for v in f.returned], context())
    attribute = ir.TypeAttr.get(kind, context())
    if f.attributes["function_type"] != attribute:
        counting.note_edit()
        f.attributes["function_type"] = attribute


def clone_module(module: ir.Module) -> Any:
    """A copy of a module; it lives as long as what is returned is held."""
    return module.operation.clone().opview


def take_sdy_meshes(module: ir.Module, source: Any) -> None:
    """Gives a module the `sdy.mesh` ops of another, attributes included, where it lacks them."""
    known = {str(op.sym_name.value): op for op in module.body.operations if isinstance(op, sdy.MeshOp)}
    for op in [op for op in source.body.operations if isinstance(op, sdy.MeshOp)]:
        have = known.get(str(op.sym_name.value))
        if have is None:
            clone(op, at_start(module.body))
        else:
            for name, attribute in op.attributes.items():
                put(have, name, attribute)
