"""The analysis becomes the program: every op and value without a name gets the mesh that was chosen for it.

The attributes of the analysis are gone afterwards, and values that it could not place are reported.
"""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.absorb import Absorber, OnMeshes, RoundGroups
from mpmd.passes.import_.infer_mesh.mesh_sets import LoopAssignment
from mpmd.passes.merge.merge_inferred import has_microbatches
from mpmd.passes.structure import mesh_order
from mpmd.support import diagnostics

COPIES = "mpmd.copies"


class InferMeshRewriteUsingAnalysis(ModulePass):
    """Puts every op into a fragment, and every value that calls pass on onto meshes.

        s = mul a c; p = assign s to m1; f = m1["f"] (p) { x = neg p; ret x }
        -->  q = assign a to m1; r = assign c to m1; f = m1["f"] (q, r) { s = mul q r; x = neg s; ret x }

    An op whose only user is a fragment is inlined there; one that few fragments use (`max-clones`), or that
    is trivial, is cloned into each; any other gets an inferred fragment per mesh.  Arguments and results of
    callees that are needed on several meshes are duplicated, which `mpmd.copies` records.

    With `by-round`, pure ops around the microbatches of an entry function that no fragment reads move
    into one fragment per mesh and round, as `mpmd-merge-inferred-by-round` would merge them later.

    Requires: use sets, and a use of every op.  Ensures: no meshless op; values pass between fragments through
    assigns and unassigns, or directly on one mesh.  Cost: linear, but for clones.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        max_clones: maximum number of fragments to which an op without a name may be copied.
        by_round: group the ops around microbatches by mesh and round.
    """

    max_clones: int = 1
    by_round: bool = False

    def rewrite(self, module: ir.Module) -> None:
        """Rewrites callees, then entry functions, whose calls follow the new signatures."""
        functions = mesh_sets.mpmd_functions(module)
        symbols = ir.symbol_table(module)
        if _calls_strangers(functions, symbols):
            return
        bodies = _Bodies(symbols, self.max_clones)
        for f in functions:
            if not f.is_public:
                _assign_results(f, symbols)
                bodies.rewrite(f)
                _assign_args(f)
        for f in functions:
            if f.is_public:
                grouped = self.by_round and has_microbatches(f) and not ir.ops(f, ir.For)
                (bodies.rewrite_by_round if grouped else bodies.rewrite)(f)
        for f in functions:
            ir.return_types_changed(f)


def _calls_strangers(functions: list[ir.Func], symbols: dict[str, ir.Func]) -> bool:
    """Reports calls of functions without a topology; whether there are any."""
    strangers = {
        name: calls for name, calls in calls_by_callee(functions).items() if symbols[name] not in functions
    }
    for name, calls in strangers.items():
        diagnostics.error(
            f"@{name} is called by an MPMD function, but has no topology of its own: "
            "mpmd-copy-topology-from-main gives it one",
            calls[0].location,
        )
    return bool(strangers)


class _Bodies:
    """Rewrites blocks of functions and loops, last op first."""

    def __init__(self, symbols: dict[str, ir.Func], max_clones: int) -> None:
        self._symbols = symbols
        self._max_clones = max_clones
        self._signatures: dict[str, _Signature] = {}

    def rewrite_by_round(self, f: ir.Func) -> None:
        """Groups the ops around the microbatches of an entry function, then assigns the others."""
        absorber = Absorber(self._max_clones)
        groups = RoundGroups(f, absorber, self._kinds)
        groups.place()
        self.rewrite(f, absorber, groups.there)
        groups.finish()

    def rewrite(
        self, body: ir.Func | ir.For, absorber: Absorber | None = None, there: OnMeshes | None = None
    ) -> None:
        """Assigns the ops of a block to fragments; `there` has values that are on meshes already."""
        absorber = absorber or Absorber(self._max_clones)
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.Call):
                _rewrite_call(op, self._signature(op.callee_name), absorber, there or {})
            elif isinstance(op, ir.For):
                loop = LoopAssignment(op, self._symbols)
                loop.assign_returned()
                self.rewrite(op)
                loop.assign_all()
            elif mesh_sets.is_meshless(op):
                absorber.place(op)
        absorber.finish()

    def _kinds(self, call: ir.Call) -> tuple[list[list[ir.Type]], list[list[ir.Type]]]:
        """The types on meshes of which a call takes each operand, and returns each result."""
        signature = self._signature(call.callee_name)
        return (
            [[signature.kinds[k] for k in signature.args(i)] for i in range(len(call.operands))],
            [[signature.returned[k] for k in signature.results(i)] for i in range(len(call.results))],
        )

    def _signature(self, name: str) -> _Signature:
        if name not in self._signatures:
            self._signatures[name] = _Signature(self._symbols[name])
        return self._signatures[name]


