"""Sets of meshes with the reasons why each mesh is in, kept in attributes while meshes are inferred.

A *use set* has the meshes on which a value is needed; a missing one is empty.  A *source set* has the meshes
on which a value can be without a new transfer; a missing one means: on any.  Sets follow values through
calls and loops: a callee has one set for all its calls, a loop one for all its iterations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mpmd import ir
from mpmd.passes.fragments.editing import op_around
from mpmd.passes.import_ import assigning
from mpmd.support import diagnostics
from mpmd.support.resources import memoised

USE_SET = "mpmd.use_set"
SRC_SET = "mpmd.src_set"
REDUCE = "mpmd.reduce"
_ANY_OTHER = "*"
_ROWS = {"arg": "arg_attrs", "result": "res_attrs"}

Key = Any
"""The owner of a set: an op, or `(function or loop, "arg" or "result", position)`."""


@dataclasses.dataclass(frozen=True)
class MeshSet:
    """Meshes in order, each with its reasons; and, if any other mesh is in too, the reasons for that."""

    meshes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    any_other: tuple[str, ...] = ()

    @staticmethod
    def of(mesh: str, *reasons: str) -> MeshSet:
        return MeshSet(((mesh, reasons),))

    @property
    def names(self) -> list[str]:
        """Names of the meshes, in order, without "any other"."""
        return [mesh for mesh, _ in self.meshes]

    def __bool__(self) -> bool:
        return bool(self.meshes or self.any_other)

    def __or__(self, other: MeshSet) -> MeshSet:
        """Meshes in either, those of `self` first; the reasons of both."""
        return self if other is self or not other else _union(self, other)

    def __and__(self, other: MeshSet) -> MeshSet:
        """Meshes in both, in the order of `self`; the reasons of both."""
        return _intersection(self, other)

    def best(self, preferred: Iterable[str] = ()) -> str | None:
        """The mesh to choose: a preferred one if any is in; those not only there for a broadcast first.

        The smallest name, as a string, of those.  None if no mesh is in.
        """
        reasons = dict(self.meshes)
        wanted = {m: reasons.get(m, self.any_other) for m in preferred if m in reasons or self.any_other}
        candidates = wanted or reasons
        first = [mesh for mesh, why in candidates.items() if assigning.BROADCAST_IN not in why]
        return min(first or candidates, default=None)

    def covers(self, meshes: Iterable[str]) -> bool:
        """Whether all those meshes are in."""
        return bool(self.any_other) or set(meshes) <= set(self.names)

    def attribute(self) -> ir.Attribute:
        return _attribute(self)

    def __str__(self) -> str:
        return ", ".join(f"{mesh}[{','.join(why)}]" if why else mesh for mesh, why in self.meshes)


@memoised(1 << 14)
def _union(a: MeshSet, b: MeshSet) -> MeshSet:
    if not b:
        return a
    meshes = {mesh: dict.fromkeys(why) for mesh, why in a.meshes}
    for mesh, why in b.meshes:
        meshes.setdefault(mesh, {}).update(dict.fromkeys(why))
    return _made(meshes, [*a.any_other, *b.any_other])


@memoised(1 << 14)
def _intersection(a: MeshSet, b: MeshSet) -> MeshSet:
    left, right = dict(a.meshes), dict(b.meshes)
    meshes: dict[str, Iterable[str]] = {}
    for mesh, why in left.items():
        if mesh in right or b.any_other:
            meshes[mesh] = [*why, *right.get(mesh, b.any_other)]
    if a.any_other:
        for mesh, why in right.items():
            if mesh not in left:
                meshes[mesh] = [*why, *a.any_other]
    both = [*a.any_other, *b.any_other] if a.any_other and b.any_other else []
    return _made(meshes, both)


def _made(meshes: Mapping[str, Iterable[str]], any_other: Iterable[str]) -> MeshSet:
    entries = tuple((mesh, tuple(dict.fromkeys(why))) for mesh, why in meshes.items())
    return MeshSet(entries, tuple(dict.fromkeys(any_other)))


def both(a: MeshSet | None, b: MeshSet | None) -> MeshSet | None:
    """The intersection of two source sets, where None is every mesh."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return a & b


_ENTRY = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\[((?:"(?:[^"\\]|\\.)*"(?:, )?)*)\])?')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')


@memoised(1 << 14)
def _parsed(attribute: ir.Attribute) -> MeshSet:
    """The set in a `#mpmd.meshes_with_origins<...>`."""
    meshes: dict[str, list[str]] = {}
    any_other: list[str] = []
    for match in _ENTRY.finditer(str(attribute).partition("<")[2]):
        why = [_unescaped(s) for s in _STRING.findall(match[2] or "")]
        (any_other if match[1] == _ANY_OTHER else meshes.setdefault(_unescaped(match[1]), [])).extend(why)
    return _made(meshes, any_other)


@memoised(1 << 14)
def _attribute(s: MeshSet) -> ir.Attribute:
    entries = [*s.meshes, *([(_ANY_OTHER, s.any_other)] if s.any_other else [])]
    parts = (_quoted(mesh) + (f"[{', '.join(map(_quoted, why))}]" if why else "") for mesh, why in entries)
    return ir.Attribute.parse(f"#mpmd.meshes_with_origins<{', '.join(parts)}>", ir.context())


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    """As MLIR writes strings: bytes that are not plain as two hexadecimal digits."""
    return "".join(
        c if c.isascii() and c.isprintable() and c not in '"\\' else "".join(f"\\{b:02X}" for b in c.encode())
        for c in text
    )


def _unescaped(text: str) -> str:
    raw = re.sub(
        rb"\\([0-9A-Fa-f]{2}|.)",
        lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1],
        text.encode(),
    )
    return raw.decode(errors="replace")


