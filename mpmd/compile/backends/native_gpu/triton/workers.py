"""The processes that compile kernels: as many as there are cores, started when they are needed."""

from __future__ import annotations

import atexit
import collections
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from mpmd.compile.backends.native_gpu.triton import worker
from mpmd.errors import CompileError
from mpmd.support.memoisation import once

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
    """One process."""

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
        """Ends it; the end of what it wrote about errors."""
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