def _assign_results(f: ir.Func, symbols: dict[str, ir.Func]) -> None:
    """Assigns the results of a callee to each mesh that needs them; all but the first are new results."""
    returned = f.returned
    copies: dict[int, range] = {}
    for i, value in enumerate(list(returned)):
        if assigning.is_mesh_tensor(value.type):
            continue
        meshes = mesh_sets.use_set((f, "result", i)).names
        if not meshes:
            possible = mesh_sets.src_set(mesh_sets.source_key(value, symbols))
            meshes = [(possible.best() if possible else None) or min(f.topology)]
        values = [assigning.assign(value, mesh, ir.at_end(f.body)) for mesh in meshes]
        if len(values) > 1:
            copies[i] = range(len(returned), len(returned) + len(values) - 1)
        returned[i] = values[0]
        returned += values[1:]
    f.returned = returned
    _note_copies(f, "res_attrs", len(returned), copies)


def _assign_args(f: ir.Func) -> None:
    """Puts a callee's arguments on the meshes where its body needs them; further ones are new arguments."""
    copies: dict[int, range] = {}
    where = ir.at_start(f.body)
    for i, arg in enumerate(f.args):
        if assigning.is_mesh_tensor(arg.type):
            continue
        needed: dict[str, list[ir.Assign]] = {}
        for user in ir.users(arg):
            needed.setdefault(user.result.type.mesh, []).append(user)
        meshes = mesh_order(needed) or mesh_sets.use_set((f, "arg", i)).names[:1] or [min(f.topology)]
        tensor = arg.type
        for number, mesh in enumerate(meshes):
            kind = ir.MeshTensor.get(mesh, tensor)
            there = arg if number == 0 else ir.append_arg(f.body, like=arg, kind=kind)
            if number == 0:
                ir.set_type(arg, kind)
            if mesh in needed:
                plain = assigning.unassign(there, where)
                for user in needed[mesh]:
                    ir.set_operand(user, 0, plain)
        if len(meshes) > 1:
            copies[i] = range(len(f.args) - len(meshes) + 1, len(f.args))
    _note_copies(f, "arg_attrs", len(f.args), copies)


def _note_copies(f: ir.Func, which: str, count: int, copies: dict[int, range]) -> None:
    """Records, at each duplicated argument or result, the positions of the others."""
    dicts = ir.attribute_dicts(f, which, 0)
    if not dicts and not copies:
        return
    dicts += [{} for _ in range(count - len(dicts))]
    for i, positions in copies.items():
        numbers = ", ".join(str(p) for p in positions)
        dicts[i][COPIES] = ir.Attribute.parse(f"array<i64: {numbers}>")
    ir.put_attribute_dicts(f, which, dicts)


class _Signature:
    """The signature of a rewritten callee."""

    def __init__(self, f: ir.Func) -> None:
        self.kinds = [arg.type for arg in f.args]
        self.returned = [value.type for value in f.returned]
        self._arg_copies = _copies(f, "arg_attrs", len(self.kinds))
        self._result_copies = _copies(f, "res_attrs", len(self.returned))

    def args(self, index: int) -> list[int]:
        return [index, *self._arg_copies[index]]

    def results(self, index: int) -> list[int]:
        return [index, *self._result_copies[index]]


def _copies(f: ir.Func, which: str, count: int) -> list[list[int]]:
    return [
        [int(i) for i in ir.DenseI64ArrayAttr(entries[COPIES])] if COPIES in entries else []
        for entries in ir.attribute_dicts(f, which, count)
    ]


