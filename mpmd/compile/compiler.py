"""Fragments to executables: each distinct one once per mesh, several at a time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpmd.compile.backends.xla import XlaBackend
from mpmd.compile.executable import Backend, Executable
from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError

BACKENDS: dict[str, type[Any]] = {"xla": XlaBackend}


def get_backend(name: str) -> Backend:
    """A backend by its name.

    Raises:
        CompileError: there is none of that name.
    """
    if name not in BACKENDS:
        raise CompileError(
            f"there is no compile backend {name!r}\n  there are {', '.join(map(repr, BACKENDS))}"
        )
    return BACKENDS[name]()


def compile_fragments(
    fragments: Mapping[str, FragmentModule], meshes: Mapping[str, Any], backend: str
) -> dict[str, Executable]:
    """Compiles every fragment for its mesh.

    Raises:
        CompileError: one cannot be compiled.
    """
    chosen = get_backend(backend)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting = {
            name: pool.submit(chosen.compile, fragment, meshes[fragment.mesh])
            for name, fragment in fragments.items()
        }
        return {name: future.result() for name, future in waiting.items()}
