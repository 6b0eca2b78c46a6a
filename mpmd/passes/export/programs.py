"""Which fragments can be one program."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable

from mpmd import ir


def program_identity(fragment: ir.Fragment) -> Hashable:
    """Equal for fragments that can be one program.

    The text of a fragment begins with one line of its own attributes and operands; its body follows.
    """
    body = ir.op_text(fragment).partition("\n")[2]
    return program_signature(fragment), hashlib.sha256(body.encode()).digest()


def program_signature(fragment: ir.Fragment) -> Hashable:
    """All that makes the identity of a program but what it computes."""
    return (
        fragment.mesh,
        tuple(v.type for v in fragment.inputs),
        tuple(v.type for v in fragment.results),
        *(fragment.attributes.get(name) for name in ("arg_attrs", "res_attrs")),
    )
