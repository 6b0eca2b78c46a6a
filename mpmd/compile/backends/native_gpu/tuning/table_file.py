"""The file of measured tiles of a kind of GPU: in the folder of the compile cache, read with each backend."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from mpmd.compile.backends.native_gpu.gpu_devices import GpuModel
from mpmd.compile.backends.native_gpu.triton.choices import MeasuredTiles
from mpmd.compile.backends.native_gpu.triton.compile_kernels import KernelCompiler
from mpmd.compile.cache import check_folder, read_own_file
from mpmd.errors import CompileError
from mpmd.support.memoisation import once

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
