"""Error pages of mesh inference: where values come from and go to, in the user's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from mpmd import ir
from mpmd.passes.calls.signatures import calls_by_callee
from mpmd.passes.import_ import assigning
from mpmd.passes.import_.infer_mesh import sets
from mpmd.passes.import_.infer_mesh.sets import MeshSet
from mpmd.support.source import frames_of

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
            found, more = step(value)
            lines.update(dict.fromkeys(found))
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
    found = sets.src_set((f, "arg", index))
    return f'Input "{name}": {"any mesh" if found is None else found}'


def _output_line(f: ir.Func, index: int, by: ir.Assign | None = None, mesh: str = "any mesh") -> str:
    location = assigning.result_location(f, index)
    if location is None and by is not None:
        location = by.location
    name = (location and ir.name_of(location)) or f"#{index}"
    return f'Output "{name}": {mesh}'


def _unassign_line(op: ir.Unassign) -> str:
    reason, mesh = op.reason or "", op.tensor.type.mesh
    found = MeshSet.of(mesh, *([reason] if reason else [])) | (sets.src_set(op) or MeshSet())
    source = ir.producer(op.tensor)
    if source is None and reason in ("", assigning.USER_IN):
        f = op.tensor.owner.owner.opview
        index = ir.arg_index(op.tensor)
        name = ir.name_of(f.args[index].location) or ir.name_of(op.location) or f"#{index}"
        return f'Input "{name}": {found}'
    return f"{_named(reason, source)}: {found}{_place(op.location)}"


def _assign_line(op: ir.Assign) -> str:
    reason, mesh = op.reason or "", op.result.type.mesh
    found = MeshSet.of(mesh, *([reason] if reason else []))
    for use in op.result.uses:
        if use.owner.operation.name == "func.return":
            return _output_line(use.owner.operation.parent.opview, use.operand_number, op, str(found))
    user = next(iter(ir.users(op)), None)
    return f"{_named(reason, user)}: {found}{_place(op.location)}"


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
