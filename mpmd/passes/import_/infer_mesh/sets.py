"""Sets of meshes with the reasons why each mesh is in, kept in attributes while meshes are inferred.

A *use set* has the meshes on which a value is needed; a missing one is empty.  A *source set* has the meshes
on which a value can be without a new transfer; a missing one means: on any.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mpmd import ir
from mpmd.passes.import_ import assigning
from mpmd.support.memoisation import memoised

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
        found = wanted or reasons
        first = [mesh for mesh, why in found.items() if assigning.BROADCAST_IN not in why]
        return min(first or found, default=None)

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
    for found in _ENTRY.finditer(str(attribute).partition("<")[2]):
        why = [_unescaped(s) for s in _STRING.findall(found[2] or "")]
        (any_other if found[1] == _ANY_OTHER else meshes.setdefault(_unescaped(found[1]), [])).extend(why)
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

    def __init__(self, found: MeshSet | None) -> None:
        self.found = found
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
