"""Machine code of one kernel, and the messages to and from the process that compiles it."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpmd.compile.backends.native_gpu.triton.kernels import PrintedKernel
from mpmd.compile.backends.native_gpu.triton.source import PRELUDE
from mpmd.errors import CompileError


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
        name: of its function; it takes its pointers and two more, which are null.
        code: an ELF file.
        ptx: the text before it.
        shared_bytes: of shared memory that a program needs.
        threads: of a program.
    """

    name: str
    code: bytes
    ptx: str
    shared_bytes: int
    threads: int


def request_of(kernel: PrintedKernel, capability: int) -> dict[str, Any]:
    """What the process is sent for a kernel.

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
    return Cubin(*(answer[field.name] for field in dataclasses.fields(Cubin)))
