"""Pages of LLVM's own code, which are needed while a program is compiled.

Code generation touches 48 MB of LLVM's code.  They are clean pages of a file, shared by the processes that
map it, but they count in the resident memory of each.  A file mapping of code is never written, so its pages
may be unmapped at any time, also while a thread runs there: they are mapped again from the page cache when
they are executed.
Measurements: docs/decisions/memory-of-processes.md.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_DONTNEED = 4  # MADV_DONTNEED of <sys/mman.h> on Linux
_MAPPINGS = Path("/proc/self/maps")


def unmap_compiler_code() -> int:
    """Unmaps the pages of LLVM's code, if LLVM was loaded; takes 2 ms, and compiling maps them again.

    Returns:
        The bytes of the code, touched or not; 0 if LLVM was not loaded, and on other systems than Linux.

    Source: madvise(2), proc(5).
    """
    if "llvmlite.binding" not in sys.modules or not _MAPPINGS.exists():
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    sizes = [end - start for start, end in _code() if libc.madvise(start, end - start, _DONTNEED) == 0]
    return sum(sizes)


def _code() -> list[tuple[int, int]]:
    """The mappings of LLVM's library that are executable and not writable."""
    found = []
    for line in _MAPPINGS.read_text().splitlines():
        addresses, permissions, *_, name = line.split(maxsplit=5)
        if permissions == "r-xp" and Path(name).name.startswith("libllvmlite."):
            start, end = (int(address, 16) for address in addresses.split("-"))
            found.append((start, end))
    return found
