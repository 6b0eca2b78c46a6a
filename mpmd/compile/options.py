"""What the user may say about compiling fragments, for all of them alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

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
        float_jitter: regular expression on the values that are made a little wrong, to find what is fragile;
            empty for none.
        kernel_overrides: a folder of kernels in LLVM's assembly that take the place of generated ones.
        memory_bytes: memory of a device; values are computed again where a fragment would need more than is
            left beside what is alive meanwhile.  0 sets no limit.
        cores: for each mesh on CPU the cores that work for it; a mesh without has one, whichever that is.
    """

    dump: Dump | None = None
    cache: DiskCache | None = None
    pass_options: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    attention_stitching: str = "auto"
    float_jitter: str = ""
    kernel_overrides: Path | None = None
    memory_bytes: int = 0
    cores: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that differs where the same fragment may become other code."""
        attention = f"attention={self.attention_stitching}"
        jitter = f"jitter={self.float_jitter}"
        return f"{self.pass_options} {sorted(self.disable_passes)} {attention} {jitter} {self.memory_bytes}"


DEFAULTS = CompileOptions()
