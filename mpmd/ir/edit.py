"""Changing a program, op by op or by MLIR's own passes.

Misuse raises here; in MLIR it would crash the process or hang.  Passes that jaxlib has registered are named
by the text of a pipeline, such as `cse,symbol-dce`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.ir import OpView as Op
from jax.extend.mlir.ir import Value

from mpmd.errors import IRError
from mpmd.ir import query
from mpmd.ir.context import (
    context,
    defer_block_deletion,
    defer_contents_deletion,
    defer_deletion,
    keep,
    placeholders,
)
from mpmd.ir.ops import Fragment, Func, Transfer, put
from mpmd.ir.query import is_unused, ops
from mpmd.ir.types import MeshTensor, string_array

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
    query.note_edit()
    return ir.Operation.create(
        name, list(types), list(operands), attributes or {}, regions=regions,
        loc=location or ir.Location.unknown(context()), ip=where,
    ).opview  # fmt: skip


def make_fragment(
    mesh: str,
    inputs: Sequence[Value],
    types: Sequence[ir.Type],
    where: ir.InsertionPoint,
    body: Callable[[list[Value], ir.InsertionPoint], Sequence[Value]],
    location: ir.Location,
    inferred_by: Sequence[str] = (),
) -> Fragment:
    """A fragment without origin; `body(args, insertion point)` builds its ops and returns its results."""
    attributes = {
        "mesh_name": ir.StringAttr.get(mesh, context()),
        "origin": ir.ArrayAttr.get([], context()),
    }
    if inferred_by:
        attributes["mpmd.inferred_by"] = string_array(inferred_by)
    fragment = create("mpmd.fragment", inputs, types, where, attributes, location, regions=1)
    kinds = (v.type.tensor if isinstance(v.type, MeshTensor) else v.type for v in inputs)
    block = fragment.regions[0].blocks.append(*kinds, arg_locs=[location] * len(inputs))
    returned = body(list(block.arguments), ir.InsertionPoint(block))
    create("mpmd.return", returned, [], ir.InsertionPoint(block), location=location)
    return fragment


def make_transfer(
    value: Value, kind: ir.Type, where: ir.InsertionPoint, location: ir.Location | None = None
) -> Transfer:
    """A transfer of `value` to the mesh, memory and sharding of `kind`."""
    return create("mpmd.transfer", [value], [kind], where, location=location or value.location)


def replace_uses(old: Value, new: Value) -> None:
    """Uses `new` wherever `old` was used.  (MLIR never returns if the two are one.)"""
    if old != new and not is_unused(old):
        query.note_edit()
        old.replace_all_uses_with(new)


def replace_uses_in(old: Value, new: Value, user: Op) -> None:
    """Uses `new` for `old` among the operands of one op."""
    for i, operand in enumerate(user.operands):
        if operand == old:
            set_operand(user, i, new)


def set_operand(op: Op, index: int, value: Value) -> None:
    if op.operands[index] != value:
        query.note_edit()
        op.operation.operands[index] = value


def set_type(value: Value, kind: ir.Type) -> None:
    """Changes the type of a value in its definition; its users must accept the new one."""
    if value.type != kind:
        query.note_edit()
        value.set_type(kind)


def erase(op: Op) -> None:
    """Erases an op that nothing uses.

    Raises:
        IRError: something uses it.
    """
    if not is_unused(op):
        raise IRError(f"cannot erase {op.operation.name} at {op.location}: it is still used")
    query.note_edit()
    defer_deletion(op)


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
    query.note_edit()
    defer_deletion(op)


def erase_args(block: ir.Block, indices: Iterable[int]) -> ir.Block:
    """Erases block arguments that nothing uses: the ops move to a block that has the others only.

    The arguments become other values there.  (MLIR would free the arguments at once.)

    Raises:
        IRError: one of them is used.
    """
    args, gone = list(block.arguments), dict.fromkeys(indices)
    for i in gone:
        if not is_unused(args[i]):
            raise IRError(f"cannot erase block argument {i}: it is still used")
    if not gone:
        return block
    query.note_edit()
    left, spare = [arg for i, arg in enumerate(args) if i not in gone], args[next(iter(gone))]
    shorter = block.create_after(*(arg.type for arg in left), arg_locs=[arg.location for arg in left])
    for old, new in zip(left, shorter.arguments):
        old.replace_all_uses_with(spare)  # uses keep their order if they are replaced twice
        spare.replace_all_uses_with(new)
    for _ in range(len(block.operations)):
        shorter.append(at_start(block).ref_operation)
    defer_block_deletion(block)
    return shorter


def change_args(block: ir.Block, like: Sequence[Value]) -> list[Value]:
    """Replaces the arguments of a block by ones like those values; returns the replacements."""
    query.note_edit()
    args, kinds = list(block.arguments), [(v.type, v.location) for v in like]
    first, second = placeholders(len(args)), placeholders(len(args))
    for arg, once, twice in zip(args, first, second):
        arg.replace_all_uses_with(once)  # three times with the caller's: the same as once
        once.replace_all_uses_with(twice)
    for arg, (kind, location) in zip(args, kinds):
        arg.set_type(kind)
        arg.set_location(location)
    for kind, location in kinds[len(args) :]:
        block.add_argument(kind, location)
    erase_args(block, range(len(like), len(args)))
    return second


def append_arg(block: ir.Block, like: Value, kind: ir.Type | None = None) -> Value:
    """A new last argument of a block, with the location (and type, unless given) of `like`."""
    query.note_edit()
    return block.add_argument(kind or like.type, like.location)


def move_before(op: Op, other: Op) -> None:
    """Moves an op to right before another, into its block."""
    if op != other and _next(op) != other:
        query.note_edit()
        op.operation.move_before(other.operation)


def move_after(op: Op, other: Op) -> None:
    """Moves an op to right after another, into its block."""
    if op != other and _next(other) != op:
        query.note_edit()
        op.operation.move_after(other.operation)


def _next(op: Op) -> ir.Operation | None:
    return ir.InsertionPoint.after(op.operation).ref_operation


def move_to_start(op: Op, block: ir.Block) -> None:
    move_before(op, block.operations[0])


def reorder(f: Func, order: Sequence[Op]) -> None:
    """Puts all ops of a function, but for its terminator, into `order`; counts only if that changes it."""
    if list(order) == ops(f):
        return
    query.note_edit()
    terminator = f.terminator
    for op in order:
        op.operation.move_before(terminator.operation)


def clone(op: Any, where: ir.InsertionPoint | None = None) -> Any:
    """A copy of an op, or module, with the same operands; `where` is for ops."""
    query.note_edit()
    copy = op.operation.clone(where).opview
    return copy if where is not None else keep(copy)


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

    `values` maps the block's arguments to their replacements; the results of the ops are added to it.
    """
    copies = [clone_with(op, values, where) for op in ops(block)]
    terminator = ir.InsertionPoint.at_block_terminator(block).ref_operation
    return copies, [values.get(v, v) for v in terminator.operands]


