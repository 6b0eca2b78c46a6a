"""Arrays of one process in files of orbax: written and read without the other processes.

Orbax saves arrays that belong to all processes together.  Here every array belongs to some, so that each
process has an orbax checkpoint of its own in a folder of the checkpoint, and `checkpoint` puts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpmd.errors import CheckpointError

FILE_ERRORS = (OSError, ValueError, RuntimeError, KeyError)
"""What orbax and tensorstore raise for folders that cannot be written, and for files that cannot be read."""

_FULL = re.compile(r"RESOURCE_EXHAUSTED|No space left on device|Disk quota exceeded|File too large")


def write(folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays, or raises one of `FILE_ERRORS`; the folder exists once it is whole."""
    ocp = orbax()
    with _checkpointer(ocp) as checkpointer, _without_tracebacks():
        checkpointer.save(folder, ocp.args.PyTreeSave(dict(arrays)))


def read(folder: Path, name: str) -> np.ndarray:
    """One of the arrays, or one of `FILE_ERRORS`."""
    ocp = orbax()
    how = {name: ocp.RestoreArgs(restore_type=np.ndarray)}
    wanted = ocp.args.PyTreeRestore(item={name: 0}, restore_args=how, partial_restore=True)
    with _checkpointer(ocp) as checkpointer, _without_tracebacks():
        return np.asarray(checkpointer.restore(folder, wanted)[name])


def can_hold(dtype: str) -> bool:
    """Whether files can hold arrays of a dtype of this name; random keys are written as integers."""
    import tensorstore

    if dtype.startswith("key<"):
        return True
    try:
        return np.dtype(dtype).kind in "biufcV" and tensorstore.dtype(np.dtype(dtype)).numpy_dtype == dtype
    except (TypeError, ValueError):
        return False


def digest(array: np.ndarray) -> int:
    """A checksum of the bytes of an array: orbax does not notice a byte that changed."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def reason(error: BaseException) -> str:
    """What went wrong, in a line; tensorstore names the keys and files of a database before that."""
    text = " ".join(str(error).split())
    return (
        f"the disk is full ({text[-200:]})" if _FULL.search(text) else f"{type(error).__name__}: {text[:300]}"
    )


def orbax() -> Any:
    """The package of that name.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise CheckpointError(
            "checkpoints need orbax-checkpoint, which is not installed\n  pip install orbax-checkpoint"
        ) from error
    return ocp


def _checkpointer(ocp: Any) -> Any:
    """Of this process alone: orbax then waits for no other."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix=f"process_{index}"
    )
    handler = ocp.PyTreeCheckpointHandler(
        multiprocessing_options=alone, type_handler_registry=_handlers(), use_ocdbt=True
    )
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@functools.cache
def _handlers() -> Any:
    """Orbax's handlers, one of which writes NumPy arrays in every process: its own does in process 0 only."""
    import tensorstore
    from orbax.checkpoint import future, type_handlers

    async def put(value: np.ndarray, info: Any) -> None:
        await info.await_path_creation()
        base = f"file://{(info.parent_dir / f'ocdbt.process_{jax.process_index()}').as_posix()}/"
        store = {"driver": "ocdbt", "base": base, "path": info.name}
        metadata = {"compressor": {"id": "zstd"}, "shape": value.shape, "chunks": value.shape}
        array = await tensorstore.open(
            {"driver": "zarr", "kvstore": store, "metadata": metadata},
            dtype=value.dtype,
            create=True,
            context=info.ts_context,
        )
        await array.write(value)

    class EveryProcess(type_handlers.NumpyHandler):
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            await asyncio.gather(*map(put, values, infos))
            return [future.NoopFuture()]

    others = (jax.Array, type_handlers.ArrayHandler())  # orbax warns if there is none
    return type_handlers.create_type_handler_registry((np.ndarray, EveryProcess()), others)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keeps out of the log the tracebacks of errors that orbax logs in its threads and then raises."""

    def has_none(record: logging.LogRecord) -> bool:
        return not record.exc_info

    log = logging.getLogger("absl")
    log.addFilter(has_none)
    try:
        yield
    finally:
        log.removeFilter(has_none)
