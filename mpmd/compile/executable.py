"""The interface of backends: an executable runs a fragment on the arrays of one mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from mpmd.compile.fragment import FragmentModule
from mpmd.errors import CompileError

_NATIVE_TEXTS = ("buffers", "memory", "thunks", "kernels", "costs", "bars", "llvm", "assembly")
_GPU_TEXTS = ("launches", "triton", "ptx")
TEXTS = ("stablehlo", "hlo", "clusters", *_NATIVE_TEXTS, *_GPU_TEXTS)
"""The words of `Executable.as_text`; most of them apply to native code only."""


def unknown_text(what: str, of: str) -> str:
    """The text for a word that does not apply to a fragment, if it applies to others.

    Raises:
        CompileError: no fragment has such a text.
    """
    if what not in TEXTS:
        raise CompileError(
            f"there is no text {what!r} of a fragment\n  there are {', '.join(map(repr, TEXTS))}"
        )
    return f"// {of} have no text {what!r}\n"


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Bytes per device that running a fragment takes.  `aliased` bytes are counted in both ends."""

    arguments: int = 0
    results: int = 0
    aliased: int = 0
    temporaries: int = 0
    code: int = 0


class Executable(Protocol):
    """A compiled fragment.

    If its fragment requires a token after the results, it has an attribute `has_token`.
    """

    @property
    def fragment(self) -> FragmentModule:
        """The source of the executable."""

    @property
    def backend(self) -> str:
        """Name of the backend that compiled it."""

    @property
    def name(self) -> str:
        """The fragment's name."""

    def __call__(self, *arrays: Any) -> Sequence[Any]:
        """Starts the fragment on arrays of its mesh and returns its results, which may not be ready yet.

        Elements of the arrays must be in the default order: not every executable checks that.
        """

    def as_text(self, what: str = "hlo") -> str:
        """The fragment as one of `TEXTS`; a remark if it has no such text.

        Raises:
            CompileError: another word.
        """

    def cost_analysis(self) -> dict[str, float]:
        """At least `flops` and `bytes accessed`."""

    def memory_analysis(self) -> MemoryStats:
        """Its memory."""


class Backend(Protocol):
    """A way to compile fragments."""

    @property
    def name(self) -> str:
        """Its name."""

    def compile(self, fragment: FragmentModule, mesh: Any) -> Executable:
        """Compiles for the devices of a `jax.sharding.Mesh`.

        Raises:
            CompileError: it cannot; names the fragment.
        """

    def relocate(self, executable: Any, fragment: FragmentModule, mesh: Any) -> Executable | None:
        """An executable for a fragment that differs only in the devices of its mesh from a compiled one.

        None if the fragment has to be compiled again.
        """
