"""The flow of meshes through a program, with calls as their callees."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.fragments.block_order import op_around
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh.sets import Key

_BARRIERS = (ir.Broadcast, ir.Reduce)
_REDUCTIONS = {
    "stablehlo.add": "add",
    "stablehlo.maximum": "max",
    "stablehlo.minimum": "min",
    "stablehlo.multiply": "mul",
    "stablehlo.or": "or",
    "stablehlo.and": "and",
}
_OP_OF_REDUCTION = {kind: name for name, kind in _REDUCTIONS.items()}


def is_meshless(op: ir.Op) -> bool:
    """Whether it is an op of a function's or loop's own block that needs a mesh: not of our dialect."""
    name = op.operation.name
    return not name.startswith("mpmd.") and name not in ("func.return", "func.func")


def is_barrier(op: ir.Op | None) -> bool:
    """Whether uses do not flow through it: a broadcast or reduce."""
    return isinstance(op, _BARRIERS)


def mpmd_functions(module: ir.Module) -> list[ir.Func]:
    """The functions that have meshes, and a body."""
    return [f for f in ir.funcs(module) if f.is_mpmd and not f.is_external]


def use_keys(value: ir.Value, symbols: dict[str, ir.Func]) -> list[Key]:
    """The keys of the use sets of the uses of a value, newest use first."""
    keys: list[Key] = []
    op = ir.producer(value)
    block = value.owner if op is None else op.operation.block
    from_broadcast = isinstance(op, ir.Broadcast)
    stops = (ir.Unassign,) if from_broadcast else (ir.Unassign, *_BARRIERS)
    for use in value.uses:
        user = use.owner
        if isinstance(user, stops):
            continue
        if user.operation.block != block:
            keys.append(op_around(user, block))
        elif is_meshless(user):
            keys.append(user)
        elif isinstance(user, ir.Call):
            keys.append((symbols[user.callee_name], "arg", use.operand_number))
        elif isinstance(user, ir.For):
            keys.append((user, "arg", use.operand_number))
        elif user.operation.name == "func.return":
            f = user.operation.parent.opview
            if not f.is_public:
                keys.append((f, "result", use.operand_number))
        elif not isinstance(user, (ir.Return, ir.Fragment, ir.Transfer)):
            keys.append(user)
    return keys


def source_key(value: ir.Value, symbols: dict[str, ir.Func]) -> Key | None:
    """The key of the source set of a value; None if it can be anywhere.

    Goes through calls and loops to the values that their bodies return.
    """
    op = ir.producer(value)
    while isinstance(op, (ir.Call, ir.For)):
        body = symbols[op.callee_name] if isinstance(op, ir.Call) else op
        value = body.terminator.operands[ir.result_index(value)]
        op = ir.producer(value)
    if op is None:
        return value.owner.owner.opview, "arg", ir.arg_index(value)
    return None if isinstance(op, ir.Assign) else op


def reduction_of(op: ir.Op | None) -> str | None:
    """The reduction of a binary op; None if it is none."""
    return None if op is None else _REDUCTIONS.get(op.operation.name)


def reduction_op(kind: str) -> str:
    """Name of the op that reduces two values."""
    return _OP_OF_REDUCTION[kind]


def concat_reduce(op: ir.Op) -> tuple[ir.Op, str] | None:
    """The reduce that undoes a concatenate along a dim of size 1, and its kind; None for other ops.

    Its start is neutral, as StableHLO and `lax.reduce` require.
    """
    if op.operation.name != "stablehlo.concatenate" or len({v.type for v in op.operands}) != 1:
        return None
    users = ir.users(op.results[0])
    if len(users) != 1 or users[0].operation.name != "stablehlo.reduce" or len(users[0].operands) != 2:
        return None
    reduce = users[0]
    dim = int(op.dimension.value)
    if list(reduce.dimensions) != [dim] or op.operands[0].type.shape[dim] != 1:
        return None
    kind = _kind_of_body(reduce.regions[0].blocks[0])
    return None if kind is None else (reduce, kind)


def _kind_of_body(block: ir.Block) -> str | None:
    """The reduction of a block of two arguments."""
    op = ir.producer(ir.InsertionPoint.at_block_terminator(block).ref_operation.operands[0])
    kind = reduction_of(op)
    arguments = list(block.arguments)
    if op is None or kind is None or len(arguments) != 2:
        return None
    return kind if list(op.operands) in (arguments, arguments[::-1]) else None


def has_tensor_result(op: ir.Op) -> bool:
    """Whether a result of it can be assigned to a mesh; tokens cannot."""
    return any(assigning.is_tensor(r.type) for r in op.results)
