"""mpmd-infer-mesh-rewrite-using-analysis."""

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
    made = ir.rebuild(op, [v for v in operands if v is not None], signature.returned)
    results = list(made.results)
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