def _rewrite_call(op: ir.Call, signature: _Signature, absorber: Absorber, there: OnMeshes) -> None:
    """Calls with operands on the meshes of the callee's arguments; results likewise."""
    where = ir.before(op)
    operands: list[ir.Value | None] = [None] * len(signature.kinds)
    for i, value in enumerate(op.operands):
        if assigning.is_mesh_tensor(value.type):
            operands[i] = value
            continue
        for k in signature.args(i):
            kind = signature.kinds[k]
            known = there.get((value, kind.mesh))
            if known is not None and known.type != kind:
                value, known = assigning.unassign(known, where), None
            operands[k] = known or assigning.assign(value, kind, where)
    rebuilt = ir.rebuild(op, [v for v in operands if v is not None], signature.returned)
    results = list(rebuilt.results)
    for i, old in enumerate(op.results):
        if assigning.is_mesh_tensor(old.type):
            ir.replace_uses(old, results[i])
            continue
        by_mesh = {results[k].type.mesh: results[k] for k in reversed(signature.results(i))}
        plain: dict[ir.Value, ir.Value] = {}
        for user in absorber.assigns(old):
            # Where callees feed each other through other ops, a mesh may be missing: that is a transfer.
            on_mesh = by_mesh.get(user.result.type.mesh, results[i])
            if on_mesh not in plain:
                plain[on_mesh] = assigning.unassign(on_mesh, where)
            ir.set_operand(user, 0, plain[on_mesh])
    absorber.retire(op)


_MADE_BY = "infer_mesh_convert_reduce_ops"
_LEFT = (ir.Assign, ir.Unassign, ir.Broadcast)


class InferMeshFinalize(ModulePass):
    """Turns remaining assigns and unassigns into transfers, and checks that every value has a mesh.

        main(a): p = assign a to m1; q = assign a to m2; ..
        -->  main(a@m1): q = transfer a to m2; ..

    Arguments of the program, and values that the user broadcasts, are transferred to where they are needed,
    from mesh to mesh; other values only with `infer-transfers`.  On its own mesh a value is transferred only
    to the memory that the user gave a tensor: there it has another type.  A reduce is done on each mesh, then
    once more on each mesh that needs it.

    Requires: no meshless ops.  Ensures: no assign, unassign, broadcast or reduce; no sets.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_assignment`.

    Attributes:
        infer_transfers: insert transfers for all values, instead of failing.
    """

    infer_transfers: bool = False

    def rewrite(self, module: ir.Module) -> None:
        functions = mesh_sets.mpmd_functions(module)
        fits = [_assign_arguments(f) for f in functions if f.is_public]
        if not all(fits):
            return
        for f in functions:
            assigning.remove_dead_ops(f)
            while self._rewrite_block(f, f.is_public):
                assigning.remove_dead_ops(f, in_fragments=False)
            ir.return_types_changed(f)
            _check_and_clear(f)

    def _rewrite_block(self, body: ir.Func | ir.For, is_entry: bool) -> bool:
        """One round over a block, last op first; whether it changed.  Replaced ops are left unused."""
        changed = False
        for op in reversed(ir.ops(body)):
            if isinstance(op, ir.For):
                changed |= self._rewrite_block(op, is_entry)
            elif isinstance(op, ir.Assign) and not ir.is_unused(op):
                changed |= self._rewrite_assign(op, is_entry)
            elif isinstance(op, ir.Broadcast):
                changed |= _rewrite_broadcast(op)
            elif isinstance(op, ir.Reduce):
                changed |= _rewrite_reduce(op)
        return changed

    def _rewrite_assign(self, op: ir.Assign, is_entry: bool) -> bool:
        """Replaces an assign of an unassign by a transfer, or by the value; whether that is allowed."""
        source = ir.producer(op.tensor)
        if not isinstance(source, ir.Unassign):
            return False
        value, kind = source.tensor, op.result.type
        of_argument = is_entry and ir.producer(value) is None
        if assigning.use_known(op, value):
            return True
        if not isinstance(op.operation.parent.opview, ir.Func):  # transfers cannot be in loops
            return False
        if value.type.mesh == kind.mesh:
            ir.replace_uses(op.result, ir.make_transfer(value, kind, ir.before(op), op.location).result)
        elif of_argument or self.infer_transfers:
            assigning.chain_transfers(value, assigning.cross_mesh_assigns(source))
        else:
            return False
        return True


def _assign_arguments(f: ir.Func) -> bool:
    """Puts arguments of an entry function on the first mesh that needs them; False after an error."""
    where = ir.at_start(f.body)
    for i, arg in enumerate(f.args):
        if not assigning.is_tensor(arg.type):
            continue
        users = [user for user in ir.users(arg) if isinstance(user, ir.Assign)]
        kinds = {user.result.type.memory_kind: None for user in users}
        if len(kinds) > 1:
            diagnostics.error(_memory_message(f, i, list(kinds)), f.location)
            return False
        if users:
            mesh = min(user.result.type.mesh for user in users)
            kind = ir.MeshTensor.get(mesh, arg.type, memory_kind=next(iter(kinds)))
            assigning.assign_argument(f, i, kind, None, where)
    return True


