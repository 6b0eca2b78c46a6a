"""What the user may say about compiling fragments, for all of them alike."""

from __future__ import annotations

import dataclasses

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
        attention_stitching: `auto` or `off`: whether native code computes attention in one kernel.
    """

    dump: Dump | None = None
    cache: DiskCache | None = None
    pass_options: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    attention_stitching: str = "auto"

    @property
    def key(self) -> str:
        """Text that differs where the same fragment may become other code."""
        return f"{self.pass_options} {sorted(self.disable_passes)} attention={self.attention_stitching}"


DEFAULTS = CompileOptions()
