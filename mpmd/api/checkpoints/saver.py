"""Checkpoints that are written while the next steps run.

A save is divided: what all processes must agree about, and a copy of the state, hold the step up; a thread
in each process writes.  No thread may exchange texts with other processes, because steps do so at the same
time.  So each leaves a note in the folder when its pieces are written, and process 0 waits for all notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from mpmd.api.checkpoints import files
from mpmd.api.checkpoints.folder import Keep
from mpmd.api.checkpoints.restore import SaveRequest
from mpmd.api.checkpoints.together import all_processes
from mpmd.api.checkpoints.writing import CheckpointWriter, Pieces
from mpmd.brief import clipped
from mpmd.errors import CheckpointError
from mpmd.runtime.processes.exchange import Alike
from mpmd.runtime.processes.world import world
from mpmd.support.user_code import warn_user

_POLL_SECONDS = 0.05
_LOWEST_PRIORITY = 19


class Saver:
    """Writes checkpoints in the background.

        with mpmd.checkpoint.Saver("checkpoints", keep=3) as saver:
            for step in range(steps):
                state, loss = compiled(state, batch)
                if step % 1000 == 0:
                    saver.save(step, state, {"loss": float(loss)})

    `save` returns once the state is copied to host memory; the state may then be donated.  The checkpoint is
    complete some time later, or not there; `wait`, the next `save` and the end of the `with` statement wait
    for it, and raise if it could not be written.  In several processes all must call them.

    The copy is kept for the next one: as much host memory as this process's part of the state.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int | Keep = 2) -> None:
        """Takes the folder, and which checkpoints stay, as `mpmd.checkpoint.save` does."""
        self._folder, self._keep = folder, keep
        self._copies: Pieces = {}
        self._entered = False
        self._pending: _Background | None = None

    def __repr__(self) -> str:
        writes = "" if self._pending is None else f", {self._pending.writer.what}"
        return clipped(f"Saver({str(self._folder)!r}, keep={self._keep!r}){writes}")

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any] | None = None, *, metric: float | None = None
    ) -> None:
        """Begins to write a checkpoint; the arguments are those of `mpmd.checkpoint.save`.

        Raises:
            CheckpointError: an argument could not be restored; or the checkpoint before this one could not
                be written.
            PeerError: another process failed, or saves something else.
        """
        if not self._entered:
            raise CheckpointError(
                "a Saver saves within its with statement, whose end waits for what it writes\n"
                "  with mpmd.checkpoint.Saver(...) as saver: ..."
            )
        self.wait()
        requests: list[SaveRequest] = []
        with all_processes("mpmd.checkpoint.Saver.save") as processes, contextlib.ExitStack() as undo:
            processes.do(
                "save the state",
                lambda: requests.append(SaveRequest.of(self._folder, step, state, extra, metric, self._keep)),
            )
            processes.compare(Alike("saves something else", requests[0].text()))
            writer = CheckpointWriter(requests[0], undo)
            claims = processes.do(writer.what, lambda: writer.begin(self._copies))
            processes.alike(lambda: writer.choose(claims))
            self._pending = _Background(writer, undo.pop_all())
        self._pending.start()

    def wait(self) -> None:
        """Returns when the last checkpoint is complete.

        Raises:
            CheckpointError: it could not be written; older checkpoints stay.
            PeerError: another process failed.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with all_processes("mpmd.checkpoint.Saver.wait") as processes:
            processes.do(pending.writer.what, pending.result)
        if jax.process_index() == 0:
            warn_user(pending.writer.notes)

    def __enter__(self) -> Saver:
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered = False
        try:
            if error is None:
                self.wait()
            elif self._pending is not None:  # the other processes may be elsewhere
                try:
                    self._pending.result()
                except (CheckpointError, *files.FILE_ERRORS) as failed:
                    error.add_note(f"{type(failed).__name__}: {failed}")
        finally:
            self._copies.clear()


class _Background(threading.Thread):
    """Writes a checkpoint that has begun.

    Attributes:
        writer: the checkpoint.
    """

    def __init__(self, writer: CheckpointWriter, until_complete: contextlib.ExitStack) -> None:
        super().__init__(name="mpmd-checkpoint", daemon=True)
        self.writer, self._until_complete = writer, until_complete
        self._failure: Exception | None = None

    def result(self) -> None:
        """Waits for it, and raises if it failed."""
        self.join()
        if self._failure is not None:
            raise self._failure

    def run(self) -> None:
        _lower_priority()
        try:
            with self._until_complete:
                self._write()
        except Exception as error:  # raised by `result`
            self._failure = error

    def _write(self) -> None:
        joined = world()
        if joined is None:
            self.writer.complete([self.writer.write()])
            return
        try:
            note: dict[str, Any] = {"written": self.writer.write()}
        except Exception as error:
            if jax.process_index():
                reason = str(error) if isinstance(error, CheckpointError) else files.reason(error)
                self._leave(
                    {"error": f"process {joined.index} (host {joined.hosts[joined.index]!r}): {reason}"}
                )
            raise
        if jax.process_index():
            self._leave(note)
            return
        others = [self._note(process) for process in range(1, joined.count)]
        self.writer.complete([note["written"], *(other["written"] for other in others)])

    def _path(self, process: int) -> Path:
        return self.writer.folder / f"note_{process}"

    def _leave(self, note: dict[str, Any]) -> None:
        """Writes the note of this process, complete or not there."""
        path = self._path(jax.process_index())
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(note))
        part.rename(path)

    def _note(self, process: int) -> dict[str, Any]:
        """Waits for the note of another process, and removes it.

        Raises:
            CheckpointError: that process could not write, or the processes cannot go on.
        """
        path, joined = self._path(process), world()
        while not path.exists():
            if joined is not None and joined.failure is not None and not path.exists():
                raise CheckpointError(f"cannot {self.writer.what}: process {process} did not write its part")
            time.sleep(_POLL_SECONDS)
        note: dict[str, Any] = json.loads(path.read_text())
        path.unlink()
        if "error" in note:
            raise CheckpointError(note["error"])
        return note


def _lower_priority() -> None:
    """Lets all other threads go first, where threads have priorities of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
