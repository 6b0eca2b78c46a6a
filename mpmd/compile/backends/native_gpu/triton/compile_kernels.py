"""Triton source to machine code: in worker processes, each text once, kept on disk with the fragments.

Triton runs in processes of its own (`worker.py`), as many as there are cores, started when they are needed:
the process that compiles a user's program imports no Triton.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from mpmd.compile.backends.native_gpu.triton import worker
from mpmd.compile.backends.native_gpu.triton.operations import PRELUDE
from mpmd.compile.backends.native_gpu.triton.triton_kernels import PrintedKernel
from mpmd.compile.cache import DiskCache, key_of
from mpmd.errors import CompileError
from mpmd.support.resources import once

ANSWERED = ("name", "code", "ptx", "shared_bytes", "threads")
"""The process's answer about a kernel's code; the rest is read in it."""
_SECTION_TABLE, _SECTION_COUNTS = 0x28, 0x3A
"""Where an ELF file of 64 bits says where its sections are, and how large and many; and which has names."""
_ENTRY, _SIZED, _FRAME_SIZE = 4, 4, 0x11


@dataclasses.dataclass(frozen=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
        name: of its function; it takes its pointers and two more, which are null.
        code: an ELF file.
        ptx: the text before it.
        shared_bytes: of shared memory that a program needs.
        threads: of a program.
        stack_bytes: of a thread, for values that have no register.
    """

    name: str
    code: bytes
    ptx: str
    shared_bytes: int
    threads: int
    stack_bytes: int


def request_of(kernel: PrintedKernel, capability: int) -> dict[str, Any]:
    """The request that the process gets for a kernel.

    Args:
        kernel: the kernel.
        capability: of the GPU: 80, 90, 100.
    """
    names = [f"p{k}" for k in kernel.operands]
    return {
        "name": kernel.name,
        "source": kernel.source,
        "prelude": PRELUDE,
        "signature": dict(zip(names, kernel.pointers, strict=True)),
        "aligned": kernel.aligned,
        "warps": kernel.warps,
        "capability": capability,
    }


def cubin_of(kernel: PrintedKernel, answer: dict[str, Any]) -> Cubin:
    """The machine code in an answer.

    Raises:
        CompileError: Triton does not compile the kernel, or its code needs memory that no launch gives.
    """
    if "error" in answer:
        raise CompileError(
            f"Triton does not compile kernel {kernel.name}: {answer['error']}\n{kernel.source}"
        )
    if answer["scratch_bytes"]:
        raise CompileError(
            f"kernel {kernel.name} needs {answer['scratch_bytes']} bytes of Triton's own memory"
        )
    return Cubin(**{name: answer[name] for name in ANSWERED}, stack_bytes=stack_bytes(answer["code"]))


def stack_bytes(code: bytes) -> int:
    """The frames of a cubin's functions, the largest: the assembler writes them into section `.nv.info`.

    An entry there is a format, an attribute, and the length of a value, or a value of two bytes.
    """
    (table,) = struct.unpack_from("<Q", code, _SECTION_TABLE)
    size, count, names = struct.unpack_from("<3H", code, _SECTION_COUNTS)
    sections = [struct.unpack_from("<2I4Q", code, table + k * size) for k in range(count)]
    strings, frames = sections[names][4], [0]
    for name, _, _, _, begin, length in sections:
        at, end = begin, begin + length
        if code[strings + name :].partition(b"\0")[0] != b".nv.info":
            continue
        while at < end:
            form, attribute, value = struct.unpack_from("<2BH", code, at)
            at += _ENTRY
            if form == _SIZED:
                if attribute == _FRAME_SIZE:
                    frames.append(struct.unpack_from("<2I", code, at)[1])
                at += value
    return max(frames)


_TRIES = 2  # a process may have ended because it had no work
_LAST_CHARACTERS = 2000


class CompilerProcesses:
    """Processes, each with one kernel at a time.

    Args:
        count: how many there may be.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._room = threading.BoundedSemaphore(count)
        self._idle: collections.deque[_CompilerProcess] = collections.deque()
        atexit.register(self.close)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer of a process to a request; waits until one has no work.

        Raises:
            CompileError: no process starts, or it ends without an answer.
        """
        with self._room:
            for _ in range(_TRIES):
                process = self._next()
                answer = process.answer(request)
                if answer is not None:
                    self._idle.append(process)
                    return answer
                last = process.end()
            raise CompileError(f"a process that compiles GPU kernels has ended\n{last}".rstrip())

    def _next(self) -> _CompilerProcess:
        while self._idle:
            process = self._idle.pop()
            if process.runs:
                return process
            process.end()
        return _CompilerProcess()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().end()


class _CompilerProcess:
    def __init__(self) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is open as long as the process runs
        try:
            # -P: modules beside the script must not hide others
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(worker.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=_environment(),
            )  # fmt: skip
        except OSError as error:
            raise CompileError(f"no process starts that could compile GPU kernels: {error}") from error

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def answer(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Its answer; None if it has ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            worker.write(stdin, request)  # type: ignore[arg-type]
            return worker.read(stdout)  # type: ignore[arg-type]
        except OSError:
            return None

    def end(self) -> str:
        """Ends it; returns the end of its error output."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # a request is still in the buffer
                    stream.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._errors:
            self._errors.seek(0)
            return self._errors.read().decode(errors="replace")[-_LAST_CHARACTERS:]


def _environment() -> dict[str, str]:
    """That of this process, without what changes how Triton works, and with the modules that it finds."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_") or "PTXAS" in k}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@once
def shared_workers() -> CompilerProcesses:
    affinity = getattr(os, "sched_getaffinity", None)
    return CompilerProcesses(len(affinity(0)) if affinity is not None else os.cpu_count() or 1)


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
            futures = {
                name: pool.submit(_compiled, kernel, capability, version, cache)
                for name, kernel in kernels.items()
            }
            return {name: future.result() for name, future in futures.items()}


_KEPT: OrderedDict[str, Future[Cubin]] = OrderedDict()
_LOCK = threading.Lock()


def _compiled(kernel: PrintedKernel, capability: int, version: str, cache: DiskCache | None) -> Cubin:
    """A kernel's code, known to this process, from disk, or new; of two threads that want it one compiles."""
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
        cubin = _from_disk(key, cache)
        if cubin is None:
            cubin = cubin_of(kernel, shared_workers().answer(request_of(kernel, capability)))
            if cache is not None:
                cache.put(key, pickle.dumps(dataclasses.astuple(cubin)))
        future.set_result(cubin)
        return cubin
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
