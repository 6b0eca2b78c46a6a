"""Options for compiling fragments, the same for all of them, with the folder of dumps among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from mpmd.brief import brief
from mpmd.compile.cache import DiskCache
from mpmd.compile.fragment import FragmentModule


@dataclasses.dataclass(frozen=True)
class Dump:
    """Settings of the dump.

    Attributes:
        folder: where the fragments' folders are made.
        passes: regular expression on the names of the passes after which the module is written.
    """

    folder: Path
    passes: str = ".*"

    __repr__ = brief

    def folder_of(self, fragment: FragmentModule) -> Path:
        return self.folder / fragment.name.replace("/", "_")

    def write(self, fragment: FragmentModule, name: str, text: str) -> None:
        folder = self.folder_of(fragment)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def write_all(self, fragment: FragmentModule, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            self.write(fragment, name, text)


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """How fragments are compiled.

    Attributes:
        dump: where to write the text after every step of compilation; None writes nothing.
        cache: where native code is kept between processes; None keeps nothing.
        pass_options: options of single passes over HLO, `"hlo-algebraic-simplifier{layout-sensitive=true}"`.
        disable_passes: names of passes over HLO to leave out.
        attention_stitching: `auto` or `off`: whether native code computes attention in one kernel.
        float_jitter: regular expression on the values that are perturbed slightly, to find fragile programs;
            empty for none.
        kernel_overrides: a folder of kernels in LLVM's assembly that replace generated ones.
        memory_bytes: memory of a device; values are rematerialised where a fragment would need more than is
            left beside the live buffers.  0 sets no limit.
        command_buffers: whether programs on GPUs are captured as graphs and replayed.
        cores: for each mesh on CPU its cores; a mesh that is missing has an arbitrary one.
    """

    dump: Dump | None = None
    cache: DiskCache | None = None
    pass_options: tuple[str, ...] = ()
    disable_passes: tuple[str, ...] = ()
    attention_stitching: str = "auto"
    float_jitter: str = ""
    kernel_overrides: Path | None = None
    memory_bytes: int = 0
    command_buffers: bool = True
    cores: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    __repr__ = brief

    @property
    def key(self) -> str:
        """Text that differs where the same fragment may compile to other code."""
        attention = f"attention={self.attention_stitching}"
        jitter = f"jitter={self.float_jitter}"
        return f"{self.pass_options} {sorted(self.disable_passes)} {attention} {jitter} {self.memory_bytes}"


DEFAULTS = CompileOptions()
