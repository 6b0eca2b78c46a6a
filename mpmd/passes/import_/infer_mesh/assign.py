"""Meshes for leaves, arguments and results, and sums over meshes as one op."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import FunctionPass, ModulePass
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.mesh_checks import Limited
from mpmd.passes.import_.infer_mesh.mesh_sets import REDUCE, SRC_SET, USE_SET, MeshSet, Table
from mpmd.passes.import_.meshes import fits
from mpmd.passes.structure import mesh_order
from mpmd.support import diagnostics
from mpmd.support.option_texts import Constraint

_MADE_BY = "infer_mesh_wrap_resultless_ops"


class InferMeshAssignMeshFuncLeaves(ModulePass):
    """Gives a mesh to unused values: there are no uses to infer one from.

        main(a, b): s = add a a {src_set=m2}; t = mul a a; return s
        -->
        main(a, b@m1): s = add a a; t = mul a a
          p = assign t to m1 by inferred_unused; q = assign s to m2 by inferred_out; return q

    Leaves are results and unused arguments of functions, unused ops, ops without tensors as results (wrapped
    into a fragment; annotations into one on each mesh), and operands of broadcasts and reduces.  A mesh where
    the leaf can be is taken, if possible one where it is needed, else the first of the topology.

    Requires: use and source sets.  Ensures: every leaf has a mesh; use sets are cleared, as reductions have
    changed them.  Cost: linear.  Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        infer_transfers: a leaf that can be on no mesh is left to transfers, and no error.
        error_limit: how many errors are shown; -1 for all.
    """

    infer_transfers: bool = False
    error_limit: int = 5

    def rewrite(self, module: ir.Module) -> None:
        errors = Limited(self.error_limit)
        symbols = ir.symbol_table(module)
        functions = mesh_sets.mpmd_functions(module)
        calls = calls_by_callee(functions)
        for f in functions:
            leaves = _Leaves(f, symbols, errors, self.infer_transfers)
            if f.is_public:
                leaves.assign_entry()
            else:
                leaves.assign_body()
                leaves.assign_unused_args()
                leaves.assign_unused_results(calls.get(f.symbol, []))


class _Leaves:
    def __init__(self, f: ir.Func, symbols: dict[str, ir.Func], errors: Limited, force: bool) -> None:
        self._f = f
        self._symbols = symbols
        self._errors = errors
        self._force = force
        self._default = min(f.topology)

    def assign_entry(self) -> None:
        """Assigns unused arguments and all results of an entry function, then the leaves in its body."""
        f = self._f
        for arg in f.args:
            if assigning.is_tensor(arg.type) and ir.is_unused(arg):
                ir.set_type(arg, ir.MeshTensor.get(self._default, arg.type))
        returned = f.returned
        for i, value in enumerate(returned):
            if not assigning.is_mesh_tensor(value.type):
                returned[i] = self._assign_result(i, value)
        f.returned = returned
        self.assign_body()
        ir.return_types_changed(f)

    def _assign_result(self, index: int, value: ir.Value) -> ir.Value:
        f = self._f
        mesh = self._mesh_for(value, mesh_sets.use_set(ir.producer(value)))
        if mesh is None:
            if not self._force:
                self._errors.report(
                    f"Func output {index} has no mesh to be assigned to.\n"
                    "  The values it is computed from are on different meshes. Add an explicit transfer, or "
                    "set infer_transfers.",
                    f.terminator.location,
                )
            mesh = self._default
        location = assigning.result_location(f, index)
        return assigning.assign(value, mesh, ir.at_end(f.body), assigning.INFERRED_OUT, location)

    def _mesh_for(self, value: ir.Value, needed: MeshSet) -> str | None:
        """The best mesh where a value can be; None if there is none."""
        key = mesh_sets.source_key(value, self._symbols)
        possible = mesh_sets.src_set(key)
        if possible is None:
            return needed.best() or self._default
        return possible.best(needed.names)

    def assign_body(self) -> None:
        """Assigns the leaves in the body, and clears the use sets of everything else."""
        self._assign_block(self._f)
        mesh_sets.clear_entries(self._f, "arg_attrs", USE_SET)

    def _assign_block(self, body: ir.Func | ir.For) -> None:
        for op in ir.ops(body):
            if isinstance(op, ir.For):
                self._assign_block(op)
            elif mesh_sets.is_barrier(op):
                self._assign_operands(op)
                mesh_sets.clear(op, USE_SET)
            elif not mesh_sets.is_meshless(op):
                continue
            elif not mesh_sets.has_tensor_result(op):
                self._wrap_resultless(op)
            else:
                if ir.is_unused(op):
                    self._assign_unused(op)
                mesh_sets.clear(op, USE_SET)

    def _assign_operands(self, op: ir.Op) -> None:
        """Operands of a broadcast or reduce are assigned; preferably to where its result is needed."""
        reason = assigning.BROADCAST if isinstance(op, ir.Broadcast) else assigning.REDUCE
        needed = mesh_sets.use_set(op)
        for i, value in enumerate(list(op.operands)):
            mesh = self._mesh_for(value, needed) or needed.best() or self._default
            where = ir.before(op)
            there = assigning.assign(value, mesh, where, reason)
            ir.set_operand(op, i, assigning.unassign(there, where))

    def _assign_unused(self, op: ir.Op) -> None:
        possible = mesh_sets.src_set(op)
        mesh = self._default if possible is None else possible.best()
        if mesh is None:
            if not self._force:
                self._errors.report(
                    "src_set must not be empty for this op. Its operands are on different meshes, and "
                    "nothing uses it: remove it, add an explicit transfer, or set infer_transfers.",
                    op.location,
                )
                return
            mesh = self._default
        where = ir.after(op)
        for result in op.results:
            if assigning.is_tensor(result.type):
                assigning.assign(result, mesh, where, assigning.INFERRED_UNUSED, op.location)

    def _wrap_resultless(self, op: ir.Op) -> None:
        possible = mesh_sets.src_set(op)
        meshes = [self._default] if possible is None else mesh_order(possible.names)
        if not meshes and self._force:
            meshes = [self._default]
        if not meshes:
            self._errors.report(
                f"src_set must not be empty for resultless ops. The operands of this {op.operation.name} "
                "are on different meshes. Add an explicit transfer.",
                op.location,
            )
            return
        mesh_sets.clear(op, USE_SET, SRC_SET, REDUCE)
        once = ir.is_side_effect_free(op) or not ir.is_duplicable(op)
        for mesh in meshes[:1] if once else meshes:
            assigning.wrap(op, mesh, _MADE_BY)
        ir.erase(op)

    def assign_unused_args(self) -> None:
        f, needs = self._f, Table(USE_SET)
        for i, arg in enumerate(f.args):
            if assigning.is_tensor(arg.type) and ir.is_unused(arg):
                possible = mesh_sets.src_set((f, "arg", i))
                mesh = self._checked(possible, f"unused input {i}", arg.location)
                entry = MeshSet.of(mesh, assigning.INFERRED_UNUSED_CALLEE_IN)
                needs.cell((f, "arg", i)).put(entry)
        needs.write()

    def assign_unused_results(self, calls: list[ir.Call]) -> None:
        f, needs = self._f, Table(USE_SET)
        for i, value in enumerate(f.returned):
            if not calls or any(not ir.is_unused(call.results[i]) for call in calls):
                continue
            if assigning.is_mesh_tensor(value.type):
                continue
            key = mesh_sets.source_key(value, self._symbols)
            possible = mesh_sets.src_set(key)
            mesh = self._checked(possible, f"unused output {i}", f.terminator.location)
            entry = MeshSet.of(mesh, assigning.INFERRED_UNUSED_CALLEE_OUT)
            needs.cell((f, "result", i)).put(entry)
        needs.write()

    def _checked(self, possible: MeshSet | None, what: str, location: ir.Location) -> str:
        mesh = self._default if possible is None else possible.best()
        if mesh is None and not self._force:
            self._errors.report(
                f"Callee @{self._f.symbol} {what} has no mesh to be assigned to.\n"
                "  Its calls give it values on different meshes. Add an explicit transfer, or set "
                "infer_transfers.",
                location,
            )
        return mesh or self._default


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
    key = mesh_sets.source_key(value, symbols)
    possible = mesh_sets.src_set(key)
    needed = mesh_sets.use_set(ir.producer(value))
    if assigning.is_mesh_tensor(arg.type):
        of_input = MeshSet.of(arg.type.mesh)
    else:
        of_input = mesh_sets.use_set((f, "arg", constraint.input))
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


class InferMeshConvertReduceOps(FunctionPass):
    """Turns marked reductions of values from several meshes into `mpmd.reduce`, which may cross meshes.

        s = add a b {reduce=add}; t = add s c {reduce=add}; r = reduce<none> t
        -->  t = reduce<add> a, b, c; r = reduce<none> t

    Only those that the user tagged with a reduce, through ops with one operand; or, with the option, all
    that are marked.  Reductions of one kind that feed each other become one.

    Requires: source sets.  Ensures: no marked op left that may be converted.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        infer_cross_mesh_reductions: convert all that are marked, tagged or not.
    """

    runs_on = "any"
    infer_cross_mesh_reductions: bool = False

    def rewrite_function(self, f: ir.Func) -> None:
        """Finds the user's tags, then converts in program order."""
        if f.is_external:
            return
        tagged = _tagged(f)
        for body in [f, *ir.ops(f, ir.For)]:
            for op in ir.ops(body):
                if mesh_sets.is_meshless(op) and REDUCE in op.attributes:
                    if self.infer_cross_mesh_reductions or op in tagged:
                        _convert(op)


