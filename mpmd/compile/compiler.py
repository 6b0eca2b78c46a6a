"""Fragments to executables: each distinct one once per mesh, several at a time."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpmd.compile.backends.native_cpu.backend import NativeCpuBackend
from mpmd.compile.backends.xla import XlaBackend
from mpmd.compile.dump import Dump
from mpmd.compile.executable import Backend, Executable, MemoryStats
from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError


@dataclasses.dataclass
class FallbackExecutable:
    """A fragment that XLA compiles because native code cannot be made of it.

    Attributes:
        inner: what runs.
        reason: why.
    """

    inner: Executable
    reason: str
    backend: str = "xla"

    @property
    def fragment(self) -> FragmentModule:
        """The fragment."""
        return self.inner.fragment

    @property
    def name(self) -> str:
        """Its name."""
        return self.inner.name

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Starts it."""
        return self.inner(*arrays)

    def as_text(self, what: str = "hlo") -> str:
        """As XLA compiled it."""
        return self.inner.as_text(what)

    def cost_analysis(self) -> dict[str, float]:
        """XLA's count, and one fallback."""
        return {**self.inner.cost_analysis(), "fallbacks": 1.0}

    def memory_analysis(self) -> MemoryStats:
        """XLA's count."""
        return self.inner.memory_analysis()


@dataclasses.dataclass(frozen=True)
class NativeBackend:
    """Native code where there is some, and XLA's, counted and warned about, where there is none."""

    native: Backend = dataclasses.field(default_factory=NativeCpuBackend)
    name: str = "native"

    def compile(self, fragment: FragmentModule, mesh: Any) -> Executable:
        """Compiles for the devices of a mesh; see `Backend`."""
        try:
            return self.native.compile(fragment, mesh)
        except CompileError as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"fragment {fragment.name} on {fragment.mesh} is compiled by XLA: {reason}", stacklevel=2
            )
            return FallbackExecutable(XlaBackend().compile(fragment, mesh), reason)


BACKENDS: dict[str, type[Any]] = {"native": NativeBackend, "xla": XlaBackend}


def get_backend(name: str, dump: Dump | None = None) -> Backend:
    """A backend by its name, writing files if it can and they are asked for.

    Raises:
        CompileError: there is none of that name.
    """
    if name not in BACKENDS:
        raise CompileError(
            f"there is no compile backend {name!r}\n  there are {', '.join(map(repr, BACKENDS))}"
        )
    if name == "native":
        return NativeBackend(NativeCpuBackend(dump=dump))
    made: Backend = BACKENDS[name]()
    return made


def compile_fragments(
    fragments: Mapping[str, FragmentModule],
    meshes: Mapping[str, Any],
    backend: str,
    dump: Dump | None = None,
) -> dict[str, Executable]:
    """Compiles every fragment for its mesh.

    Args:
        fragments: by name.
        meshes: by name.
        backend: name of the backend.
        dump: where to write what compilation makes.

    Raises:
        CompileError: one cannot be compiled.
    """
    chosen = get_backend(backend, dump)
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        waiting = {
            name: pool.submit(chosen.compile, fragment, meshes[fragment.mesh])
            for name, fragment in fragments.items()
        }
        return {name: future.result() for name, future in waiting.items()}
