"""Passes that check what mesh inference found, and explain it."""

from __future__ import annotations

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.passes.bases import ModulePass
from mpmd.passes.import_.infer_mesh import explain, flow, sets
from mpmd.passes.import_.infer_mesh.explain import Explainer, braces
from mpmd.passes.import_.infer_mesh.sets import REDUCE, MeshSet
from mpmd.support import diagnostics


class InferMeshValidateNoAdditionalTransfersNeeded(ModulePass):
    """Reports ops that are needed on a mesh where they cannot be.

        s = add u u {src_set=m2, use_set=m1}
        -->  error: .. it is used in {m1} but it can only be placed on {m2}

    Only the last op of a chain is reported.  In a chain of calls of one function, a value passed to the next
    must be needed on the same meshes.

    Requires: use and source sets, leaves assigned.  Ensures: nothing changes.  Cost: linear.
    Source: openxla/shardy MPMD, `infer_mesh_validation`.

    Attributes:
        error_limit: how many errors are shown; -1 for all.
    """

    error_limit: int = 5

    def rewrite(self, module: ir.Module) -> None:
        """Checks callees, then entry functions, last op first."""
        functions = flow.mpmd_functions(module)
        check = _TransferCheck(functions, ir.symbol_table(module), Limited(self.error_limit))
        for f in sorted(functions, key=lambda f: f.is_public):
            check.function(f)


class _TransferCheck:
    def __init__(self, functions: list[ir.Func], symbols: dict[str, ir.Func], errors: Limited) -> None:
        self._symbols = symbols
        self._errors = errors
        self._explain = Explainer(functions, symbols)
        self._failed: set[sets.Key] = set()
        self._links: set[tuple[ir.Func, int, int]] = set()

    def function(self, f: ir.Func) -> None:
        """Checks the ops, last first, then the arguments."""
        for body in [*ir.ops(f, ir.For), f]:
            for op in reversed(ir.ops(body)):
                if flow.is_meshless(op) or isinstance(op, ir.Assign):
                    self._op(op)
                elif isinstance(op, ir.Call):
                    self._chain(op)
        for i in range(len(f.args)):
            self._argument(f, i)

    def _op(self, op: ir.Op) -> None:
        possible, needed = sets.src_set(op), sets.use_set(op)
        if possible is None or possible.covers(needed.names):
            return
        source = ir.producer(op.operands[0]) if isinstance(op, ir.Assign) else None
        if source is not None and flow.is_meshless(source):
            return  # that op is reported
        self._failed.add(op)
        if any(self._has_failed(use.owner, use.operand_number) for r in op.results for use in r.uses):
            return
        needing = self._explain.uses(op.operands[:1] if isinstance(op, ir.Assign) else op.results)
        blocks = [
            ("The op:", [explain.op_line(op)]),
            (f"It can be on {braces(possible.names)}, from", self._explain.origins(op.operands)),
            (f"It is needed on {braces(needed.names)}, by", needing),
        ]
        first = f"Mesh assignment is not possible for op as it {_reason(possible, needed)}."
        self._errors.report(explain.page(first, blocks, op.location, explain.TRANSFER), op.location)

    def _has_failed(self, user: ir.Op, index: int) -> bool:
        if isinstance(user, ir.Call):
            return (self._symbols[user.callee_name], "arg", index) in self._failed
        return user in self._failed

    def _argument(self, f: ir.Func, index: int) -> None:
        key = (f, "arg", index)
        possible, needed = sets.src_set(key), sets.use_set(key)
        if possible is None or possible.covers(needed.names):
            return
        self._failed.add(key)
        arg = f.args[index]
        if any(self._has_failed(use.owner, use.operand_number) for use in arg.uses):
            return
        given = [call.operands[index] for call in self._explain.calls(f) if index < len(call.operands)]
        blocks = [
            (f"It can be on {braces(possible.names)}, from", self._explain.origins(given)),
            (f"It is needed on {braces(needed.names)}, by", self._explain.uses([arg])),
        ]
        first = (
            f"Mesh assignment is not possible for arg{index} of {explain.callee(f)} "
            f"as it {_reason(possible, needed)}."
        )
        self._errors.report(explain.page(first, blocks, f.location, explain.TRANSFER), f.location)

    def _chain(self, call: ir.Call) -> None:
        """Results that a call passes to the next call of the same function must be needed on its meshes."""
        callee = self._symbols[call.callee_name]
        for k, result in enumerate(call.results):
            for use in result.uses:
                user, i = use.owner, use.operand_number
                if isinstance(user, ir.Call) and user.callee_name == call.callee_name:
                    self._link(callee, k, i)

    def _link(self, f: ir.Func, result: int, arg: int) -> None:
        """Reports that a result and the argument it is passed to are needed on different meshes; once."""
        returned, taken = sets.use_set((f, "result", result)), sets.use_set((f, "arg", arg))
        link = (f, result, arg)
        if set(returned.names) == set(taken.names) or link in self._links:
            return
        self._links.add(link)
        first = (
            f"Mesh assignment is not possible for {explain.callee(f)} as it passes result {result} to arg "
            f"{arg} but they have mismatching mesh assignments: res: {{{returned}}}, arg: {{{taken}}}."
        )
        results = [call.results[result] for call in self._explain.calls(f)]
        blocks = [
            (f"Result {result} is needed by", self._explain.uses(results)),
            (f"Argument {arg} is needed by", self._explain.uses([f.args[arg]])),
        ]
        self._errors.report(explain.page(first, blocks, f.location, explain.TRANSFER), f.location)


def _reason(possible: MeshSet, needed: MeshSet) -> str:
    where = braces(possible.names) if possible else "no mesh at all"
    return f"is used in {braces(needed.names)} but it can only be placed on {where}"


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


class Limited:
    """Reports errors until there are `limit` of them; -1: all."""

    def __init__(self, limit: int) -> None:
        if limit == 0 or limit < -1:
            raise ConfigError(f"error-limit={limit}: must be positive, or -1 for all errors")
        self._limit = limit
        self.count = 0

    @property
    def reached(self) -> bool:
        """Whether no more errors are reported."""
        return self.count == self._limit

    def report(self, message: str, location: ir.Location) -> None:
        """Reports an error, unless there were enough."""
        if not self.reached:
            self.count += 1
            diagnostics.error(message, location)
