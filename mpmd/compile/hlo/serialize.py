"""Modules as bytes: HLO text, with large constants beside it as raw memory, and a digest over all."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from mpmd.compile.hlo.instruction import HloInstruction
from mpmd.compile.hlo.module import HloModule
from mpmd.compile.hlo.parser import parse_module
from mpmd.compile.hlo.printer import PrintOptions, print_module
from mpmd.errors import HloError

_MAGIC = b"MPMDHLO1"
_LARGE = 256
_DIGEST = 32


def serialize(module: HloModule) -> bytes:
    """The module as bytes; the same module gives the same bytes."""
    text = print_module(module, PrintOptions(metadata=True, elide_constants=_LARGE)).encode()
    raw = [np.ascontiguousarray(i.literal).tobytes() for i in _large_constants(module)]
    parts = [_MAGIC, struct.pack("<QQ", len(text), len(raw)), text]
    for data in raw:
        parts += [struct.pack("<Q", len(data)), data]
    body = b"".join(parts)
    return body + hashlib.sha256(body).digest()


def deserialize(data: bytes) -> HloModule:
    """The module in the bytes that `serialize` wrote.

    Raises:
        HloError: the bytes are something else, truncated or damaged.
    """
    if data[: len(_MAGIC)] != _MAGIC:
        raise HloError(
            f"these bytes are not a serialized HLO module: they begin with {data[: len(_MAGIC)]!r}\n"
            f"  expected: {_MAGIC!r}, as serialize writes it"
        )
    body = data[:-_DIGEST]
    if hashlib.sha256(body).digest() != data[-_DIGEST:]:
        raise HloError("this serialized HLO module is damaged: its digest does not fit\n  serialize it again")
    size, count = struct.unpack_from("<QQ", body, len(_MAGIC))
    position = len(_MAGIC) + 16
    text = body[position : position + size].decode()
    position += size
    raw = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", body, position)
        raw.append(body[position + 8 : position + 8 + length])
        position += 8 + length
    return parse_module(text, literals=raw)


def _large_constants(module: HloModule) -> Iterator[HloInstruction]:
    """Constants that the text leaves out, in the order of the text."""
    for computation in module.call_order():
        order = list(computation) if module.is_scheduled else computation.post_order()
        for instruction in order:
            if (
                instruction.opcode == "constant"
                and instruction.shape.is_array
                and instruction.shape.size > _LARGE
            ):
                yield instruction
