"""Checks of what mesh inference found, with pages in the user's words: where values come from and go to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from mpmd import ir
from mpmd.errors import ConfigError
from mpmd.passes.bases import ModulePass
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import mesh_sets
from mpmd.passes.import_.infer_mesh.mesh_sets import REDUCE, MeshSet
from mpmd.support import diagnostics
from mpmd.support.user_code import frames_of

_MAX_LINES = 8
_MAX_OP_TEXT = 200

TRANSFER = (
    "Add an explicit transfer: name the value with named_tensor and assign the name to the other mesh. "
    "Or set infer_transfers=True to insert transfers where they are needed."
)
REDUCTION = (
    "If it is a reduction across meshes, set infer_cross_mesh_reductions=True or mark it with mpmd.reduce; "
    "else add an explicit transfer."
)


class Explainer:
    """Traces values through a module to the origins of their meshes."""

    def __init__(self, functions: Sequence[ir.Func], symbols: dict[str, ir.Func]) -> None:
        self._symbols = symbols
        self._calls = calls_by_callee(functions)

    def calls(self, f: ir.Func) -> list[ir.Call]:
        return self._calls.get(f.symbol, [])

    def origins(self, values: Iterable[ir.Value]) -> list[str]:
        """One line per argument of the program, or assigned value, that values depend on; last first."""
        return self._lines(values, self._above)

    def uses(self, values: Iterable[ir.Value]) -> list[str]:
        """One line per result of the program, or assigned use, that values flow into."""
        return self._lines(values, self._below)

    def _lines(
        self, values: Iterable[ir.Value], step: Callable[[ir.Value], tuple[list[str], list[ir.Value]]]
    ) -> list[str]:
        lines: dict[str, None] = {}
        seen: set[ir.Value] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            if value in seen:
                continue
            seen.add(value)
            lines_here, more = step(value)
            lines.update(dict.fromkeys(lines_here))
            todo += more
        shown = list(lines)
        if len(shown) > _MAX_LINES:
            shown[_MAX_LINES:] = [f"… and {len(shown) - _MAX_LINES} more"]
        return shown

    def _above(self, value: ir.Value) -> tuple[list[str], list[ir.Value]]:
        """The line about a value, and the values to visit instead."""
        op = ir.producer(value)
        if op is None:
            owner = value.owner.owner.opview
            index = ir.arg_index(value)
            if not isinstance(owner, ir.Func):
                return [], [owner.operands[index]] if index < len(owner.operands) else []
            if owner.is_public:
                return [_input_line(owner, index)], []
            return [], [c.operands[index] for c in self.calls(owner) if index < len(c.operands)]
        if isinstance(op, ir.Unassign):
            return [_unassign_line(op)], []
        if isinstance(op, (ir.Call, ir.For)):
            body = self._symbols[op.callee_name] if isinstance(op, ir.Call) else op
            return [], [body.returned[ir.result_index(value)]]
        return [], [v for v in ir.read_by(op) if not assigning.is_mesh_tensor(v.type)]

    def _below(self, value: ir.Value) -> tuple[list[str], list[ir.Value]]:
        lines: list[str] = []
        more: list[ir.Value] = []
        for use in value.uses:
            user, index = use.owner, use.operand_number
            if isinstance(user, ir.Assign):
                lines.append(_assign_line(user))
            elif isinstance(user, ir.Call):
                more.append(self._symbols[user.callee_name].args[index])
            elif isinstance(user, ir.For):
                more.append(user.args[index])
            elif user.operation.name == "func.return":
                f = user.operation.parent.opview
                if f.is_public:
                    lines.append(_output_line(f, index))
                else:
                    more += [call.results[index] for call in self.calls(f)]
            elif isinstance(user, ir.Return):
                more += list(user.operation.parent.opview.results)[index : index + 1]
            else:
                more += user.results
        return lines, more


def _place(location: ir.Location) -> str:
    frames = frames_of(location)
    return f" ({frames[0].file}:{frames[0].line})" if frames else ""


def _input_line(f: ir.Func, index: int) -> str:
    name = ir.name_of(f.args[index].location) or f"#{index}"
    meshes = mesh_sets.src_set((f, "arg", index))
    return f'Input "{name}": {"any mesh" if meshes is None else meshes}'


def _output_line(f: ir.Func, index: int, by: ir.Assign | None = None, mesh: str = "any mesh") -> str:
    location = assigning.result_location(f, index)
    if location is None and by is not None:
        location = by.location
    name = (location and ir.name_of(location)) or f"#{index}"
    return f'Output "{name}": {mesh}'


def _unassign_line(op: ir.Unassign) -> str:
    reason, mesh = op.reason or "", op.tensor.type.mesh
    meshes = MeshSet.of(mesh, *([reason] if reason else [])) | (mesh_sets.src_set(op) or MeshSet())
    source = ir.producer(op.tensor)
    if source is None and reason in ("", assigning.USER_IN):
        f = op.tensor.owner.owner.opview
        index = ir.arg_index(op.tensor)
        name = ir.name_of(f.args[index].location) or ir.name_of(op.location) or f"#{index}"
        return f'Input "{name}": {meshes}'
    return f"{_named(reason, source)}: {meshes}{_place(op.location)}"


def _assign_line(op: ir.Assign) -> str:
    reason, mesh = op.reason or "", op.result.type.mesh
    meshes = MeshSet.of(mesh, *([reason] if reason else []))
    for use in op.result.uses:
        if use.owner.operation.name == "func.return":
            return _output_line(use.owner.operation.parent.opview, use.operand_number, op, str(meshes))
    user = next(iter(ir.users(op)), None)
    return f"{_named(reason, user)}: {meshes}{_place(op.location)}"


def _named(reason: str, beside: ir.Op | None) -> str:
    """`named_computation "f"` or `named_tensor "t"`: the user's name in an assign or unassign."""
    if isinstance(beside, ir.Fragment) and any(o.name == reason for o in beside.origins):
        return f'named_computation "{reason}"'
    if isinstance(beside, ir.Transfer):
        return f'transferred from "{reason}"' if reason else "transferred"
    return f'named_tensor "{reason}"' if reason else "unnamed"


