"""Fragments to executables: each distinct one once per mesh, several at a time."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
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
    """Compiles every fragment for its mesh; one that only differs in its mesh from another is loaded from it.

    Raises:
        CompileError: one cannot be compiled.
    """
    chosen = get_backend(backend)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        groups = pool.map(
            lambda names: _compile_alike(chosen, [fragments[n] for n in names], meshes),
            alike(fragments, meshes),
        )
        made = {executable.name: executable for group in groups for executable in group}
    return {name: made[name] for name in fragments}


def alike(fragments: Mapping[str, FragmentModule], meshes: Mapping[str, Any]) -> list[list[str]]:
    """The distinct programs: for each the names of the fragments that are it, on meshes of one shape."""
    found: dict[Hashable, list[str]] = {}
    for name, fragment in fragments.items():
        shape = tuple(meshes[fragment.mesh].shape.items())
        found.setdefault((fragment.fingerprint, shape), []).append(name)
    return list(found.values())


def _compile_alike(
    backend: Backend, fragments: Sequence[FragmentModule], meshes: Mapping[str, Any]
) -> list[Executable]:
    """Executables of fragments with one fingerprint, on meshes of one shape."""
    first, *others = fragments
    made = [backend.compile(first, meshes[first.mesh])]
    for fragment in others:
        mesh = meshes[fragment.mesh]
        made.append(backend.relocate(made[0], fragment, mesh) or backend.compile(fragment, mesh))
    return made
