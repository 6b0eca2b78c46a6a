"""The backend of a target: fragments go through the driver, and what it builds is loaded for a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.sharding import Mesh

from mpmd.compile.artefact import Artefact
from mpmd.compile.executable import Backend
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.options import CompileOptions
from mpmd.compile.target import Target
from mpmd.errors import CompileError


class LoadError(CompileError):
    """Code was generated, but its device or a library of it does not take it."""


class OtherTargetError(LoadError):
    """Code for another target would load.

    Args:
        message: why this code does not.
        target: the other one.
    """

    def __init__(self, message: str, target: Target) -> None:
        super().__init__(message)
        self.target = target


class TargetBackend(Backend, Protocol):
    """A `Backend` of one target."""

    @property
    def target(self) -> Target:
        """What it compiles for."""

    @property
    def options(self) -> CompileOptions:
        """The user's options of compilation."""

    def unfit(self, fragment: FragmentModule, mesh: Mesh) -> str:
        """Why it compiles none of a mesh's fragments, or not this one in any case; or ""."""


def unfit_for_targets(name: str, fragment: FragmentModule, mesh: Mesh) -> str:
    """Why the backend of no target compiles a fragment, or ""; `name` is its name."""
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return f"{name} fragments run on the devices of one process"
    if any(v.memory_kind for v in (*fragment.arguments, *fragment.results)):
        return f"{name} fragments do not name memories"
    if fragment.callbacks:
        return f"{name} fragments do not call back to Python"
    return "" if fragment.results else "a fragment without results"


class LoadedProgram(Protocol):
    """A program in memory, with the memory and threads that it runs in."""

    @property
    def key(self) -> int:
        """Equal for programs that share the memory that they keep."""

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps from call to call."""

    def __call__(
        self,
        *arguments: Any,
        results: Sequence[jax.ShapeDtypeStruct],
        aliases: Mapping[int, int] | None = None,
        large: bool = False,
        after: Any = None,
    ) -> Any:
        """The call, inside of traced code.

        Args:
            *arguments: arrays.
            results: shapes and dtypes of the results.
            aliases: argument → result that shares its memory if it is donated.
            large: whether it is dispatched asynchronously.
            after: an array that XLA computes before the call, although the program does not read it.
        """


@runtime_checkable
class TracedTargetBackend(TargetBackend, Protocol):
    """One whose programs are called from traced code, so that XLA's code may come before and after them."""

    def register(self, artefact: Artefact, name: str, mesh: Mesh) -> LoadedProgram:
        """Loads code with the memory and threads of the mesh of that name.

        Raises:
            CompileError: the code does not load.
        """

    def may_split(self, mesh: Mesh) -> bool:
        """Whether XLA may run its own code between programs of a mesh.

        Programs that wait for other devices would have to run in the same order on all.
        """

    def is_large(self, artefact: Artefact) -> bool:
        """Whether a program on one device is so much work that it is dispatched asynchronously."""
