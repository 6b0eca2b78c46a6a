"""Machine code of one kernel, and the messages to and from the process that compiles it."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

from mpmd.compile.backends.native_gpu.triton.source import PRELUDE
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.errors import CompileError

ANSWERED = ("name", "code", "ptx", "shared_bytes", "threads")
"""The process's answer about a kernel's code; the rest is read in it."""
_SECTION_TABLE, _SECTION_COUNTS = 0x28, 0x3A
"""Where an ELF file of 64 bits says where its sections are, and how large and many; and which has names."""
_ENTRY, _SIZED, _FRAME_SIZE = 4, 4, 0x11


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
        name: of its function; it takes its pointers and two more, which are null.
        code: an ELF file.
        ptx: the text before it.
        shared_bytes: of shared memory that a program needs.
        threads: of a program.
        stack_bytes: of a thread, for values that have no register.
    """

    name: str
    code: bytes
    ptx: str
    shared_bytes: int
    threads: int
    stack_bytes: int


def request_of(kernel: PrintedKernel, capability: int) -> dict[str, Any]:
    """The request that the process gets for a kernel.

    Args:
        kernel: the kernel.
        capability: of the GPU: 80, 90, 100.
    """
    names = [f"p{k}" for k in kernel.operands]
    return {
        "name": kernel.name,
        "source": kernel.source,
        "prelude": PRELUDE,
        "signature": dict(zip(names, kernel.pointers, strict=True)),
        "aligned": kernel.aligned,
        "warps": kernel.warps,
        "capability": capability,
    }


def cubin_of(kernel: PrintedKernel, answer: dict[str, Any]) -> Cubin:
    """The machine code in an answer.

    Raises:
        CompileError: Triton does not compile the kernel, or its code needs memory that no launch gives.
    """
    if "error" in answer:
        raise CompileError(
            f"Triton does not compile kernel {kernel.name}: {answer['error']}\n{kernel.source}"
        )
    if answer["scratch_bytes"]:
        raise CompileError(
            f"kernel {kernel.name} needs {answer['scratch_bytes']} bytes of Triton's own memory"
        )
    return Cubin(**{name: answer[name] for name in ANSWERED}, stack_bytes=stack_bytes(answer["code"]))


def stack_bytes(code: bytes) -> int:
    """The frames of a cubin's functions, the largest: the assembler writes them into section `.nv.info`.

    An entry there is a format, an attribute, and the length of a value, or a value of two bytes.
    """
    (table,) = struct.unpack_from("<Q", code, _SECTION_TABLE)
    size, count, names = struct.unpack_from("<3H", code, _SECTION_COUNTS)
    sections = [struct.unpack_from("<2I4Q", code, table + k * size) for k in range(count)]
    strings, frames = sections[names][4], [0]
    for name, _, _, _, begin, length in sections:
        at, end = begin, begin + length
        if code[strings + name :].partition(b"\0")[0] != b".nv.info":
            continue
        while at < end:
            form, attribute, value = struct.unpack_from("<2BH", code, at)
            at += _ENTRY
            if form == _SIZED:
                if attribute == _FRAME_SIZE:
                    frames.append(struct.unpack_from("<2I", code, at)[1])
                at += value
    return max(frames)