def _memory_message(f: ir.Func, index: int, kinds: list[str | None]) -> str:
    text = f"Argument {index} has different memory kinds assigned to it."
    if None in kinds:
        text += (
            " Found at least one user with undefined memory kind and at least one user with a memory kind."
        )
    named = ", ".join(sorted(k for k in kinds if k is not None))
    advice = "Name it once, outside, with the memory kind that all users want."
    name = ir.name_of(f.args[index].location) or f"argument {index}"
    return f"{text}\n  {name}: {named}\n  {advice}"


def _rewrite_broadcast(op: ir.Broadcast) -> bool:
    source = ir.producer(op.operands[0])
    assigns = assigning.used_assigns(op.result)
    if not isinstance(source, ir.Unassign) or not assigns:
        return False
    assigning.chain_transfers(source.tensor, assigns)
    return True


def _rewrite_reduce(op: ir.Reduce) -> bool:
    """Reduces on each mesh, then, on each mesh that needs it, the results of the others."""
    users: dict[str, list[ir.Assign]] = {}
    for user in assigning.used_assigns(op.result):
        users.setdefault(user.result.type.mesh, []).append(user)
    if not users:
        return False
    by_mesh: dict[str, list[ir.Value]] = {}
    for value in op.operands:
        source = ir.producer(value)
        if not isinstance(source, ir.Unassign):
            return False
        by_mesh.setdefault(source.tensor.type.mesh, []).append(source.tensor)
    where = ir.after(op)
    partial = [
        values[0] if len(values) == 1 else _reduced(values, mesh, op.kind, where)
        for mesh, values in ((mesh, by_mesh[mesh]) for mesh in mesh_order(by_mesh))
    ]
    for mesh in mesh_order(users):
        kind = users[mesh][0].result.type
        sent = [v if v.type == kind else ir.make_transfer(v, kind, where).result for v in partial]
        total = _reduced(sent, mesh, op.kind, where)
        for user in users[mesh]:
            ir.replace_uses(user.result, total)
    return True


def _reduced(values: list[ir.Value], mesh: str, kind: str, where: ir.InsertionPoint) -> ir.Value:
    """A fragment that reduces values of one mesh, from the left."""

    def body(args: list[ir.Value], inside: ir.InsertionPoint) -> list[ir.Value]:
        total = args[0]
        for arg in args[1:]:
            name = mesh_sets.reduction_op(kind)
            total = ir.create(name, [total, arg], [arg.type], inside, location=arg.location).results[0]
        return [total]

    location = values[0].location
    fragment = ir.make_fragment(
        mesh, values, [values[0].type], where, body, inferred_by=[_MADE_BY], location=location
    )
    return fragment.results[0]


def _check_and_clear(f: ir.Func) -> None:
    """Reports all values without a mesh; removes the attributes of inference."""
    for which in ("arg_attrs", "res_attrs"):
        mesh_sets.clear_entries(f, which, mesh_sets.USE_SET, mesh_sets.SRC_SET, COPIES)
    sides = (("input", f.args), ("output", f.returned))
    for what, values in sides:
        for i, value in enumerate(values):
            if not assigning.is_mesh_tensor(value.type):
                diagnostics.error(
                    f"function {what} {i} is not a MeshTensorType, but a {value.type}", f.location
                )
    for op in ir.walk(f):
        mesh_sets.clear(op, mesh_sets.USE_SET, mesh_sets.SRC_SET)
    for body in [f, *ir.ops(f, ir.For)]:
        for op in ir.ops(body):
            if isinstance(op, ir.For):
                mesh_sets.clear_entries(op, "arg_attrs", mesh_sets.USE_SET, mesh_sets.SRC_SET)
            elif isinstance(op, _LEFT):
                diagnostics.error(
                    "assigns, unassigns or broadcasts are not allowed after mesh inference.\n"
                    "  A value is needed on a mesh where it is not. Add an explicit transfer, or set "
                    "infer_transfers.",
                    op.location,
                )
            elif mesh_sets.is_meshless(op):
                diagnostics.error(
                    f"no more meshless ops are expected at this point.\n  There is a {op.operation.name}.\n"
                    f"Named computations inside of lax.scan, cond or while cannot be mapped: name the code "
                    "around them.",
                    op.location,
                )
