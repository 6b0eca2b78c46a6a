"""mpmd-infer-mesh-validate-src-set-not-empty."""

from __future__ import annotations

from mpmd import ir
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_.infer_mesh import explain, flow, sets
from mpmd.passes.import_.infer_mesh.errors import Limited
from mpmd.passes.import_.infer_mesh.explain import Explainer, braces
from mpmd.passes.import_.infer_mesh.sets import REDUCE, MeshSet


class InferMeshValidateSrcSetNotEmpty(ModulePass):
    """Reports ops whose operands cannot be on one mesh, and reductions that may not cross meshes.

        s = sub u v {src_set={}}
        -->  error: Mesh assignment is not possible for op as its operands are ..

    Only the first op of a chain is reported: the others fail because of it.

    Requires: source sets.  Ensures: nothing changes.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_validation`.

    Attributes:
        error_limit: how many errors are shown; -1 for all.
    """

    error_limit: int = 5

    def rewrite(self, module: ir.Module) -> None:
        """Checks ops, then arguments of callees."""
        functions = flow.mpmd_functions(module)
        check = _SourceCheck(functions, ir.symbol_table(module), Limited(self.error_limit))
        for f in functions:
            for body in [f, *ir.ops(f, ir.For)]:
                for op in ir.ops(body):
                    if flow.is_meshless(op):
                        check.op(op)
            for i in range(len(f.args)):
                check.argument(f, i)


class _SourceCheck:
    def __init__(self, functions: list[ir.Func], symbols: dict[str, ir.Func], errors: Limited) -> None:
        self._symbols = symbols
        self._errors = errors
        self._explain = Explainer(functions, symbols)

    def op(self, op: ir.Op) -> None:
        """Reports an op without a possible mesh, or a reduction that may not cross meshes."""
        possible = sets.src_set(op)
        is_reduction = REDUCE in op.attributes
        if possible is None or (possible and not is_reduction) or self._errors.reached:
            return
        if not possible and any(self._is_nowhere(v) for v in op.operands):
            return
        if is_reduction and any((p := ir.producer(v)) and REDUCE in p.attributes for v in op.operands):
            return
        blocks = [("The op:", [explain.op_line(op)])]
        for i, value in enumerate(op.operands):
            found = self._src_set(value)
            can = "any mesh" if found is None else braces(found.names)
            blocks.append((f"Operand {i} can be on {can}, from", self._explain.origins([value])))
        needed = sets.use_set(op)
        where = f"The result is needed on {braces(needed.names)}, by" if needed else "The result is used by"
        blocks.append((where, self._explain.uses(op.results)))
        first = "Mesh assignment is not possible for op as its operands are on conflicting meshes."
        advice = explain.REDUCTION if is_reduction else explain.TRANSFER
        self._errors.report(explain.page(first, blocks, op.location, advice), op.location)

    def argument(self, f: ir.Func, index: int) -> None:
        """Reports an argument of a callee whose calls pass values that cannot be on one mesh."""
        possible = sets.src_set((f, "arg", index))
        if possible is None or possible or self._errors.reached:
            return
        given = [call.operands[index] for call in self._explain.calls(f)]
        if any(self._is_nowhere(value) for value in given):
            return
        first = (
            f"Mesh assignment is not possible for arg{index} of {explain.callee(f)} as its caller "
            "operands are on conflicting meshes."
        )
        needed = sets.use_set((f, "arg", index))
        where = f"It is needed on {braces(needed.names)}, by" if needed else "It is used by"
        blocks = [
            (f"{len(given)} calls give it values from", self._explain.origins(given)),
            (where, self._explain.uses([f.args[index]])),
        ]
        self._errors.report(explain.page(first, blocks, f.location, explain.TRANSFER), f.location)

    def _src_set(self, value: ir.Value) -> MeshSet | None:
        return sets.src_set(flow.source_key(value, self._symbols))

    def _is_nowhere(self, value: ir.Value) -> bool:
        found = self._src_set(value)
        return found is not None and not found
