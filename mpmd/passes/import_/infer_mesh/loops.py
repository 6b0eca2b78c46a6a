"""Loops in mesh inference: a loop-carried value must be on one mesh."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import sets
from mpmd.passes.import_.infer_mesh.sets import MeshSet
from mpmd.support import diagnostics


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
        """Assigns the values that the body returns."""
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
