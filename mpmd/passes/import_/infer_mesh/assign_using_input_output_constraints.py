"""mpmd-infer-mesh-assign-using-input-output-constraints."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.enforce_input_output_equisharding import fits
from mpmd.passes.import_.infer_mesh import flow, sets
from mpmd.passes.import_.infer_mesh.sets import MeshSet
from mpmd.support import diagnostics
from mpmd.support.assignment import Constraint


class InferMeshAssignUsingInputOutputConstraints(FunctionPass):
    """Assigns an argument and the result that is its next value to one mesh, before either is decided alone.

        main(a {use_set=m1, m2}): s = add a a {src_set=m2}; return s
        -->  constraints=0:0
        main(a@m2): u = unassign a by io_constraint_in; s = add u u; p = assign s to m2 by io_constraint_out

    A mesh where both are needed is best; then one where the argument is needed and the result can be.

    Requires: use and source sets.  Ensures: nothing if there is no such mesh; a transfer then joins the two
    (enforce-input-output-equisharding).  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        constraints: pairs `"i:o"` of an argument and the result that is its next value.
    """

    runs_on = "entry"
    constraints: tuple[Constraint, ...] = ()

    def rewrite_function(self, f: ir.Func) -> None:
        """Decides each pair."""
        symbols = ir.symbol_table(ir.module_of(f))
        for constraint in self.constraints:
            if not fits(f, constraint):
                continue
            mesh = _mesh_of_pair(f, constraint, symbols)
            if mesh is None:
                diagnostics.notice(
                    f"argument {constraint.input} and result {constraint.output} cannot be on one mesh "
                    "without a transfer",
                    f.location,
                )
            else:
                _assign_pair(f, constraint, mesh)
        ir.return_types_changed(f)


def _mesh_of_pair(f: ir.Func, constraint: Constraint, symbols: dict[str, ir.Func]) -> str | None:
    """The mesh for both; None if none fits."""
    arg, value = f.args[constraint.input], f.returned[constraint.output]
    if assigning.is_mesh_tensor(value.type):
        wanted: str = value.type.mesh
        if assigning.is_mesh_tensor(arg.type) and arg.type.mesh != wanted:
            diagnostics.error(
                f"argument {constraint.input} is assigned to {arg.type.mesh} and result {constraint.output} "
                f"to {wanted}, but they are to be on one mesh: change an assignment, or drop the constraint",
                f.location,
            )
            return None
        return wanted
    key = flow.source_key(value, symbols)
    possible = sets.src_set(key)
    needed = sets.use_set(ir.producer(value))
    if assigning.is_mesh_tensor(arg.type):
        of_input = MeshSet.of(arg.type.mesh)
    else:
        of_input = sets.use_set((f, "arg", constraint.input))
        if not of_input:
            return needed.best() or (possible.best() if possible is not None else None)
    return (needed & of_input).best() or (of_input if possible is None else of_input & possible).best()


def _assign_pair(f: ir.Func, constraint: Constraint, mesh: str) -> None:
    returned = f.returned
    value = returned[constraint.output]
    if not assigning.is_mesh_tensor(value.type):
        location = assigning.result_location(f, constraint.output)
        end = ir.at_end(f.body)
        returned[constraint.output] = assigning.assign(value, mesh, end, assigning.CONSTRAINT_OUT, location)
        f.returned = returned
    arg = f.args[constraint.input]
    if not assigning.is_mesh_tensor(arg.type):
        kind = ir.MeshTensor.get(mesh, arg.type)
        where = ir.at_start(f.body)
        assigning.assign_argument(f, constraint.input, kind, assigning.CONSTRAINT_IN, where)