def braces(meshes: Iterable[str]) -> str:
    """`{m1,m2}`."""
    return "{" + ",".join(meshes) + "}"


def page(first: str, blocks: Iterable[tuple[str, Iterable[str]]], location: ir.Location, advice: str) -> str:
    """An error page: the problem; blocks of a heading and lines; the user's stack; the advice."""
    lines = [first]
    for heading, inner in blocks:
        lines.append(f"  {heading}")
        lines += [f"    {line}" for line in inner]
    frames = frames_of(location)
    if frames:
        lines.append("  It was written here:")
        for frame in frames[:_MAX_LINES]:
            lines.append(f"    {frame}")
            if frame.source:
                lines.append(f"      {frame.source}")
    return "\n".join([*lines, f"  {advice}"])


def op_line(op: ir.Op) -> str:
    """An op as text, without the attributes of inference, shortened."""
    text = ir.op_text(op).partition("\n")[0]
    text = re.sub(r"(?:, )?mpmd\.(?:use_set|src_set|reduce) = #mpmd\.\w+<[^>]*>", "", text)
    text = re.sub(r"\s*\{,?\s*\}(?= :|$)", "", text).replace("{, ", "{")
    return text if len(text) <= _MAX_OP_TEXT else text[:_MAX_OP_TEXT] + " …"


def callee(f: ir.Func) -> str:
    """`mpmd.call "f"`, with the user's name of the function."""
    return f'mpmd.call "{f.symbol.removeprefix("shardy_mpmd")}"'


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
        functions = mesh_sets.mpmd_functions(module)
        check = _TransferCheck(functions, ir.symbol_table(module), Limited(self.error_limit))
        for f in sorted(functions, key=lambda f: f.is_public):
            check.function(f)


