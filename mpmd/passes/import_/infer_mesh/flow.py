"""How values flow through calls and loops, for mesh inference."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.fragments.moving import op_around
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import sets
from mpmd.passes.import_.infer_mesh.sets import Key, MeshSet
from mpmd.support import diagnostics

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
    op = ir.producer(ir.InsertionPoint.at_block_terminator(block).ref_operation.operands[0])
    kind = reduction_of(op)
    arguments = list(block.arguments)
    if op is None or kind is None or len(arguments) != 2:
        return None
    return kind if list(op.operands) in (arguments, arguments[::-1]) else None


def has_tensor_result(op: ir.Op) -> bool:
    """Whether a result of it can be assigned to a mesh; tokens cannot."""
    return any(assigning.is_tensor(r.type) for r in op.results)


class LoopAssignment:
    """Assigns meshes to the arguments, results and returned values of a loop.

    A value that is needed on several meshes is an error.  An index that the body does not read stays plain.
    """

    def __init__(self, op: ir.For, symbols: dict[str, ir.Func]) -> None:
        self._op = op
        needed = [sets.use_set((op, "arg", i)) for i in range(len(op.args))]
        for i, value in enumerate(op.returned):
            needed[i] |= _needed(value, symbols)
        self._meshes = [self._one_of(i, found) for i, found in enumerate(needed)]

    def _one_of(self, index: int, needed: MeshSet) -> str:
        if len(needed.meshes) > 1:
            diagnostics.error(
                f"a loop carries value {index}, which is needed on several meshes: {needed}\n"
                "  Unroll the loop, or transfer the value before it and use it on one mesh.",
                self._op.location,
            )
        return needed.names[0] if needed else self._default()

    def _default(self) -> str:
        parent = self._op.operation.parent.opview
        return min(parent.topology)

    def assign_returned(self) -> None:
        returned = self._op.returned
        for i, value in enumerate(returned):
            if not assigning.is_mesh_tensor(value.type):
                returned[i] = assigning.assign(value, self._meshes[i], ir.at_end(self._op.body))
        self._op.returned = returned

    def assign_all(self) -> None:
        """Assigns the arguments, and then the operands and results, to their meshes."""
        op, where = self._op, ir.at_start(self._op.body)
        for i, arg in enumerate(op.args):
            if assigning.is_mesh_tensor(arg.type):
                continue
            users = ir.users(arg)
            if not users and i >= len(op.operands):
                continue
            meshes = {user.result.type.mesh: None for user in users} or {self._meshes[i]: None}
            mesh = self._one_of(i, MeshSet(tuple((m, ()) for m in meshes)))
            ir.set_type(arg, ir.MeshTensor.get(mesh, arg.type))
            if users:
                plain = assigning.unassign(arg, where)
                for user in users:
                    ir.set_operand(user, 0, plain)
        self._rebuild([arg.type for arg in op.args])

    def _rebuild(self, kinds: list[ir.Type]) -> None:
        op = self._op
        where = ir.before(op)
        operands = [
            v if assigning.is_mesh_tensor(v.type) else assigning.assign(v, kind, where)
            for v, kind in zip(op.operands, kinds)
        ]
        sets.clear_entries(op, "arg_attrs", sets.USE_SET, sets.SRC_SET)
        made = ir.rebuild(op, operands, kinds[: len(op.results)])
        for old, new in zip(op.results, made.results):
            for user in ir.users(old):
                if isinstance(user, ir.Assign):
                    plain = assigning.unassign(new, where, location=user.location)
                    ir.set_operand(user, 0, plain)
            ir.replace_uses(old, new)
        ir.erase(op)


def _needed(value: ir.Value, symbols: dict[str, ir.Func]) -> MeshSet:
    """The use set of the values that a loop's body returns."""
    op = ir.producer(value)
    if isinstance(op, ir.Call):
        return sets.use_set((symbols[op.callee_name], "result", ir.result_index(value)))
    if op is None or assigning.is_mesh_tensor(value.type):
        return MeshSet()
    return sets.use_set(op)
