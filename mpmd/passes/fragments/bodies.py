"""What fragments compute: as text, to compare it, and as functions."""

from __future__ import annotations

import hashlib

from mpmd import ir


def body_text(fragment: ir.Fragment) -> str:
    """Equal for fragments whose bodies do the same: a digest of the body and of its argument types."""
    types = " ".join(str(arg.type) for arg in fragment.args)
    body = ir.op_text(fragment).partition("\n")[2].rpartition("\n")[0]
    return hashlib.sha256(f"{types}\n{body}".encode()).hexdigest()


def outline(fragment: ir.Fragment, name: str) -> ir.Func:
    """A function with the body of a fragment, at the end of the module; the fragment keeps no body."""
    kind = ir.FunctionType.get([a.type for a in fragment.args], [v.type for v in fragment.returned])
    attributes = {"sym_name": ir.StringAttr.get(name), "function_type": ir.TypeAttr.get(kind)}
    end = ir.InsertionPoint(ir.module_of(fragment).body)
    made: ir.Func = ir.create("func.func", [], [], end, attributes, fragment.location, regions=1)
    old = fragment.terminator
    ir.create("func.return", fragment.returned, [], ir.before(old), location=old.location)
    ir.erase(old)
    ir.take_bodies(fragment, made)
    return made