def _tagged(f: ir.Func) -> set[ir.Op]:
    """The reductions whose result the user passed to a reduce, and those that feed them."""
    tagged: set[ir.Op] = set()
    for tag in ir.walk(f, ir.Reduce):
        op = ir.producer(tag.operands[0]) if tag.kind == "none" else None
        while op is not None and len(op.operands) == 1 and len(op.results) == 1:
            op = ir.producer(op.operands[0])
        if op is None:
            continue
        kind = mesh_sets.reduction_of(op)
        if kind is not None:
            tagged |= _same_kind_above(op, kind)
        elif op.operation.name == "stablehlo.reduce":
            concat = ir.producer(op.operands[0])
            if concat is not None and mesh_sets.concat_reduce(concat) is not None:
                tagged.add(op)
    return tagged


def _same_kind_above(op: ir.Op, kind: str) -> set[ir.Op]:
    adds: set[ir.Op] = set()
    todo: list[ir.Op | None] = [op]
    while todo:
        above = todo.pop()
        if above is not None and above not in adds and mesh_sets.reduction_of(above) == kind:
            adds.add(above)
            todo += [ir.producer(v) for v in above.operands]
    return adds


def _convert(op: ir.Op) -> None:
    if op.operation.name == "stablehlo.concatenate":
        return  # removed with the reduce that reads it
    if op.operation.name == "stablehlo.reduce":
        _convert_concat_reduce(op)
        return
    operands: list[ir.Value] = []
    absorbed = []
    for value in op.operands:
        source = ir.producer(value)
        if isinstance(source, ir.Reduce) and source.reduction == op.attributes[REDUCE]:
            operands += source.operands
            if len(ir.users(source)) == 1:
                absorbed.append(source)
        else:
            operands.append(value)
    _replace_by_reduce(op, operands)
    for source in absorbed:
        ir.erase(source)


def _convert_concat_reduce(op: ir.Op) -> None:
    """Reduces the pieces of a concatenate instead, without the dim that was joined."""
    concat = ir.producer(op.operands[0])
    if concat is None or concat.operation.name != "stablehlo.concatenate":
        return
    pieces = []
    for value in concat.operands:
        piece = ir.create(
            "stablehlo.reshape", [value], [op.results[0].type], ir.before(op), location=value.location
        )
        source = ir.producer(value)
        for name, attribute in source.attributes.items() if source is not None else ():
            if "." in name:  # attributes of the analysis, not of the op
                ir.put(piece, name, attribute)
        pieces.append(piece.results[0])
    _replace_by_reduce(op, pieces)
    ir.erase(concat)


def _replace_by_reduce(op: ir.Op, operands: list[ir.Value]) -> None:
    attributes = {"reduction": op.attributes[REDUCE]}
    if SRC_SET in op.attributes:
        attributes[SRC_SET] = op.attributes[SRC_SET]
    kinds = [op.results[0].type]
    reduce = ir.create("mpmd.reduce", operands, kinds, ir.before(op), attributes, op.location)
    ir.replace(op, [reduce.result])
