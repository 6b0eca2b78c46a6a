"""A process that compiles Triton kernels: it reads requests from its input and writes answers to its output.

It is run as a script and imports nothing of this project: starting it takes 0.2 s.  The process that compiles
a user's program imports no Triton, and Triton's own cache, which checks no owners, is a temporary folder.

A message is its length, 8 bytes, and a pickled dict; see `compile_kernels.py` for what is in it.
"""

from __future__ import annotations

import hashlib
import linecache
import os
import pickle
import select
import struct
import tempfile
from typing import Any, BinaryIO

LENGTH = struct.Struct("<Q")
IDLE_SECONDS = 60.0
"""A process without work for so long ends."""

_ALIGNED = [["tt.divisibility", 16]]
_WARP = 32
_SCOPES: dict[str, dict[str, Any]] = {}


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request: machine code, or what Triton says against it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    try:
        function = _defined(request["source"], _prelude(request["prelude"]))[request["name"]]
        source = ASTSource(
            fn=function,
            signature=request["signature"],
            constexprs={},
            attrs={(k,): _ALIGNED for k, wide in enumerate(request["aligned"]) if wide},
        )
        # libdevice would take denormals for 0: their logarithm and inverse root would be infinite
        options = {"num_warps": request["warps"], "enable_fp_fusion": True, "enable_reflect_ftz": False}
        kernel = triton.compile(
            source, target=GPUTarget("cuda", request["capability"], _WARP), options=options
        )
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "name": kernel.metadata.name,
        "code": kernel.asm["cubin"],
        "ptx": kernel.asm["ptx"],
        "shared_bytes": kernel.metadata.shared,
        "threads": _WARP * kernel.metadata.num_warps,
        "scratch_bytes": getattr(kernel.metadata, "global_scratch_size", 0) or 0,
    }


def _prelude(text: str) -> dict[str, Any]:
    if text not in _SCOPES:
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        scope = {"triton": triton, "tl": tl, "libdevice": libdevice, "__name__": __name__}
        _SCOPES[text] = _defined(text, scope)
    return _SCOPES[text]


def _defined(text: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Triton reads the source of a function: it is in the cache of lines instead of a file."""
    name = f"<kernels {hashlib.sha256(text.encode()).hexdigest()[:16]}>"  # it is in the code's debug lines
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    scope = dict(scope)
    exec(compile(text, name, "exec"), scope)
    return scope


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    data = stream.read(*LENGTH.unpack(head))
    message: dict[str, Any] = pickle.loads(data)
    return message


def write(stream: BinaryIO, message: dict[str, Any]) -> None:
    data = pickle.dumps(message)
    stream.write(LENGTH.pack(len(data)) + data)
    stream.flush()


def main() -> None:
    """Answers requests until there are none for a minute, or the other process has ended."""
    given, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what others print is not an answer
    with tempfile.TemporaryDirectory(prefix="mpmd_triton_") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        # of two messages the second is sent after the first is answered: none waits in a buffer
        while select.select([given], [], [], IDLE_SECONDS)[0]:
            request = read(given)
            if request is None:
                break
            write(answers, compiled(request))


if __name__ == "__main__":
    main()