class _TransferCheck:
    def __init__(self, functions: list[ir.Func], symbols: dict[str, ir.Func], errors: Limited) -> None:
        self._symbols = symbols
        self._errors = errors
        self._explain = Explainer(functions, symbols)
        self._failed: set[mesh_sets.Key] = set()
        self._links: set[tuple[ir.Func, int, int]] = set()

    def function(self, f: ir.Func) -> None:
        """Checks the ops, last first, then the arguments."""
        for body in [*ir.ops(f, ir.For), f]:
            for op in reversed(ir.ops(body)):
                if mesh_sets.is_meshless(op) or isinstance(op, ir.Assign):
                    self._op(op)
                elif isinstance(op, ir.Call):
                    self._chain(op)
        for i in range(len(f.args)):
            self._argument(f, i)

    def _op(self, op: ir.Op) -> None:
        possible, needed = mesh_sets.src_set(op), mesh_sets.use_set(op)
        if possible is None or possible.covers(needed.names):
            return
        source = ir.producer(op.operands[0]) if isinstance(op, ir.Assign) else None
        if source is not None and mesh_sets.is_meshless(source):
            return  # that op is reported
        self._failed.add(op)
        if any(self._has_failed(use.owner, use.operand_number) for r in op.results for use in r.uses):
            return
        needing = self._explain.uses(op.operands[:1] if isinstance(op, ir.Assign) else op.results)
        blocks = [
            ("The op:", [op_line(op)]),
            (f"It can be on {braces(possible.names)}, from", self._explain.origins(op.operands)),
            (f"It is needed on {braces(needed.names)}, by", needing),
        ]
        first = f"Mesh assignment is not possible for op as it {_reason(possible, needed)}."
        self._errors.report(page(first, blocks, op.location, TRANSFER), op.location)

    def _has_failed(self, user: ir.Op, index: int) -> bool:
        if isinstance(user, ir.Call):
            return (self._symbols[user.callee_name], "arg", index) in self._failed
        return user in self._failed

    def _argument(self, f: ir.Func, index: int) -> None:
        key = (f, "arg", index)
        possible, needed = mesh_sets.src_set(key), mesh_sets.use_set(key)
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
            f"Mesh assignment is not possible for arg{index} of {callee(f)} "
            f"as it {_reason(possible, needed)}."
        )
        self._errors.report(page(first, blocks, f.location, TRANSFER), f.location)

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
        returned, taken = mesh_sets.use_set((f, "result", result)), mesh_sets.use_set((f, "arg", arg))
        link = (f, result, arg)
        if set(returned.names) == set(taken.names) or link in self._links:
            return
        self._links.add(link)
        first = (
            f"Mesh assignment is not possible for {callee(f)} as it passes result {result} to arg "
            f"{arg} but they have mismatching mesh assignments: res: {{{returned}}}, arg: {{{taken}}}."
        )
        results = [call.results[result] for call in self._explain.calls(f)]
        blocks = [
            (f"Result {result} is needed by", self._explain.uses(results)),
            (f"Argument {arg} is needed by", self._explain.uses([f.args[arg]])),
        ]
        self._errors.report(page(first, blocks, f.location, TRANSFER), f.location)


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
        functions = mesh_sets.mpmd_functions(module)
        check = _SourceCheck(functions, ir.symbol_table(module), Limited(self.error_limit))
        for f in functions:
            for body in [f, *ir.ops(f, ir.For)]:
                for op in ir.ops(body):
                    if mesh_sets.is_meshless(op):
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
        possible = mesh_sets.src_set(op)
        is_reduction = REDUCE in op.attributes
        if possible is None or (possible and not is_reduction) or self._errors.reached:
            return
        if not possible and any(self._is_nowhere(v) for v in op.operands):
            return
        if is_reduction and any((p := ir.producer(v)) and REDUCE in p.attributes for v in op.operands):
            return
        blocks = [("The op:", [op_line(op)])]
        for i, value in enumerate(op.operands):
            meshes = self._src_set(value)
            can = "any mesh" if meshes is None else braces(meshes.names)
            blocks.append((f"Operand {i} can be on {can}, from", self._explain.origins([value])))
        needed = mesh_sets.use_set(op)
        where = f"The result is needed on {braces(needed.names)}, by" if needed else "The result is used by"
        blocks.append((where, self._explain.uses(op.results)))
        first = "Mesh assignment is not possible for op as its operands are on conflicting meshes."
        advice = REDUCTION if is_reduction else TRANSFER
        self._errors.report(page(first, blocks, op.location, advice), op.location)

    def argument(self, f: ir.Func, index: int) -> None:
        """Reports an argument of a callee whose calls pass values that cannot be on one mesh."""
        possible = mesh_sets.src_set((f, "arg", index))
        if possible is None or possible or self._errors.reached:
            return
        given = [call.operands[index] for call in self._explain.calls(f)]
        if any(self._is_nowhere(value) for value in given):
            return
        first = (
            f"Mesh assignment is not possible for arg{index} of {callee(f)} as its caller "
            "operands are on conflicting meshes."
        )
        needed = mesh_sets.use_set((f, "arg", index))
        where = f"It is needed on {braces(needed.names)}, by" if needed else "It is used by"
        blocks = [
            (f"{len(given)} calls give it values from", self._explain.origins(given)),
            (where, self._explain.uses([f.args[index]])),
        ]
        self._errors.report(page(first, blocks, f.location, TRANSFER), f.location)

    def _src_set(self, value: ir.Value) -> MeshSet | None:
        return mesh_sets.src_set(mesh_sets.source_key(value, self._symbols))

    def _is_nowhere(self, value: ir.Value) -> bool:
        meshes = self._src_set(value)
        return meshes is not None and not meshes


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