def read(attribute: ir.Attribute | None) -> MeshSet | None:
    return None if attribute is None else _parsed(attribute)


def use_set(key: Key | None) -> MeshSet:
    """Where the owner with this key is needed."""
    return read(_attribute_at(key, USE_SET)) or MeshSet()


def src_set(key: Key | None) -> MeshSet | None:
    """Where the owner with this key can be."""
    return read(_attribute_at(key, SRC_SET))


def _attribute_at(key: Key | None, name: str) -> ir.Attribute | None:
    if not isinstance(key, tuple):
        return None if key is None else key.attributes.get(name)
    owner, side, index = key
    entries = owner.attributes.get(_ROWS[side])
    return None if entries is None else ir.entries_of(ir.ArrayAttr(entries)[index]).get(name)


def clear(op: ir.Op, *names: str) -> None:
    for name in names:
        ir.put(op, name, None)


def clear_entries(f: ir.Op, which: str, *names: str) -> None:
    """Removes entries of an op's attribute that has one dictionary per argument or result."""
    attribute = f.attributes.get(which)
    if attribute is None:
        return
    dicts = ir.attribute_dicts(f, which, 0)
    ir.put_attribute_dicts(f, which, [{k: v for k, v in d.items() if k not in names} for d in dicts])


_EMPTY = MeshSet()


class Cell:
    """The set of one op, argument or result in a table.

    Attributes:
        found: the set; None if it is not there.
        is_changed: whether it differs from its attribute.
    """

    __slots__ = ("found", "is_changed")

    def __init__(self, stored: MeshSet | None) -> None:
        self.found = stored
        self.is_changed = False

    @property
    def meshes(self) -> MeshSet:
        """The set, which is empty if it is not there."""
        return self.found or _EMPTY

    def put(self, value: MeshSet) -> bool:
        """Sets it; whether it changed."""
        if self.found is value or self.found == value:
            return False
        self.found = value
        self.is_changed = True
        return True


class Table:
    """The sets of one kind in a module, written back at once; meanwhile no op is created or erased."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute
        self._cells: dict[Key, Cell] = {}
        self._entries: dict[tuple[ir.Op, str], list[dict[str, ir.Attribute]]] = {}

    def cell(self, key: Key) -> Cell:
        """The owner of the set of an op, argument or result."""
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(read(self._read(key)))
        return cell

    def write(self) -> None:
        rows: dict[tuple[ir.Op, str], list[dict[str, ir.Attribute]]] = {}
        for key, cell in self._cells.items():
            if not cell.is_changed:
                continue
            cell.is_changed = False
            attribute = cell.meshes.attribute()
            if not isinstance(key, tuple):
                ir.put(key, self._attribute, attribute)
                continue
            owner, side, index = key
            row = rows.setdefault((owner, side), self._row(owner, side))
            row[index][self._attribute] = attribute
        for (owner, side), row in rows.items():
            ir.put_attribute_dicts(owner, _ROWS[side], row)

    def _read(self, key: Key) -> ir.Attribute | None:
        if not isinstance(key, tuple):
            return key.attributes.get(self._attribute)
        owner, side, index = key
        return self._row(owner, side)[index].get(self._attribute)

    def _row(self, owner: ir.Op, side: str) -> list[dict[str, ir.Attribute]]:
        if (owner, side) not in self._entries:
            count = len(owner.args) if side == "arg" else len(owner.returned)
            self._entries[owner, side] = ir.attribute_dicts(owner, _ROWS[side], count)
        return self._entries[owner, side]


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
        needed = [use_set((op, "arg", i)) for i in range(len(op.args))]
        for i, value in enumerate(op.returned):
            needed[i] |= _needed(value, symbols)
        self._meshes = [self._one_of(i, meshes) for i, meshes in enumerate(needed)]

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
        clear_entries(op, "arg_attrs", USE_SET, SRC_SET)
        rebuilt = ir.rebuild(op, operands, kinds[: len(op.results)])
        for old, new in zip(op.results, rebuilt.results):
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
        return use_set((symbols[op.callee_name], "result", ir.result_index(value)))
    if op is None or assigning.is_mesh_tensor(value.type):
        return MeshSet()
    return use_set(op)
