"""Which fragments can be one program."""

from __future__ import annotations

import hashlib

from mpmd import ir


def program_identity(fragment: ir.Fragment) -> bytes:
    """Equal for fragments that can be one program.

    The text of a fragment begins with one line of its own attributes and operands; its body follows.
    """
    header = [fragment.mesh]
    header += [str(v.type) for v in fragment.inputs] + ["->"] + [str(v.type) for v in fragment.results]
    header += [str(fragment.attributes.get(name)) for name in ("arg_attrs", "res_attrs")]
    body = ir.op_text(fragment).partition("\n")[2]
    return hashlib.sha256("\n".join([*header, body]).encode()).digest()
