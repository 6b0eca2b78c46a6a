"""Triton kernels to machine code of NVIDIA GPUs, without one: ptxas comes with Triton.

Triton is imported here alone, and when a kernel is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import linecache
from typing import Any

from mpmd.compile.backends.native_gpu.triton.kernels import PrintedKernel
from mpmd.compile.backends.native_gpu.triton.source import PRELUDE
from mpmd.errors import CompileError

_ALIGNED = [["tt.divisibility", 16]]
_WARP = 32


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


def compile_kernel(kernel: PrintedKernel, capability: int) -> Cubin:
    """The machine code of a kernel.

    Args:
        kernel: the kernel.
        capability: of the GPU: 80, 90, 100.

    Raises:
        CompileError: Triton is not installed, or does not compile it.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise CompileError('GPU kernels are compiled by Triton: pip install "mpmd[gpu]"') from error
    names = [f"p{k}" for k in kernel.operands]
    aligned = {(k,): _ALIGNED for k, wide in enumerate(kernel.aligned) if wide}
    try:
        source = ASTSource(
            fn=_functions(kernel.source)[kernel.name],
            signature=dict(zip(names, kernel.pointers, strict=True)),
            constexprs={},
            attrs=aligned,
        )
        options = {"num_warps": kernel.warps, "enable_fp_fusion": True}
        made = triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)
    except Exception as error:
        text = f"Triton does not compile kernel {kernel.name}: {error}\n{kernel.source}"
        raise CompileError(text) from error
    threads = _WARP * made.metadata.num_warps
    return Cubin(made.metadata.name, made.asm["cubin"], made.asm["ptx"], made.metadata.shared, threads)


def _functions(text: str) -> dict[str, Any]:
    """The functions of a text, which can call those of the prelude."""
    return _defined(text, _prelude())


@functools.cache
def _prelude() -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    return _defined(PRELUDE, {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": __name__})


def _defined(text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Triton reads the source of a function: it is in the cache of lines instead of a file."""
    name = f"<kernels {hashlib.sha256(text.encode()).hexdigest()[:16]}>"  # it is in the code's debug lines
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = dict(scope)
    exec(compile(text, name, "exec"), scope)
    return scope
