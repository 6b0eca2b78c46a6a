"""What travels to a machine with a GPU: programs and variants of kernels, compiled, in one folder.

    FOLDER/pack.json           the GPU that it is for, versions, what did not compile
    FOLDER/NAME.program        a program: its fragment and its artefact
    FOLDER/NUMBER.variants     kernels that compute the same in several ways

PTX and texts stay behind: they are larger than the machine code.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mpmd.compile.artefact import Artefact
from mpmd.compile.backends.native_gpu.target import GpuCode, GpuTarget, gpu_code
from mpmd.compile.backends.native_gpu.triton.compile_kernels import Cubin
from mpmd.compile.backends.native_gpu.tuning.tile_candidates import CompiledWay
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.llvm.cpu import host_target

MAX_PACK_BYTES = 64 << 20
_FACTS = "pack.json"


class TravellingPack:
    """The folder.

    Args:
        folder: where it is, or is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def facts(self) -> dict[str, Any]:
        """What it is for."""
        return dict(json.loads((self.folder / _FACTS).read_text()))

    @property
    def is_here(self) -> bool:
        """Whether it was prepared to the end."""
        return (self.folder / _FACTS).exists()

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def begin(self) -> None:
        """Makes an empty folder, or removes what an earlier preparation left in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for pattern in (_FACTS, "*.program", "*.variants"):
            for path in self.folder.glob(pattern):
                path.unlink()

    def finish(self, facts: dict[str, Any]) -> None:
        """Writes what it is for."""
        (self.folder / _FACTS).write_text(json.dumps(facts, indent=1) + "\n")

    # -- programs
    def put_program(self, name: str, fragment: FragmentModule, made: Artefact) -> int:
        """Writes a program; its bytes."""
        code: Any = made.code
        cubins = {name: without_text(cubin) for name, cubin in code.cubins.items()}
        travels = dataclasses.replace(
            made, code=GpuCode(code.program, cubins, code.handler, b""), texts={}
        ).to_bytes()
        return self._write(f"{name}.program", (fragment, travels, host_target().key()))

    def program(self, name: str, target: GpuTarget) -> tuple[FragmentModule, Artefact]:
        """A program; its handler is compiled again where another CPU prepared it.

        Raises:
            FileNotFoundError: it did not compile.
        """
        fragment, travelled, host = self._read(f"{name}.program")
        made = Artefact.from_bytes(travelled, target)
        code = made.code
        assert isinstance(code, GpuCode)
        if host != host_target().key():
            made = dataclasses.replace(made, code=gpu_code(code.program, code.cubins))
        return fragment, made

    # -- variants
    def put_variants(self, number: int, variants: Sequence[CompiledWay]) -> int:
        """Writes some variants; their bytes."""
        travels = [
            dataclasses.replace(
                variant,
                launches=tuple(
                    dataclasses.replace(each, cubin=without_text(each.cubin)) for each in variant.launches
                ),
            )
            for variant in variants
        ]
        return self._write(f"{number:03}.variants", travels)

    def variants(self) -> Iterator[list[CompiledWay]]:
        """Some at a time, in the order in which they were written."""
        for path in sorted(self.folder.glob("*.variants")):
            yield self._read(path.name)

    def _write(self, name: str, content: Any) -> int:
        data = zlib.compress(pickle.dumps(content), 6)
        (self.folder / name).write_bytes(data)
        return len(data)

    def _read(self, name: str) -> Any:
        return pickle.loads(zlib.decompress((self.folder / name).read_bytes()))


def without_text(cubin: Cubin) -> Cubin:
    """Machine code without its PTX."""
    return dataclasses.replace(cubin, ptx="")
