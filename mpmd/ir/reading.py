"""Programs from text."""

from __future__ import annotations

import re

from jax.extend.mlir import ir

from mpmd.errors import IRError
from mpmd.ir.context import context
from mpmd.ir.kept import keep


def parse(text: str | bytes) -> ir.Module:
    """A module from MLIR text or bytecode.

    Raises:
        IRError: the text is not a valid module; says where and why.
    """
    if isinstance(text, str):
        _require_known_callees(text)
    try:
        with context(), ir.Location.unknown():
            return keep(ir.Module.parse(text, context()))
    except ir.MLIRError as e:
        raise IRError(f"cannot read the program: {e}") from e


def _require_known_callees(text: str) -> None:
    """The dialect's verifier crashes the process on a call of an unknown function."""
    if "mpmd.call" not in text:
        return
    text = re.sub(r"(?m)^\s*//.*$", "", text)
    name = r'@("(?:[^"\\]|\\.)*"|[\w.$-]+)'
    known = set(re.findall(r"func\.func(?:\s+(?:public|private|nested))?\s+" + name, text))
    called = re.findall(r"mpmd\.call\s+" + name, text)
    called += re.findall(r'"mpmd\.call"\(.*\bcallee = ' + name, text)
    for callee in dict.fromkeys(c for c in called if c not in known):
        raise IRError(f"cannot read the program: it calls @{callee}, which it does not define")


def name_of(location: ir.Location) -> str | None:
    """The name in a location, such as the path of an argument."""
    while isinstance(location, ir.CallSiteLoc):
        location = location.callee
    return str(location.name_str) if isinstance(location, ir.NameLoc) else None
