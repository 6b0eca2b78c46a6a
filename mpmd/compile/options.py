"""What the user may say about compiling fragments, for all of them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from mpmd.compile.cache import DiskCache
from mpmd.compile.dump import Dump


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How fragments are compiled.

    Attributes:
        dump: where to write what every step of compilation makes; None writes nothing.
        cache: where native code is kept between processes; None keeps nothing.
        pass_options: options of single passes over HLO, `"hlo-algebraic-simplifier{approximate=true}"`.
        disable_passes: names of passes over HLO to leave out.
        cores: for each mesh on CPU the cores that work for it; a mesh without has one, whichever that is.
    """

    dump: Dump | None = None
    cache: DiskCache | None = None
    pass_options: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    cores: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that differs where the same fragment may become other code."""
        return f"{self.pass_options} {sorted(self.disable_passes)}"


DEFAULTS = CompileOptions()
