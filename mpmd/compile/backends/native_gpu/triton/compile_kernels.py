"""Kernels to machine code: each text once, in processes beside this one, kept on disk with the fragments."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import pickle
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from mpmd.compile.backends.native_gpu.triton.cubin import Cubin, cubin_of, request_of
from mpmd.compile.backends.native_gpu.triton.source import PRELUDE
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.backends.native_gpu.triton.workers import shared_workers
from mpmd.compile.cache import DiskCache, key_of
from mpmd.errors import CompileError

_MAX_KEPT = 1024
"""Kernels whose code this process keeps: some 20 KB each."""


class KernelCompiler(Protocol):
    """What compiles kernels."""

    def key(self) -> str:
        """Text that differs whenever its code may differ."""

    def problem(self) -> str:
        """Why it compiles nothing here, or ""."""

    def compile(
        self, kernels: Mapping[str, PrintedKernel], capability: int, cache: DiskCache | None
    ) -> dict[str, Cubin]:
        """The machine code of kernels, by their names.

        Args:
            kernels: by name.
            capability: of the GPU: 80, 90, 100.
            cache: where their code is kept, if it is.

        Raises:
            CompileError: one does not compile.
        """


@dataclasses.dataclass(frozen=True)
class TritonCompiler:
    """Triton; without a GPU, since ptxas comes with it."""

    def key(self) -> str:
        try:
            return f"triton {importlib.metadata.version('triton')}"
        except importlib.metadata.PackageNotFoundError:
            return "no triton"

    def problem(self) -> str:
        """See `KernelCompiler`."""
        missing = importlib.util.find_spec("triton") is None
        return (
            'GPU kernels are compiled by Triton, which is missing: pip install "mpmd[gpu]"' if missing else ""
        )

    def compile(
        self, kernels: Mapping[str, PrintedKernel], capability: int, cache: DiskCache | None = None
    ) -> dict[str, Cubin]:
        """See `KernelCompiler`."""
        if not kernels:
            return {}
        if why := self.problem():
            raise CompileError(why)
        version = self.key()
        with ThreadPoolExecutor(shared_workers().count) as pool:
            made = {
                name: pool.submit(_compiled, kernel, capability, version, cache)
                for name, kernel in kernels.items()
            }
            return {name: future.result() for name, future in made.items()}


_KEPT: OrderedDict[str, Future[Cubin]] = OrderedDict()
_LOCK = threading.Lock()


def _compiled(kernel: PrintedKernel, capability: int, version: str, cache: DiskCache | None) -> Cubin:
    """A kernel's code: that of this process, of the disk, or new; of two threads one compiles it."""
    key = key_of(
        "cubin", version, capability, kernel.source, kernel.pointers, kernel.aligned, kernel.warps, PRELUDE
    )
    with _LOCK:
        future, first = _KEPT.get(key), key not in _KEPT
        if future is None:
            future = _KEPT[key] = Future()
        _KEPT.move_to_end(key)
        if len(_KEPT) > _MAX_KEPT:
            _KEPT.popitem(last=False)
    if not first:
        return future.result()
    try:
        made = _from_disk(key, cache)
        if made is None:
            made = cubin_of(kernel, shared_workers().answer(request_of(kernel, capability)))
            if cache is not None:
                cache.put(key, pickle.dumps(dataclasses.astuple(made)))
        future.set_result(made)
        return made
    except BaseException as error:
        with _LOCK:
            _KEPT.pop(key, None)
        future.set_exception(error)
        raise


def _from_disk(key: str, cache: DiskCache | None) -> Cubin | None:
    data = cache.get(key) if cache is not None else None
    if data is None or cache is None:
        return None
    try:
        return Cubin(*pickle.loads(data))
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        cache.discard(key, f"it is not the machine code of a kernel: {error}")
        return None
