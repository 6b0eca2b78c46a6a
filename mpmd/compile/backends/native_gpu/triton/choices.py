"""Which tiles the kernels of plans get: measured on a GPU, else by rules.

    product_ab12cd34 x192: 128x256x64 w8 s4      rows, columns and depth of a tile, warps, stages
    attention_ab12cd34 x768: 128x64 w8 s3        positions of a program and of an iteration
    column_ab12cd34 x264: p4096 g528 w8          points of a tile, programs that keep the device busy
    loop_ab12cd34 x384: own                      the tile by rules is the fastest

Each line names a kernel as it is by rules, with its programs: where its text is another one, the line
means nothing.

The file of a kind of GPU is in the folder of the compile cache, and is read with each backend.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel
from mpmd.compile.backends.native_gpu.triton.attention import attention_kernels
from mpmd.compile.backends.native_gpu.triton.compile_kernels import KernelCompiler
from mpmd.compile.backends.native_gpu.triton.products import product_kernel
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PlanKernels, PrintedKernel, plan_kernels
from mpmd.compile.cache import check_folder, read_own_file
from mpmd.compile.kernels.kernel_plan import KernelPlan
from mpmd.compile.kernels.product_plans import AttentionPlan, MatmulPlan
from mpmd.errors import CompileError
from mpmd.support.resources import once

OWN = "own"
"""The choice of the tile by rules."""
_SIZES = {"product": r"\d+x\d+x\d+ w\d+ s\d+", "attention": r"\d+x\d+ w\d+ s\d+"}
_OTHERS = r"p\d+ g\d+ w\d+"
_LINE = re.compile(r"((\w+)_[0-9a-f]{8} x\d+): (.*)")


def _is_tile(kind: str, text: str) -> bool:
    """Whether a text is a tile of a kind of kernels: sides and warps are powers of two."""
    sides = [int(number) for number in re.findall(r"(?<![sg\d])\d+", text)]
    form = f"{OWN}|{_SIZES.get(kind, _OTHERS)}"
    return bool(re.fullmatch(form, text)) and all(side.bit_count() == 1 for side in sides)


def kernel_key(kernel: PrintedKernel) -> str:
    """What a line says of a kernel: its name and its programs."""
    return f"{kernel.name} x{kernel.grid}"


@dataclasses.dataclass(frozen=True)
class MeasuredTiles:
    """The lines of a table, in order; for each kernel one.

    Attributes:
        lines: kernels, see `kernel_key`, and their tiles.
    """

    lines: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(lines: Iterable[tuple[str, str]]) -> MeasuredTiles:
        """A table of some lines; of two for a kernel the later counts."""
        return MeasuredTiles(tuple(sorted(dict(lines).items())))

    @staticmethod
    def parsed(text: str) -> MeasuredTiles:
        """The table in a text; lines that begin with `#` say nothing.

        Raises:
            CompileError: one says something else; names it.
        """
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            if line.startswith("#") or not line.strip():
                continue
            match = _LINE.fullmatch(line)
            if match is None or not _is_tile(match[2], match[3]):
                raise CompileError(
                    f"line {number} is not a kernel with its tile: {line!r}\n"
                    "  expected such as 'product_ab12cd34 x192: 128x256x64 w8 s4'"
                )
            lines.append((match[1], match[3]))
        return MeasuredTiles.of(lines)

    def text(self) -> str:
        return "".join(f"{kernel}: {tile}\n" for kernel, tile in self.lines)

    @functools.cached_property
    def version(self) -> str:
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    @functools.cached_property
    def _tiles(self) -> dict[str, str]:
        return dict(self.lines)

    def sizes(self, kernel: PrintedKernel) -> tuple[int, ...]:
        """The sizes of a kernel's tile; none if it was not measured."""
        return tuple(map(int, re.findall(r"\d+", self._tiles.get(kernel_key(kernel), ""))))


@dataclasses.dataclass(frozen=True)
class KernelChoices:
    """The kernels of plans on a GPU.

    Attributes:
        programs: how many keep it busy, two for each multiprocessor.
        tiles: that were measured.
    """

    programs: int
    tiles: MeasuredTiles = dataclasses.field(default_factory=MeasuredTiles)

    def of_plan(self, plan: KernelPlan) -> PlanKernels:
        """See `plan_kernels`."""
        own = plan_kernels(plan, self.programs)
        sizes = self.tiles.sizes(own.kernels[0]) if own.kernels else ()
        return sized_plan(plan, *sizes) if sizes else own

    def of_product(self, plan: MatmulPlan) -> PlanKernels:
        """See `product_kernel`."""
        own = product_kernel(plan, self.programs // 2)
        sizes = self.tiles.sizes(own.kernels[0])
        return product_kernel(plan, self.programs // 2, sizes) if sizes else own

    def of_attention(self, plan: AttentionPlan) -> PlanKernels:
        """See `attention_kernels`."""
        own = attention_kernels(plan)
        first, second = (self.tiles.sizes(own.kernels[k]) for k in (0, -1))
        return attention_kernels(plan, (first, second)) if first or second else own


def sized_plan(plan: KernelPlan, points: int, programs: int, warps: int) -> PlanKernels:
    """The kernels of a plan with some sizes; a second one that finishes sums is by rules."""
    kernels = plan_kernels(plan, programs, points)
    first, *rest = kernels.kernels
    return dataclasses.replace(kernels, kernels=(dataclasses.replace(first, warps=warps), *rest))


log = logging.getLogger("mpmd.compile")


def table_file(folder: Path, gpu: GpuModel, compiler: KernelCompiler) -> Path:
    """Where the table is: another one for each board or slice, and for each version of the compiler."""
    which = hashlib.sha256(f"{gpu} {compiler.key()}".encode()).hexdigest()[:8]
    return folder / f"{gpu.device.name}-{which}.tiles"


def read_table(path: Path) -> MeasuredTiles:
    """The table in a file; empty if there is none.

    Raises:
        CompileError: the file has other lines, or another user may have written it.
    """
    try:
        check_folder(path.parent)
        text = read_own_file(path).decode()
    except PermissionError as error:
        raise CompileError(f"measured tiles are not used: {error}") from error
    except UnicodeDecodeError as error:
        raise CompileError(f"measured tiles are not used: {path} has bytes that are not text") from error
    except OSError:
        return MeasuredTiles()
    try:
        return MeasuredTiles.parsed(text)
    except CompileError as error:
        raise CompileError(f"measured tiles are not used: {path}: {error}") from error


def known_table(path: Path) -> MeasuredTiles:
    """The table in a file; empty, with one warning, if it cannot be used."""
    try:
        return read_table(path)
    except CompileError as error:
        _warn(str(error))
        return MeasuredTiles()


@once
def _warn(message: str) -> None:
    log.warning("%s", message)


def write_table(path: Path, table: MeasuredTiles, about: str) -> None:
    """Puts a table in the place of another; `about` is its first line.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_folder(path.parent)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(f"# {about}\n{table.text()}")
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