def move_body(op: Any, values: Sequence[Value], where: Op) -> list[Value]:
    """Moves the ops of an op's body to before `where`, with `values` for its arguments; its results."""
    query.note_edit()
    for arg, value in zip(op.args, values, strict=True):
        replace_uses(arg, value)
    body = op.body
    for _ in range(len(body.operations) - 1):
        at_start(body).ref_operation.move_before(where.operation)
    return op.returned


def take_bodies(old: Op, new: Op) -> None:
    """Moves the blocks of an op into the regions of another, which are empty."""
    query.note_edit()
    for source, target in zip(old.operation.regions, new.operation.regions, strict=True):
        for block in list(source):
            block.append_to(target)


def rebuild(
    op: Op,
    operands: Sequence[Value],
    types: Sequence[ir.Type],
    attributes: Collection[str] | None = None,
    location: ir.Location | None = None,
) -> Any:
    """The same op, with other operands and result types; bodies are kept, and (some) attributes.

    MLIR cannot change these in place.  The old op is left without bodies; the caller replaces its uses and
    erases it.
    """
    kept = {name: a for name, a in op.attributes.items() if attributes is None or name in attributes}
    rebuilt = create(
        op.operation.name, operands, types, before(op), kept, location or op.location,
        regions=len(op.operation.regions),
    )  # fmt: skip
    take_bodies(op, rebuilt)
    return rebuilt


def return_types_changed(f: Func) -> None:
    """Brings a function's type in line with its arguments and with what it returns."""
    kind = ir.FunctionType.get([a.type for a in f.args], [v.type for v in f.returned], context())
    put(f, "function_type", ir.TypeAttr.get(kind, context()))


def run_mlir(pipeline: str, module: ir.Module) -> None:
    """Runs MLIR's passes on a module.  Ops taken from it before belong to the program as it was then.

    (An op that a pass erased could not be distinguished from others, and using it would crash the process.)

    Raises:
        IRError: a pass fails; the module stays as it was.
    """
    with context():
        result = module.operation.clone()
    run_mlir_alone(pipeline, result)
    defer_contents_deletion(module)
    for op in list(result.opview.body.operations):
        module.body.append(op)
    for name, attribute in result.attributes.items():
        module.operation.attributes[name] = attribute
    query.note_edit()


def run_mlir_alone(pipeline: str, module: ir.Module | ir.Operation) -> None:
    """Runs MLIR's passes on a module whose ops have no Python objects.

    Raises:
        IRError: a pass fails; the module is then unusable.
    """
    with context():
        try:
            _manager(pipeline).run(module.operation)
        except ir.MLIRError as e:
            raise IRError(f"{pipeline} failed: {e}") from e


def mlir_problem(pipeline: str) -> str:
    """Why there is no such pipeline; empty if there is one."""
    try:
        with context():
            _manager(pipeline)
    except ValueError as e:
        return str(e).strip()
    return ""


def _manager(pipeline: str) -> passmanager.PassManager:
    return passmanager.PassManager.parse(f"builtin.module({pipeline})")
